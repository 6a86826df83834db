"""Attention whose heads of keys are repeated, and which kernel would run it."""

import pytest
import torch
from thunder.executors import sdpaex

from tests.programs.chunk_tools import program_of
from thunder_mem.attention import choice
from thunder_mem.attention.choice import SpdaBackend, _is_flash
from thunder_mem.tiling.heads import _before_repetition

BATCH, KEYS, TIMES, ROWS, SIZE = 2, 3, 4, 5, 8


@pytest.mark.parametrize(
    ("repeated", "found"),
    [
        (lambda k: k[:, :, None].expand(BATCH, KEYS, TIMES, ROWS, SIZE), True),
        (lambda k: k[:, None].expand(BATCH, TIMES, KEYS, ROWS, SIZE), False),
    ],
    ids=["each head in a row", "all heads in turn"],
)
def test_keys_are_found_before_each_is_repeated_in_a_row(repeated, found):
    keys = torch.ones(BATCH, KEYS, ROWS, SIZE)
    program = program_of(lambda k: repeated(k).reshape(BATCH, KEYS * TIMES, ROWS, SIZE), keys)
    last = program.leaves[-1].outputs[0]
    assert (_before_repetition(program.producer, last).shape == keys.shape) is found


@pytest.mark.parametrize(("size", "flash"), [(16, True), (12, False)])
def test_pytorchs_flash_kernel_runs_heads_of_a_multiple_of_eight(monkeypatch, size, flash):
    monkeypatch.setattr(sdpaex, "_fused_sdp_choice", lambda *call: SpdaBackend.FLASH_ATTENTION)
    call = dict.fromkeys(choice._ARGUMENTS, torch.ones(1, 2, 3, size)) | {"is_causal": True, "scale": None}
    assert _is_flash(call) is flash
