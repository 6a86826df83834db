"""Operations of random programs that are losses: heads of all kinds, whole and sliced, and what stands beside them.

Their arguments rarely fit by chance: `program_inputs.KITS` draws inputs that belong together.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from tests.programs.program_table import Drawn, Values, add, filled, one, two

__all__: list[str] = []


def _indices(values: Values, rng: Random, shape: torch.Size, below: int) -> str | None:
    def fits(t: torch.Tensor) -> bool:
        return t.dtype == torch.int64 and t.shape == shape and bool(((t >= 0) & (t < below)).all())

    return values.pick(rng, fits)


def _classes(*more: Callable[[Random], object]):
    """Rows of logits and their classes."""

    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, lambda t: filled(t) and t.dim() == 2)
        t = values.tensors[a] if a else None
        classes = a and _indices(values, rng, t.shape[:1], t.shape[1])
        return classes and ((a, classes), tuple(m(rng) for m in more))

    return draw


def _head(*more: Callable[[Random], object]):
    """Hidden states, a weight of (classes, width) and the classes: a loss head."""

    def draw(rng: Random, values: Values) -> Drawn | None:
        floats = [(name, t) for name, t in values.tensors.items() if filled(t)]
        integers = [(name, t) for name, t in values.tensors.items() if t.dtype == torch.int64]
        fits = [
            (a, w, c)
            for a, t in floats
            for w, u in floats
            if t.dim() in (2, 3) and u.dim() == 2 and (u.dtype, u.shape[1]) == (t.dtype, t.shape[-1])
            for c, classes in integers
            if classes.shape == t.shape[:-1] and bool(((classes >= 0) & (classes < u.shape[0])).all())
        ]
        return (rng.choice(fits), tuple(m(rng) for m in more)) if fits else None

    return draw


def _reduction(rng: Random) -> str:
    return rng.choice(["mean", "mean", "sum", "none"])


def _options(rng: Random) -> str:
    return rng.choice(["", "", ", ignore_index=1", ", label_smoothing=0.125"])


add(
    "loss",
    "cross_entropy",
    "fresh",
    "F.cross_entropy({0}, {1}, reduction={p[0]!r}{p[1]})",
    _classes(_reduction, _options),
)
add(
    "loss", "nll_loss", "fresh", "F.nll_loss(torch.log_softmax({0}, -1), {1}, reduction={p[0]!r})", _classes(_reduction)
)
_LOGITS = "F.linear({0}, {1})"
_ROWS = ".reshape(-1, {1}.shape[0])"
for _name, _text in {
    "head": f"F.cross_entropy({_LOGITS}{_ROWS}, {{2}}.reshape(-1), reduction={{p[0]!r}}{{p[1]}})",
    "head_float": f"F.cross_entropy({_LOGITS}.float(){_ROWS}, {{2}}.reshape(-1), reduction={{p[0]!r}}{{p[1]}})",
    "head_softcap": f"F.cross_entropy((torch.tanh({_LOGITS} / 4.0) * 4.0){_ROWS}, {{2}}.reshape(-1){{p[1]}})",
    "head_by_hand": f"-torch.log_softmax({_LOGITS}{_ROWS}, -1).gather(1, {{2}}.reshape(-1, 1)).mean()",
    "head_z_loss": f"F.cross_entropy({_LOGITS}{_ROWS}, {{2}}.reshape(-1))"
    f" + 0.25 * (torch.logsumexp({_LOGITS}, -1) ** 2).mean()",
}.items():
    add(
        "head",
        _name,
        "fresh",
        _text,
        _head(_reduction, _options),
        _text.replace(f"{_LOGITS}.float()", f"_to({_LOGITS}, 'float32')"),
    )
add("loss", "mse_loss", "fresh", "F.mse_loss({0}, {0}.detach() * 0.5 + 0.25)", one(filled))
add("loss", "mse_of", "fresh", "(({0} - {1}) ** 2).mean()", two(filled, both=True))


# Heads behind a slice, as a causal language model has one, through all that makes a matrix product and more.
_BIAS = "{1}.sum(1)"
_PRODUCTS = {
    "linear": _LOGITS,
    "linear_bias": f"F.linear({{0}}, {{1}}, {_BIAS})",
    "at_t": "({0} @ {1}.t())",
    "at_mT": "({0} @ {1}.mT)",
    "matmul_transpose": "torch.matmul({0}, {1}.transpose(0, 1))",
    "einsum": 'torch.einsum("...d,vd->...v", {0}, {1})',
    "add_alpha": f"torch.add({_LOGITS}, {_BIAS}, alpha=2)",
    "sub_alpha": f"torch.sub({_LOGITS}, {_BIAS}, alpha=2)",
    "addcmul": f"torch.addcmul({_LOGITS}, {_BIAS}, {_BIAS}, value=0.5)",
    "addcdiv": f"torch.addcdiv({_LOGITS}, {_BIAS}, {_BIAS} * {_BIAS} + 1.0, value=0.5)",
    "baddbmm": f"torch.baddbmm({_BIAS}, {{0}}, {{1}}.t().expand({{0}}.shape[0], -1, -1), beta=0.5, alpha=2)",
    "bmm": "torch.bmm({0}, {1}.t().expand({0}.shape[0], -1, -1))",
    "addmm": f"torch.addmm({_BIAS}, {{0}}, {{1}}.t(), beta=0.5, alpha=2)",
    "mm": "torch.mm({0}, {1}.t())",
}
# Of the logits, and of the classes.
_SLICES = {
    2: [("1:", "1:"), (":-1", "1:"), (":-1", ":-1"), ("::2", "::2"), ("1:-1", "1:-1")],
    3: [
        (":, :-1", ":, 1:"),
        (":, 1:", ":, 1:"),
        ("1:", "1:"),
        (":-1", ":-1"),
        ("..., 1:, :", "..., 1:"),
        (":, -1", ":, -1"),
        ("1:, :-1", "1:, 1:"),
    ],
}
_DIMS = {"baddbmm": (3,), "bmm": (3,), "addmm": (2,), "mm": (2,)}


def _sliced_head(dims: tuple[int, ...]):
    whole = _head(_reduction, _options)

    def draw(rng: Random, values: Values) -> Drawn | None:
        drawn = whole(rng, values)
        if drawn is None or (rank := values.tensors[drawn[0][0]].dim()) not in dims:
            return None
        return drawn[0], (*drawn[1], *rng.choice(_SLICES[rank]))

    return draw


for _name, _text in _PRODUCTS.items():
    add(
        "head",
        f"sliced_head_{_name}",
        "fresh",
        f"F.cross_entropy({_text}[{{p[2]}}]{_ROWS}, {{2}}[{{p[3]}}].reshape(-1), reduction={{p[0]!r}}{{p[1]}})",
        _sliced_head(_DIMS.get(_name, (2, 3))),
    )

# Beside a head: what it predicts, which has no gradient, of logits that may be those of the loss.
add("head", "head_predictions", "fresh", f"torch.argmax({_LOGITS}, -1)", _head())
add("head", "head_confident", "fresh", f"torch.softmax({_LOGITS}, -1) > 0.5", _head())
