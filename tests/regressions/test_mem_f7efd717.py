"""Found by `python -m tests.fuzzing`: mem differed from eager.

gradient x1: off by 0.231, allowed 0.135

  def program(x1):
      v1 = torch.cat([x1, x1], -2)
      v5 = v1.add_(0.5)
      return (v1, v5,)
"""

from tests.fuzzing.campaign import judge
from tests.fuzzing.configs import CONFIGS, Options, configured  # noqa: F401
from tests.programs.programs import Input, Program, Region, Step  # noqa: F401

PROGRAM = Program(
    inputs=(Input(name="x1", shape=(1, 1), dtype="float32", grad=True, layout="contiguous", alias=""),),
    body=(
        Step(op="cat_same", targets=("v1",), args=("x1",), params=(-2,)),
        Step(op="add_scalar_", targets=("v5",), args=("v1",), params=(0.5,)),
    ),
    outputs=("v1", "v5"),
)


def test_mem_f7efd717():
    assert judge(PROGRAM, CONFIGS["mem"], excuse=False) == []
