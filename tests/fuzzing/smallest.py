"""Within these contexts, the smallest programs meet decisions that only large ones meet otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.fuzzing.configs import Options, uncompiled_regions

__all__ = ["a_link_that_costs_nothing", "groups_of_one_head", "made_for", "tiles_outside_of_checkpoints"]


@contextmanager
def made_for(options: Options) -> Iterator[None]:
    """All that options ask for beside the compilation itself."""
    with ExitStack() as stack:
        if not options.compiled:
            stack.enter_context(uncompiled_regions())
        if options.offload:
            stack.enter_context(a_link_that_costs_nothing())
        if options.groups:
            stack.enter_context(groups_of_one_head())
        if options.outside:
            stack.enter_context(tiles_outside_of_checkpoints(options.tile))
        yield


@contextmanager
def groups_of_one_head() -> Iterator[None]:
    """Attention runs by groups of heads too, with as many groups as heads."""
    from thunder_mem.tiling import heads

    with patch.object(heads, "_CPU_BLOCKS", 1):
        yield


@contextmanager
def a_link_that_costs_nothing() -> Iterator[None]:
    """Copies to the host take no time, whatever the device."""
    from thunder_mem.costs import roofline

    models = {name: replace(model, link_bytes_per_s=1e18, copy_s=0.0) for name, model in roofline.DEVICE_MODELS.items()}
    with patch.object(roofline, "DEVICE_MODELS", models):
        yield


@contextmanager
def tiles_outside_of_checkpoints(rows: int) -> Iterator[None]:
    """Any product runs in tiles of so many rows, and a budget takes the plan with most of them."""
    from thunder_mem.planning import tile_selection
    from thunder_mem.tiling import tiles

    def with_most_tiles(without: Any, with_tiles: Any, faster: Any, repeating: Any) -> list[Any]:
        return list(repeating(float("inf"))) or [with_tiles or without]

    with (
        patch.object(tiles, "AUTO_MIN_BYTES", 1),
        patch.object(tiles, "WIDE_RATIO", 0.2),
        patch.object(tiles, "floor_rows", lambda *_: rows),
        patch.object(tiles, "tile_gain_bytes", lambda plan: 1),
        patch.object(tile_selection, "plans_in_budget", with_most_tiles),
    ):
        yield
