"""That programs trace to the same with what the tests leave out of Thunder as with all of it."""

import os
import re
import subprocess
import sys

import pytest
import thunder
import torch
import torch.nn.functional as F
from litgpt import GPT, Config
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.quick_thunder import claimed_once, looked_up_once

SCALE = 3
TABLE = {"a": 2.0}
CONSTANT = torch.linspace(0, 1, 3)


class Training(torch.nn.Module):
    """What guards are made of: buffers, the mode of training, a checkpoint, autocast, class attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1)

    def forward(self, x):
        y = checkpoint(self.linear, x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(y)
        if self.training:
            y = self.dropout(y)
        return F.cross_entropy(self.norm(y.float()), torch.zeros(4, dtype=torch.long))


def globals_and_containers(x, n):
    values, nothing = [x], {}
    for _ in range(len(values) + n):
        values.append(values[-1] * SCALE + TABLE["a"])
    if nothing or not values:
        return x
    return sum(values) * CONSTANT if n else values


def gpt():
    model = GPT(Config.from_name("pythia-14m", n_layer=1, block_size=32, padded_vocab_size=64))
    return model, torch.zeros(1, 16, dtype=torch.long)


PROGRAMS = {
    "training": lambda: (Training(), torch.ones(4, 8)),
    "globals": lambda: (globals_and_containers, torch.ones(3, requires_grad=True), 2),
    "gpt": gpt,
}


def traces() -> list[str]:
    texts = []
    for make in PROGRAMS.values():
        torch.manual_seed(0)
        fn, *args = make()
        jitted = thunder.jit(fn, executors=[])
        jitted(*args)
        for trace in (
            thunder.last_prologue_traces(jitted)[0],
            thunder.last_traces(jitted)[0],
            thunder.last_traces(jitted)[-1],
            thunder.last_backward_traces(jitted)[-1],
        ):
            texts.append(renumbered(re.sub(r"took \d+ \w+|0x\w+", "", str(trace))))
    return texts


def renumbered(text: str) -> str:
    """With values numbered as they come, whatever the width of lines: a pass that is left out would have named more."""
    seen: dict[str, str] = {}
    lines = re.sub(r"\s*\\\n\s*", " ", text)
    return re.sub(r"\bt\d+\b", lambda name: seen.setdefault(name[0], f"t{len(seen)}"), lines)


@pytest.mark.slow
def test_traces_are_thunders_own():
    script = "import thunder_mem; from tests.system.test_quick_thunder import traces; print('\\0'.join(traces()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    plain = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    with looked_up_once(), claimed_once():
        assert "\0".join(traces()) == plain.stdout.rstrip("\n")
