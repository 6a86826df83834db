"""The side effects of a bound symbol: writes, random numbers, communication, barriers.

Thunder orders a trace only by the uses of proxies. That misses every dependency through memory or through a hidden
state. This module names these dependencies, from the symbol's tags if Thunder sets them, and else from its name
(`copy_` has only `DONT_DCE`, and a claimed `uniform` has no tag).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.distributed.prims import PrimIDs as DistributedPrimIDs

from thunder_mem.semantics.collectives import START_NAMES, awaited_futures, overwritten_by, starts
from thunder_mem.semantics.op_traits import traits_of

__all__ = [
    "COMMUNICATION",
    "WRITTEN_ELSEWHERE",
    "Effects",
    "effects_of",
    "is_copy",
    "is_random",
    "leaves",
    "with_subsymbols",
]

# The channel of all collectives' starts, whatever their group: with two communicators in use, an order of each
# that ranks agree on does not suffice (NCCL's guide, "Using multiple NCCL communicators concurrently"). A wait
# blocks its own rank alone. It is ordered by its future, and has a channel of its own only because it may not be
# repeated: as long as all ranks start all collectives in one order, waits in any order end.
COMMUNICATION = "communication"

WRITTEN_ELSEWHERE = "thunder_mem: written elsewhere"
"""The tag of an argument that another program writes before the backward runs, so that nothing is repeated from it."""

_PURE_WITHOUT_TENSORS = {
    PrimIDs.SHAPE, PrimIDs.CONSTRUCT_TUPLE, PrimIDs.PACK_LIST, PrimIDs.COMMENT, PrimIDs.CONVERT_ELEMENT_TYPE,
}  # fmt: skip
_RANDOM_NAMES = {
    "uniform", "randn", "randint", "multinomial", "get_and_update_rng_state", "set_rng_state",
    # of `torch.nn.functional`, where no operator of ATen has the name
    "dropout1d", "dropout2d", "dropout3d", "gumbel_softmax", "multi_head_attention_forward",
    "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d", "fractional_max_pool3d_with_indices",
}  # fmt: skip
_TAGS_WITHOUT_EFFECT = {
    OpTags.SHAPE_OP, OpTags.REDUCTION_OP, OpTags.MATMUL_OP, OpTags.DONT_RECOMPUTE_IN_BACKWARD,
    OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD,
}  # fmt: skip
_STASHES = {DistributedPrimIDs.STASH_GRAD_FOR_FSDP, DistributedPrimIDs.UPDATE_BUCKET_VIEW}


@dataclass(frozen=True, slots=True)
class Effects:
    """The constraints on a bound symbol's order beyond the uses of its proxies.

    Attributes:
        writes: names of the tensors that it overwrites in place.
        channels: hidden states that it advances, such as `"rng:cuda:0"`; the symbols of one channel
            keep their order.
        barrier: nothing may move across it.
    """

    writes: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    barrier: bool = False

    @property
    def pure(self) -> bool:
        """Whether it may be repeated, or moved to any place where its inputs exist."""
        return not (self.writes or self.channels or self.barrier)


_NONE = Effects()


def with_subsymbols(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """The bound symbol and all subsymbols in it, outer ones first."""
    yield bsym
    for sub in bsym.subsymbols:
        yield from with_subsymbols(sub)


def leaves(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """The bound symbol's innermost subsymbols; itself if it has none."""
    stack = [bsym]
    while stack:
        b = stack.pop()
        if b.subsymbols:
            stack.extend(reversed(b.subsymbols))
        else:
            yield b


def is_copy(bsym: BoundSymbol) -> bool:
    """Whether it is the one primitive by which Thunder writes in place: `copy_(source, target)`."""
    return bsym.sym.id is PrimIDs.COPY_ or (bsym.sym.name == "copy_" and not bsym.subsymbols)


def effects_of(bsym: BoundSymbol) -> Effects:
    """The effects of a bound symbol and all of its subsymbols."""
    if _only_computes(bsym):
        return _NONE
    traits = traits_of(bsym)
    if traits.random == "replays":
        return _NONE
    if traits.random == "saves":
        return effects_of(traits.runs(bsym))
    writes: list[str] = []
    channels: list[str] = []
    barrier = False
    for b in (bsym, *leaves(bsym)) if bsym.subsymbols else (bsym,):
        if _is_barrier(b):
            barrier = True
        if (target := _written(b)) is not None:
            writes.append(target.name)
        writes += [p.name for p in traits_of(b).writes(b)]
        if is_random(b):
            channels.append(f"rng:{_device(bsym)}")
        if starts(b):
            channels.append(COMMUNICATION)
        channels += [f"wait:{future}" for future in awaited_futures(b)]
    own = {p.name for p in bsym.flat_proxy_args}
    return Effects(
        writes=tuple(name for name in dict.fromkeys(writes) if name in own),
        channels=tuple(dict.fromkeys(channels)),
        barrier=barrier,
    )


