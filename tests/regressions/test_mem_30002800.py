"""Found by `python -m tests.fuzzing`: mem raised.

raises VerificationError in trace/verification.py:verify_final: the forward saves x1, and the backward takes other
values

  def program(x1, x2):
      v0 = x1.clone()
      v3 = x2.zero_()
      v5 = torch.stack([v0, v0], -1)
      return (v5,)

All readers of the clone took a second one, and the first, read by nobody, was planned into the backward.
"""

from tests.fuzzing.campaign import judge
from tests.fuzzing.configs import CONFIGS
from tests.programs.programs import Input, Program, Step

PROGRAM = Program(
    inputs=(
        Input(name="x1", shape=(), dtype="float32", grad=True, layout="contiguous", alias=""),
        Input(name="x2", shape=(6, 1), dtype="float32", grad=False, layout="contiguous", alias=""),
    ),
    body=(
        Step(op="clone", targets=("v0",), args=("x1",), params=()),
        Step(op="zero_", targets=("v3",), args=("x2",), params=()),
        Step(op="stack", targets=("v5",), args=("v0", "v0"), params=(-1,)),
    ),
    outputs=("v5",),
)


def test_mem_30002800():
    assert judge(PROGRAM, CONFIGS["mem"], excuse=True) == []
