"""Found by `python -m tests.fuzzing`: mem differed from eager.

gradient x1: off by 0.25, allowed 8.96e-06

  def program(x0, x1):
      v0 = x0.copy_(x0)
      v2 = v0.squeeze()
      x0.neg_()
      v3 = torch.minimum(v2, x1)
      return (v3,)
"""

from tests.fuzzing.campaign import judge
from tests.fuzzing.configs import CONFIGS, Options, configured  # noqa: F401
from tests.programs.programs import Input, Program, Region, Step  # noqa: F401

PROGRAM = Program(
    inputs=(
        Input(name="x0", shape=(), dtype="float32", grad=False, layout="contiguous", alias=""),
        Input(name="x1", shape=(2,), dtype="float32", grad=True, layout="contiguous", alias=""),
    ),
    body=(
        Step(op="copy_", targets=("v0",), args=("x0", "x0"), params=()),
        Step(op="squeeze", targets=("v2",), args=("v0",), params=()),
        Step(op="neg_", targets=(), args=("x0",), params=()),
        Step(op="minimum", targets=("v3",), args=("v2", "x1"), params=()),
    ),
    outputs=("v3",),
)


def test_mem_04476372():
    assert judge(PROGRAM, CONFIGS["mem"], excuse=True) == []
