"""Tests of Thunder that cannot pass with `MemEfficient` injected, each with the reason.

All of them run all the same: one that passes no longer stands here by right, and `run.py` says so.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["EXCLUDED", "reason"]

# By pattern of a test's id, and of the side.
EXCLUDED: dict[tuple[str, str], str] = {
    ("test_check_trace.py::test_debug_option", "[dp]*"): (
        "a transform breaks the trace on purpose and the test expects Python's UnboundLocalError at run time; "
        "MemEfficient(strict=True) refuses the trace before, by the name that nothing produces"
    ),
    ("test_jit_general.py::test_litgpt", "[dp]*"): (
        "asks a bfloat16 model for eager's very bits (1e-5 beside 1.6 %); where layer norms and GELU run as open "
        "operations they round elsewhere. Both are off float32 by the same 0.015 at most, 0.0024 rms"
    ),
    ("test_jit_general.py::test_post_optimization_transform", "[dp]*"): (
        "puts a comment before each addition of the execution trace; they are inside fused regions "
        "(planned without a fusion executor it passes: tests/system/test_upstream_defects.py)"
    ),
    ("test_transforms.py::test_constant_folding", "[dp]*"): (
        "looks for the folded constants among the operations of the execution trace; they are inside a fused region "
        "(planned without a fusion executor it passes)"
    ),
    ("test_transforms.py::test_debug_transform", "[dp]*"): (
        "expects a callback around each of three pointwise operations, which are one fused region "
        "(planned without a fusion executor it passes)"
    ),
    ("test_extend.py::test_get_all_executors_includes_all_native_executors", "without"): (
        "asks that Thunder's own executors are all that are registered; this package registers two more"
    ),
}


def reason(id: str, side: str) -> str:
    """Why a test cannot apply on a side; "" for all others."""
    return next((why for (test, s), why in EXCLUDED.items() if fnmatchcase(id, test) and fnmatchcase(side, s)), "")