def _only_computes(bsym: BoundSymbol) -> bool:
    """A quick check that it has no effect, for nearly every bound symbol; False means unknown."""
    sym = bsym.sym
    if sym.executor is not None or not _is_pure_symbol(sym.id, sym.name, frozenset(sym.tags or ())):
        return False
    if bsym.subsymbols:
        return all(map(_only_computes, bsym.subsymbols))
    return type(bsym.output) is TensorProxy


@cache
def _is_pure_symbol(id: Hashable, name: str, tags: frozenset) -> bool:
    """Whether no bound symbol of this symbol that makes a tensor has an effect of its own."""
    if not tags <= _TAGS_WITHOUT_EFFECT or name in _RANDOM_NAMES | START_NAMES:
        return False
    if name.endswith("_") or "setitem" in name or "scaled_dot_product" in name or "sdpa" in name:
        return False
    return isinstance(id, PrimIDs) or (isinstance(id, str) and not _aten_is_seeded(name))


def is_random(bsym: BoundSymbol) -> bool:
    """Whether it draws from the generator of its device (a seeded `uniform_philox` does not)."""
    if has_tags(bsym, {OpTags.RANDOM_OP}):
        return True
    name = bsym.sym.name
    if name in _RANDOM_NAMES:
        return True
    if "scaled_dot_product" in name or "sdpa" in name:
        return "backward" not in name and _dropout_probability(bsym) > 0
    return not bsym.subsymbols and not isinstance(bsym.sym.id, PrimIDs) and _aten_is_seeded(name)


@cache
def _aten_is_seeded(name: str) -> bool:
    """PyTorch's own operator tags say whether an operator of that name draws random numbers."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or "scaled_dot_product" in name:
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in packet.overloads())


def _dropout_probability(bsym: BoundSymbol) -> float:
    given = bsym.kwargs.get("dropout_p")
    if given is None:
        given = next((a for a in bsym.args[3:6] if isinstance(a, float)), 0.0)
    return float(getattr(given, "value", given) or 0.0)


def _written(bsym: BoundSymbol) -> TensorProxy | None:
    if bsym.subsymbols:
        return None
    if (reduced := overwritten_by(bsym)) is not None:
        return reduced
    name, tensors = bsym.sym.name, [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
    if not tensors:
        return None
    if bsym.sym.id is PrimIDs.COPY_ or name == "copy_":
        return bsym.args[1]
    if has_tags(bsym, {OpTags.IN_PLACE}):
        return tensors[0]
    in_place_name = name.endswith("_") and not name.startswith("_") and not name.endswith("__")
    return tensors[0] if in_place_name or name in ("setitem", "setitem_") else None


def _is_barrier(bsym: BoundSymbol) -> bool:
    sym = bsym.sym
    if sym.id in (PrimIDs.RETURN, PrimIDs.PRINT, PrimIDs.ITEM, PrimIDs.SINK):
        return True
    if has_tags(
        bsym, {OpTags.DEVICE_SYNC_OP, OpTags.CTX_MANAGER_ENTER_EXIT_OP, OpTags.TORCH_COMPILE_COMPLIANT_CUSTOM_OP}
    ):
        return True
    if sym.executor is not None and sym.executor.name == "custom_op":  # claimed, and its tag lost
        return True
    if sym.id in _STASHES:
        return True
    if sym.id in _PURE_WITHOUT_TENSORS or bsym.subsymbols:
        return False
    produces = {p.name for p in bsym.flat_proxy_outs} - {p.name for p in bsym.flat_proxy_args}
    # Without a result it runs for its effect; a known write is ordered by its storage alone.
    return not produces and _written(bsym) is None and not traits_of(bsym).writes(bsym)


def _device(bsym: BoundSymbol) -> str:
    proxies: tuple[Proxy, ...] = (*bsym.flat_proxy_outs, *bsym.flat_proxy_args)
    return next((p.device.device_str() for p in proxies if isinstance(p, TensorProxy)), "cpu")
