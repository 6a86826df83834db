"""Found by `python -m tests.fuzzing`: mem differed from eager.

raises KeyError in autodiff.py:split_into_forward_and_backward

  def program(x2):
      v0 = torch.einsum("...ij,...kj->...ik", x2, x2)
      v1 = torch.einsum("...ij,...kj->...ik", x2, x2)
      v2 = v1.repeat(2, *([1] * 1))
      v1.relu_()
      return (v0, v2,)
"""

from tests.fuzzing.campaign import judge
from tests.fuzzing.configs import CONFIGS, Options, configured  # noqa: F401
from tests.programs.programs import Input, Program, Region, Step  # noqa: F401

PROGRAM = Program(
    inputs=(Input(name="x2", shape=(1, 1), dtype="float32", grad=True, layout="contiguous", alias=""),),
    body=(
        Step(op="einsum", targets=("v0",), args=("x2",), params=()),
        Step(op="einsum", targets=("v1",), args=("x2",), params=()),
        Step(op="repeat", targets=("v2",), args=("v1",), params=(1,)),
        Step(op="relu_", targets=(), args=("v1",), params=()),
    ),
    outputs=("v0", "v2"),
)


def test_mem_64dbbaf1():
    assert judge(PROGRAM, CONFIGS["mem"], excuse=False) == []
