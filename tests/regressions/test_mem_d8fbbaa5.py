"""Found by `python -m tests.fuzzing`: mem differed from eager.

raises TypeError in thunder.backward_fn_27:backward_fn: zeros() received an invalid combination of arguments

  def program(x1, x3):
      v1 = x1[-1]
      v3, v4, v5, v6 = torch.unbind(x3, -1)
      logits = torch.tanh(F.linear(v6, v4) / 4.0) * 4.0
      v7 = F.cross_entropy(logits.reshape(-1, v4.shape[0]), x1.reshape(-1), ignore_index=1)
      v8 = v7.reshape((-1,))
      v10 = v7.sub_(v1)
      return (v10, v8,)
"""

from tests.fuzzing.campaign import judge
from tests.fuzzing.configs import CONFIGS, Options, configured  # noqa: F401
from tests.programs.programs import Input, Program, Region, Step  # noqa: F401

PROGRAM = Program(
    inputs=(
        Input(name="x1", shape=(4,), dtype="int64", grad=False, layout="contiguous", alias=""),
        Input(name="x3", shape=(4, 1, 4), dtype="float32", grad=True, layout="contiguous", alias=""),
    ),
    body=(
        Step(op="index_again", targets=("v1",), args=("x1",), params=("-1",)),
        Step(op="unbind", targets=("v3", "v4", "v5", "v6"), args=("x3",), params=(-1,)),
        Step(op="head_softcap", targets=("v7",), args=("v6", "v4", "x1"), params=("mean", ", ignore_index=1")),
        Step(op="reshape", targets=("v8",), args=("v7",), params=((-1,),)),
        Step(op="sub_", targets=("v10",), args=("v7", "v1"), params=()),
    ),
    outputs=("v10", "v8"),
)


def test_mem_d8fbbaa5():
    assert judge(PROGRAM, CONFIGS["mem"], excuse=False) == []
