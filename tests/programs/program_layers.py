"""Operations of random programs that models are made of: norms, attention, embeddings.

Their arguments rarely fit by chance: `program_inputs.KITS` draws inputs that belong together.
"""

from __future__ import annotations

from random import Random

import torch

from tests.programs.program_table import Drawn, Values, add, filled, is_bool, is_float, shown_twice

__all__: list[str] = []


# Norms.
def _normed(dim: int, count: int, writable: tuple[int, ...] = ()):
    """A tensor, and `count` different vectors as long as its dimension `dim`."""

    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, lambda t: filled(t) and t.dim() >= (2 if dim == 1 else 1) and t.numel() > t.shape[-1])
        if a is None:
            return None
        t = values.tensors[a]
        names = [
            n for n, v in values.tensors.items() if (v.shape, v.dtype) == (t.shape[dim : dim + 1 or None], t.dtype)
        ]
        if len(names) < count:
            return None
        vectors = rng.sample(names, count)
        if dim == 1 and not all(values.tensors[n].is_contiguous() for n in vectors):
            return None  # eager's batch norm on a CPU reads a strided weight wrongly in its backward
        # Running statistics must be memory of their own, with no gradient.
        held = [vectors[k - 1] for k in writable]
        if any(
            not values.writable(n) or values.tensors[n].requires_grad or shown_twice(values.tensors[n]) for n in held
        ):
            return None
        if len({values.tensors[n].untyped_storage()._cdata for n in (a, *vectors)}) < 1 + count and held:
            return None
        return (a, *vectors), ()

    return draw


add("norm", "layer_norm", "fresh", "F.layer_norm({0}, {0}.shape[-1:])", _normed(-1, 0))
add("norm", "layer_norm_affine", "fresh", "F.layer_norm({0}, {0}.shape[-1:], {1}, {2})", _normed(-1, 2))
add("norm", "rms_norm", "fresh", "F.rms_norm({0}, {0}.shape[-1:], {1}, eps=1e-5)", _normed(-1, 1))
add(
    "norm",
    "rms_norm_by_hand",
    "fresh",
    "({0} * torch.rsqrt(({0} * {0}).mean(-1, keepdim=True) + 1e-5)) * {1}",
    _normed(-1, 1),
)
add("norm", "group_norm", "fresh", "F.group_norm({0}, 1, {1}, {2})", _normed(1, 2))
add("norm", "batch_norm", "fresh", "F.batch_norm({0}, None, None, {1}, {2}, training=True)", _normed(1, 2))
add(
    "norm",
    "batch_norm_running",
    "fresh",
    "F.batch_norm({0}, {1}, {2}, training=True, momentum=0.25)",
    _normed(1, 2, writable=(1, 2)),
    writes=(1, 2),
)
add("norm", "batch_norm_eval", "fresh", "F.batch_norm({0}, {1}, {2} * {2} + 0.5, training=False)", _normed(1, 2))


# Attention. Never empty: with no heads torch 2.11's CPU attention divides by zero and kills the process.
def _self_attention(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: filled(t) and t.dim() >= 3)
    return a and ((a,), (rng.random() < 0.5,))


def _attention(masked: bool):
    def draw(rng: Random, values: Values) -> Drawn | None:
        q = values.pick(rng, lambda t: filled(t) and t.dim() == 4)
        t = values.tensors[q] if q else None

        def fits(u: torch.Tensor) -> bool:
            return (
                u.dim() == 4
                and u.numel() > 0
                and (u.dtype, u.shape[:2], u.shape[3]) == (t.dtype, t.shape[:2], t.shape[3])
            )

        k = q and values.pick(rng, fits)
        v = k and values.pick(rng, lambda u: u.shape == values.tensors[k].shape and u.dtype == t.dtype)
        if v is None:
            return None
        shape = (t.shape[2], values.tensors[k].shape[2])
        if not masked:
            return (q, k, v), (shape[0] == shape[1] and rng.random() < 0.5,)
        # A row that is masked throughout is NaN in eager.
        mask = values.pick(
            rng, lambda m: m.shape == shape and (m.dtype == t.dtype or (is_bool(m) and bool(m.any(-1).all())))
        )
        return mask and ((q, k, v, mask), ())

    return draw


