"""Found by `python -m tests.fuzzing`: drawn options raised.

raises StopIteration in rewrites/buffer_reuse.py:regions_in_order

  def program(x1, x2):
      v0, v1 = torch.topk(x1, 1, -1)
      v2 = x1[x2]
      v4 = F.gelu(v2, approximate="tanh")
      v5 = F.layer_norm(x1, x1.shape[-1:])
      v6 = v0.add_(2)
      return (v6, v4, v5,)

A region of views alone is not fused; the last of them moved, and then a copy to the host was scheduled.
"""

from tests.fuzzing.campaign import judge
from tests.fuzzing.configs import Options, configured
from tests.programs.programs import Input, Program, Step

PROGRAM = Program(
    inputs=(
        Input(name="x1", shape=(8, 8), dtype="bfloat16", grad=True, layout="contiguous", alias=""),
        Input(name="x2", shape=(6,), dtype="int64", grad=False, layout="contiguous", alias=""),
    ),
    body=(
        Step(op="topk", targets=("v0", "v1"), args=("x1",), params=(-1,)),
        Step(op="take_rows", targets=("v2",), args=("x1", "x2"), params=(-2,)),
        Step(op="gelu_tanh", targets=("v4",), args=("v2",), params=()),
        Step(op="layer_norm", targets=("v5",), args=("x1",), params=()),
        Step(op="add_scalar_", targets=("v6",), args=("v0",), params=(2,)),
    ),
    outputs=("v6", "v4", "v5"),
)


def test_options_30000845():
    assert judge(PROGRAM, configured(Options(budget=1, offload=True, recompute="policy any")), excuse=True) == []
