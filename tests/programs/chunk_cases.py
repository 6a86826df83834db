"""Loss heads as people write them, for the tests of the chunker.

A case is a function of named tensors and a list of those that require gradients. Sizes: `N` rows
(odd, so that the last chunk is ragged), `D` features, `V` classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

N, D, V = 203, 8, 1009
B, T = 7, 29


@dataclass(frozen=True)
class Case:
    """One loss head: `fn(**tensors)` gives the loss, or a tuple that starts with it.

    Attributes:
        name: for pytest.
        fn: the head.
        tensors: makes the inputs.
        grads: names of the inputs that require gradients.
        mode: the mode expected of the first loop.
        loops: how many heads are expected.
    """

    name: str
    fn: Callable
    tensors: Callable[[], dict[str, torch.Tensor]]
    grads: tuple[str, ...] = ("x", "w")
    mode: str = "grads-in-forward"
    loops: int = 1

    def __str__(self) -> str:
        return self.name


def flat(**extra: Callable[[], torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """x (N, D), w (V, D), t (N,) with some rows ignored, and more."""

    def make() -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        t = torch.randint(0, V, (N,), generator=g)
        t[::11] = -100
        out = {"x": torch.randn(N, D, generator=g), "w": torch.randn(V, D, generator=g) * 0.3, "t": t}
        return out | {k: v() for k, v in extra.items()}

    return make


def seq(**extra: Callable[[], torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """x (B, T, D), w (V, D), t (B, T), and more."""

    def make() -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(1)
        out = {
            "x": torch.randn(B, T, D, generator=g),
            "w": torch.randn(V, D, generator=g) * 0.3,
            "t": torch.randint(0, V, (B, T), generator=g),
        }
        return out | {k: v() for k, v in extra.items()}

    return make


def rand(*shape: int, seed: int = 2, scale: float = 1.0) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def positive(*shape: int, seed: int = 3) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def classes(*shape: int, high: int = V, seed: int = 4) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def mask(*shape: int, seed: int = 5) -> Callable[[], torch.Tensor]:
    return lambda: (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.3).float()


def ce_mean(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)


def ce_sum(x, w, t):
    return F.cross_entropy(F.linear(x, w), t, reduction="sum")


def ce_none(x, w, t, m):
    return (F.cross_entropy(F.linear(x, w), t, reduction="none"), m)[0]


def ce_bias(x, w, t, b):
    return F.cross_entropy(F.linear(x, w, b), t)


def ce_matmul(x, w, t):
    return F.cross_entropy(x @ w.T, t)


def ce_stored_transposed(x, w, t):
    return F.cross_entropy(x @ w, t)


def ce_ignore_inside(x, w, t):
    return F.cross_entropy(F.linear(x, w), t, ignore_index=5)


def ce_class_weights(x, w, t, c):
    return F.cross_entropy(F.linear(x, w), t, weight=c)


def ce_smoothing(x, w, t):
    return F.cross_entropy(F.linear(x, w), t, label_smoothing=0.1)


def ce_smoothing_weights(x, w, t, c):
    return F.cross_entropy(F.linear(x, w), t, weight=c, label_smoothing=0.2, reduction="sum")


def ce_softcap(x, w, t):
    return F.cross_entropy(30.0 * torch.tanh(F.linear(x, w) / 30.0), t)


def ce_scale(x, w, t, s):
    return F.cross_entropy(F.linear(x, w) * s, t)


def ce_temperature(x, w, t, r):
    return F.cross_entropy(F.linear(x, w) / r[:, None], t)


def ce_z_loss(x, w, t):
    z = F.linear(x, w)
    return F.cross_entropy(z, t) + 1e-2 * (torch.logsumexp(z, -1) ** 2).mean()


def ce_soft_targets(x, w, t, p):
    return F.cross_entropy(F.linear(x, w), torch.softmax(p, -1))


def ce_one_hot(x, w, t):
    log_p = torch.log_softmax(F.linear(x, w), -1)
    return -(F.one_hot(t.clamp(min=0), V) * log_p).sum() / x.shape[0]


def hf_shift(x, w, t):
    logits = F.linear(x, w).float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = t[..., 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, V), shift_labels.view(-1))


def hf_pad_labels(x, w, t):
    logits = F.linear(x, w).float()
    labels = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100, reduction="mean")


def hf_num_items(x, w, t, n):
    logits = F.linear(x, w).float()
    return F.cross_entropy(logits.view(-1, V), t.view(-1), ignore_index=-100, reduction="sum") / n


def kl_distill(x, w, t, y, u):
    student = torch.log_softmax(F.linear(x, w) / 2.0, -1)
    teacher = torch.softmax(F.linear(y, u) / 2.0, -1)
    return F.kl_div(student, teacher, reduction="batchmean") * 4.0


def kl_and_ce(x, w, t, y, u):
    z = F.linear(x, w)
    kl = F.kl_div(torch.log_softmax(z, -1), torch.log_softmax(F.linear(y, u), -1), log_target=True, reduction="sum")
    return 0.5 * kl / x.shape[0] + 0.5 * F.cross_entropy(z, t)


def jsd(x, w, t, y, u):
    p, q = torch.softmax(F.linear(x, w), -1), torch.softmax(F.linear(y, u), -1)
    m = 0.5 * (p + q)
    return 0.5 * ((p * (p.log() - m.log())).sum(-1) + (q * (q.log() - m.log())).sum(-1)).mean()


def entropy_regulariser(x, w, t):
    z = F.linear(x, w)
    log_p = torch.log_softmax(z, -1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return F.cross_entropy(z, t) - 0.1 * entropy


def mse_head(x, w, t, p):
    return F.mse_loss(F.linear(x, w), p)


def bce_head(x, w, t, p):
    return F.binary_cross_entropy_with_logits(F.linear(x, w), torch.sigmoid(p))


def token_log_probs(x, w, t):
    log_p = torch.log_softmax(F.linear(x, w), -1)
    return torch.gather(log_p, -1, t.unsqueeze(-1)).squeeze(-1)


def selective_log_softmax(x, w, t):
    z = F.linear(x, w)
    return torch.gather(z, -1, t.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(z, -1)


def dpo(x, w, t, m, y, u):
    policy = (token_log_probs(x, w, t) * m).sum(-1)
    with torch.no_grad():
        reference = (token_log_probs(y, u, t) * m).sum(-1)
    half = policy.shape[0] // 2
    ratio = policy - reference
    return -F.logsigmoid(0.1 * (ratio[:half] - ratio[half : 2 * half])).mean()


def orpo(x, w, t, m):
    per_token = token_log_probs(x, w, t) * m
    mean = per_token.sum(-1) / m.sum(-1)
    half = mean.shape[0] // 2
    chosen, rejected = mean[:half], mean[half : 2 * half]
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()


def simpo(x, w, t, m):
    mean = (token_log_probs(x, w, t) * m).sum(-1) / m.sum(-1)
    half = mean.shape[0] // 2
    return -F.logsigmoid(2.0 * (mean[:half] - mean[half : 2 * half]) - 0.5).mean()


def ppo(x, w, t, old, adv, m):
    ratio = torch.exp(selective_log_softmax(x, w, t) - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return -(torch.minimum(ratio * adv, clipped * adv) * m).sum() / m.sum()


def grpo(x, w, t, old, adv, m):
    log_p = selective_log_softmax(x, w, t)
    ratio = torch.exp(log_p - log_p.detach())
    kl = torch.exp(old - log_p) - (old - log_p) - 1
    per_token = -(ratio * adv[:, None]) + 0.04 * kl
    return ((per_token * m).sum(-1) / m.sum(-1)).mean()


def masked_mean(x, w, t, m):
    ce = F.cross_entropy(F.linear(x, w), t, reduction="none")
    return (ce * m).sum() / m.sum()


def two_heads(x, w, t, v, s):
    return F.cross_entropy(F.linear(x, w), t) + 0.5 * F.cross_entropy(F.linear(x, v), s)


def multi_token(x, w, t, h):
    loss = F.cross_entropy(F.linear(x, w).view(-1, V), t.view(-1))
    nxt = torch.tanh(F.linear(x, h))
    return loss + 0.3 * F.cross_entropy(F.linear(nxt[:, :-1], w).reshape(-1, V), t[:, 1:].reshape(-1))


def ce_weight_decay(x, w, t):
    return F.cross_entropy(F.linear(x, w), t) + 1e-2 * (w * w).sum()


def ce_accuracy(x, w, t):
    z = F.linear(x, w)
    return F.cross_entropy(z, t), (z.argmax(-1) == t).float().mean()


def tied(w, t, i):
    return F.cross_entropy(F.linear(torch.tanh(F.embedding(i, w)), w), t)


def lora(x, w, t, a, b):
    return F.cross_entropy(F.linear(x, w) + 2.0 * F.linear(F.linear(x, a), b), t)


def scaled_outside(x, w, t):
    return F.cross_entropy(F.linear(x, w), t) * 3.0


def ce_norm(x, w, t, g):
    h = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * g
    return F.cross_entropy(F.linear(h, w), t)


def batch_entropy(x, w, t):
    p = torch.softmax(F.linear(x, w), -1).mean(0)
    return (p * p.log()).sum()


def transposed_flat():
    made = flat()()
    return made | {"w": made["w"].T.contiguous()}


def tied_tensors():
    made = flat(i=classes(N))()
    made.pop("x")
    return made


RECOMPUTE = "recompute-in-backward"
teacher = {"y": rand(N, D, seed=6), "u": rand(V, D, seed=7, scale=0.3)}
teacher_seq = {"y": rand(B, T, D, seed=6), "u": rand(V, D, seed=7, scale=0.3)}

CASES = (
    Case("ce_mean", ce_mean, flat()),
    Case("ce_sum", ce_sum, flat()),
    Case("ce_none", ce_none, flat(m=mask(N)), mode=RECOMPUTE),
    Case("ce_bias", ce_bias, flat(b=rand(V)), ("x", "w", "b")),
    Case("ce_matmul", ce_matmul, flat()),
    Case("ce_stored_transposed", ce_stored_transposed, transposed_flat),
    Case("ce_ignore_inside", ce_ignore_inside, flat(t=classes(N, high=9))),
    Case("ce_class_weights", ce_class_weights, flat(c=positive(V))),
    Case("ce_smoothing", ce_smoothing, flat()),
    Case("ce_smoothing_weights", ce_smoothing_weights, flat(c=positive(V))),
    Case("ce_softcap", ce_softcap, flat()),
    Case("ce_scale", ce_scale, flat(s=positive()), ("x", "w", "s")),
    Case("ce_temperature", ce_temperature, flat(r=positive(N)), ("x", "w", "r")),
    Case("ce_z_loss", ce_z_loss, flat()),
    Case("ce_soft_targets", ce_soft_targets, flat(p=rand(N, V))),
    Case("ce_one_hot", ce_one_hot, flat()),
    Case("hf_shift", hf_shift, seq()),
    Case("hf_pad_labels", hf_pad_labels, seq()),
    Case("hf_num_items", hf_num_items, seq(n=lambda: torch.tensor(150))),
    Case("kl_distill", kl_distill, flat(**teacher)),
    Case("kl_and_ce", kl_and_ce, flat(**teacher)),
    Case("jsd", jsd, flat(**teacher), ("x", "w", "y", "u")),
    Case("entropy_regulariser", entropy_regulariser, flat()),
    Case("mse_head", mse_head, flat(p=rand(N, V))),
    Case("bce_head", bce_head, flat(p=rand(N, V))),
    Case("dpo", dpo, seq(m=mask(B, T), **teacher_seq), mode=RECOMPUTE, loops=2),
    Case("orpo", orpo, seq(m=mask(B, T)), mode=RECOMPUTE),
    Case("simpo", simpo, seq(m=mask(B, T)), mode=RECOMPUTE),
    Case("ppo", ppo, seq(old=rand(B, T, scale=0.1), adv=rand(B, T), m=mask(B, T))),
    Case("grpo", grpo, seq(old=rand(B, T, scale=0.1), adv=rand(B), m=mask(B, T)), mode=RECOMPUTE),
    Case("masked_mean", masked_mean, flat(m=mask(N))),
    Case("two_heads", two_heads, flat(v=rand(V, D, seed=8), s=classes(N)), ("x", "w", "v"), loops=2),
    Case("multi_token", multi_token, seq(h=rand(D, D, seed=9)), ("x", "w", "h"), loops=2),
    Case("ce_weight_decay", ce_weight_decay, flat()),
    Case("ce_accuracy", ce_accuracy, flat()),
    Case("tied", tied, tied_tensors, ("w",)),
    Case("lora", lora, flat(a=rand(4, D), b=rand(V, 4)), ("x", "a", "b")),
    Case("scaled_outside", scaled_outside, flat()),
    Case("ce_norm", ce_norm, flat(g=positive(D)), ("x", "w", "g")),
    Case("batch_entropy", batch_entropy, flat(), mode=RECOMPUTE),
    Case("frozen_x", ce_bias, flat(b=rand(V)), ("w", "b")),
    Case("frozen_w", ce_bias, flat(b=rand(V)), ("x", "b")),
    Case("frozen_b", ce_bias, flat(b=rand(V)), ("x", "w")),
)


def prepare(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in case.tensors().items()}
    return {k: v.requires_grad_(k in case.grads) for k, v in tensors.items()}


def loss_and_grads(fn, tensors, grads):
    out = fn(**tensors)
    rest = out[1:] if isinstance(out, tuple) else ()
    loss = out[0] if isinstance(out, tuple) else out
    tangent = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return (loss.detach(), *(r.detach() for r in rest)), torch.autograd.grad(loss, [tensors[g] for g in grads], tangent)