_SELF = "F.scaled_dot_product_attention({0}[None], {0}[None], {0}[None], is_causal={p[0]})"
add("attention", "self_attention", "fresh", _SELF, _self_attention)
for _name, _text, _masked in (
    ("attention", "{0}, {1}, {2}, is_causal={p[0]}", False),
    ("attention_scaled", "{0}, {1}, {2}, scale=0.25, is_causal={p[0]}", False),
    ("attention_masked", "{0}, {1}, {2}, attn_mask={3}", True),
):
    add("attention", _name, "fresh", f"F.scaled_dot_product_attention({_text})", _attention(_masked))
add(
    "attention",
    "attention_by_hand",
    "fresh",
    "torch.softmax({0} @ {1}.transpose(-2, -1) * 0.5, -1) @ {2}",
    _attention(False),
)


def _shared(wide: bool):
    """Attention whose keys and values serve several heads of queries each, and a weight that widens the result."""

    def draw(rng: Random, values: Values) -> Drawn | None:
        q = values.pick(rng, lambda t: filled(t) and t.dim() == 4)
        t = values.tensors[q] if q else None

        def fits(u: torch.Tensor) -> bool:
            alike = u.dim() == 4 and (u.dtype, u.shape[0], u.shape[3]) == (t.dtype, t.shape[0], t.shape[3])
            return alike and u.numel() > 0 and t.shape[1] % u.shape[1] == 0

        k = q and values.pick(rng, fits)
        v = k and values.pick(rng, lambda u: (u.shape, u.dtype) == (values.tensors[k].shape, t.dtype))
        if v is None:
            return None
        key = values.tensors[k]
        params = (t.shape[1] // key.shape[1], t.shape[2] == key.shape[2] and rng.random() < 0.5)
        if not wide:
            return (q, k, v), params
        w = values.pick(
            rng, lambda u: u.dim() == 2 and (u.dtype, u.shape[1]) == (t.dtype, t.shape[3]) and u.shape[0] > t.shape[3]
        )
        return w and ((q, k, v, w), (*params, t.shape[1]))

    return draw


_REPEATED = "{{{0}}}[:, :, None].expand(-1, -1, {{p[0]}}, -1, -1).flatten(1, 2)"
_SHARED = "F.scaled_dot_product_attention({0}, " + ", ".join(map(_REPEATED.format, (1, 2))) + ", is_causal={p[1]})"
add("attention", "attention_shared", "fresh", _SHARED, _shared(False))
# A stretch that may run in tiles, behind attention that then may run by groups of heads.
add("attention", "attention_widened", "fresh", f"torch.tanh({_SHARED} @ {{3}}.t()) @ {{3}}", _shared(True))
# The same behind a projection, whose gradient groups of heads may make themselves.
_PROJECTED = f"F.linear({_SHARED}.transpose(1, 2).flatten(2), {{3}}.repeat(1, {{p[2]}})) @ {{3}}"
add("attention", "attention_projected", "fresh", f"torch.tanh({_PROJECTED} @ {{3}}.t()) @ {{3}}", _shared(True))


def _embedded(rng: Random, values: Values) -> Drawn | None:
    table = values.pick(rng, lambda t: filled(t) and t.dim() == 2 and is_float(t))
    rows = values.tensors[table].shape[0] if table else 0
    ids = table and values.pick(
        rng, lambda t: t.dtype == torch.int64 and t.numel() > 0 and bool(((t >= 0) & (t < rows)).all())
    )
    return ids and ((ids, table), ())


add("attention", "embedding", "fresh", "F.embedding({0}, {1})", _embedded)
