"""What ranks run in `test_distributed.py`: every case once, in real processes over gloo, on the CPU.

A case compiles a small model for its rank's part of the data and gives back, as plain values, how far
loss and gradients are from eager PyTorch in float64, and what the test wants to see of the traces.
"""

from __future__ import annotations

import copy
import os
import random
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from unittest import mock

import thunder
import torch
from thunder.core.transforms import add_transform
from thunder.distributed import FSDPBucketingStrategy, FSDPType, ddp, fsdp
from thunder.distributed.tensor_parallel.column_wise import TransformForColumnWiseParallel
from thunder.distributed.tensor_parallel.row_wise import TransformForRowWiseParallel
from torch import distributed, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.quick_thunder import looked_up_once
from thunder_mem import ChunkLossHead, MemEfficient, StepInBackward, Tiles, last_plan, measure_peak
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.distributed.agreement import RanksDifferError, schedule_of
from thunder_mem.optimizer.update import is_update
from thunder_mem.semantics.collectives import starts
from thunder_mem.tiling import heads

__all__ = ["CASES", "FOUR_CASES", "SLOW_CASES", "TABLES", "run_rank"]

CPU = torch.device("cpu")
VOCABULARY, WIDTH = 64, 8


class Attention(nn.Module):
    """Causal attention of four heads over two heads of keys, added to what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(width), nn.Linear(width, width)
        self.keys, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        h = self.norm(x)
        query = self.query(h).view(batch, rows, 4, width // 4).transpose(1, 2)
        two = self.keys(h).view(batch, rows, 2, 2, width // 4).permute(2, 0, 3, 1, 4)
        key, value = (t[:, :, None].expand(batch, 2, 2, rows, width // 4).flatten(1, 2) for t in two)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    """Embedding, residual blocks and a loss over a vocabulary: parameters that FSDP pads, and a tied pair."""

    def __init__(
        self,
        layers: int = 1,
        width: int = WIDTH,
        *,
        tied: bool = False,
        checkpointed: bool = False,
        attends: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *([Attention(width)] if attends else []),
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width + 1),
                nn.GELU(),
                nn.Linear(3 * width + 1, width),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def model(seed: int = 0, **options) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def batch(rank: int, rows: int = 12, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, targets = (torch.randint(VOCABULARY, (2, rows), generator=generator) for _ in range(2))
    return tokens, targets


def eager(original: nn.Module, batches: list) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank's loss, and the gradients of their mean, in float64."""
    reference = copy.deepcopy(original).double()
    losses = [reference(*b) for b in batches]
    torch.stack(losses).mean().backward()
    return [loss.item() for loss in losses], {name: p.grad for name, p in reference.named_parameters()}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()


def gradient_error(compiled, wanted: dict[str, torch.Tensor], sharded: bool) -> float:
    """The largest error of a gradient, relative to the largest element that it should have."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    worst = 0.0
    for name, parameter in compiled.named_parameters():
        whole = wanted[name]
        if sharded:
            rows = -(-whole.shape[0] // world)
            part = whole[rank * rows : (rank + 1) * rows]
            found = parameter.grad[: part.shape[0]]
            worst = max(worst, ((found.double() - part).abs().max() / whole.abs().max()).item() if len(part) else 0.0)
        else:
            worst = max(worst, error(parameter.grad, whole))
    return worst


def names(trace) -> list[str]:
    """The collectives of a final trace and their waits, in order."""
    short = (b.sym.name.removeprefix("torch_").removesuffix("_prim_impl") for b in trace.bound_symbols)
    return [n for n in short if n in ("all_gather", "all_reduce", "reduce_scatter", "wait")]


def stepping(
    wrap: Callable, *, sharded: bool = True, steps: int = 3, apart: int = 0, kind: type = torch.optim.AdamW,
    inside: dict | None = None, **model_options,
) -> dict:  # fmt: skip
    """Train with updates in the backward; how far parameters are from eager's in float64.

    Args:
        wrap: makes the compiled module distributed.
        sharded: each rank has a part of each parameter.
        steps: of the optimizer.
        apart: batches before each step's last one, under `no_sync`, whose gradients are summed.
        kind: of optimizer.
        inside: options of `StepInBackward`.
        model_options: of `model`.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    original = model(**model_options)
    reference = copy.deepcopy(original).double()
    eager_optimizer = kind(reference.parameters(), lr=1e-2)
    optimizer = StepInBackward(kind(original.parameters(), lr=1e-2), **(inside or {}))
    compiled = wrap(thunder.jit(original, executors=[], transforms=[MemEfficient(strict=True, optimizer=optimizer)]))
    try:
        compiled(*batch(rank))
        message = ""
    except ValueError as error:
        message = str(error)
    optimizer.use(kind(compiled.parameters(), lr=1e-2))
    for s in range(steps):
        batches = range(s * (apart + 1), (s + 1) * (apart + 1))
        for b in batches:
            torch.stack([reference(*batch(r, step=b)) for r in range(world)]).mean().backward()
            with compiled.no_sync() if b != batches[-1] else nullcontext():
                loss = compiled(*batch(rank, step=b))
                loss = loss if optimizer.scaler is None else optimizer.scaler.scale(loss)
                if optimizer.two_pass and b == batches[-1]:
                    with optimizer.first_pass():
                        loss.backward(retain_graph=True)
                loss.backward()
        given = sum(p.grad is not None for p in compiled.parameters())
        if optimizer.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), optimizer.max_norm)
        eager_optimizer.step()
        if optimizer.scaler is None:
            optimizer.step()
        else:
            optimizer.scaler.step(optimizer)
            optimizer.scaler.update()
        for each in (eager_optimizer, optimizer):
            each.zero_grad()
    errors = []
    for name, p in compiled.named_parameters():
        wanted = reference.get_parameter(name)
        if sharded:
            rows = -(-wanted.shape[0] // world)
            wanted = wanted[rank * rows : (rank + 1) * rows]
        errors.append((p[: len(wanted)].double() - wanted).abs().max().item() if wanted.numel() else 0.0)
    forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    kept = [] if sharded else [p.detach().double().sum().item() for p in compiled.parameters()]
    return {
        "error": max(errors),
        "message": message,
        "gradients": given,
        "updates": sum(map(is_update, backward.bound_symbols)),
        "digest": schedule_of(forward).digest + schedule_of(backward).digest + str(kept),
    }


def ddp_stepping() -> dict:
    return stepping(ddp, sharded=False, tied=True)


def ddp_stepping_accumulated() -> dict:
    return stepping(ddp, sharded=False, apart=2)


def ddp_stepping_in_two_passes() -> dict:
    """Clipped by the norm of the gradients' mean over ranks, with a scaler, and after batches under `no_sync`."""
    clipped = {"max_norm": 0.05, "two_pass": True}
    plain = stepping(ddp, sharded=False, tied=True, kind=torch.optim.SGD, inside=clipped)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    summed = stepping(ddp, sharded=False, apart=1, kind=torch.optim.SGD, inside={**clipped, "scaler": scaler})
    digest = plain["digest"] + summed["digest"] + str(scaler.get_scale())
    return {**plain, "error": max(plain["error"], summed["error"]), "digest": digest}


def one_rank_overflows() -> dict:
    """Only the first rank's loss is not finite; with two passes and with one, no rank's parameters change."""
    rank, found = distributed.get_rank(), {}
    for two_pass in (False, True):
        original = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = StepInBackward(torch.optim.AdamW(original.parameters()), scaler=scaler, two_pass=two_pass)
        compiled = ddp(thunder.jit(original, executors=[], transforms=[MemEfficient(strict=True, optimizer=optimizer)]))
        optimizer.use(torch.optim.AdamW(compiled.parameters(), lr=1e-2))
        before = [p.detach().clone() for p in compiled.parameters()]
        loss = scaler.scale(compiled(*batch(rank))) * (float("inf") if rank == 0 else 1.0)
        if two_pass:
            with optimizer.first_pass():
                loss.backward(retain_graph=True)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(map(torch.equal, before, compiled.parameters()))
        found[two_pass] = {"same": same, "scale": scaler.get_scale()}
    return found


def zero2_stepping() -> dict:
    return stepping(sharding(ZERO2, LAYER), steps=2)


def zero2_stepping_from_host() -> dict:
    return stepping(sharding(ZERO2, LAYER), steps=2, inside={"states": "host"})


def zero3_stepping() -> dict:
    return stepping(sharding(ZERO3, NONE), layers=2, checkpointed=True)


def every_bucketing_mode() -> dict:
    """Those that no other case has, on the smallest model; Thunder builds no buckets in any."""
    wraps = {
        "zero2 LAYER": (sharding(ZERO2, LAYER), True),
        "zero2 BLOCK": (sharding(ZERO2, BLOCK), True),
        "zero3 NONE": (sharding(ZERO3, NONE), True),
        "ddp 0 MB": (lambda jitted: ddp(jitted, bucket_size_in_mb=0), False),
        "ddp 1 MB": (lambda jitted: ddp(jitted, bucket_size_in_mb=1), False),
    }
    found = {
        name: step(wrap, original=model(layers=0), sharded=sharded, options={"chunk": False})
        for name, (wrap, sharded) in wraps.items()
    }
    return {
        "error": max(case["error"] for case in found.values()),
        "digest": "".join(case["digest"] for case in found.values()),
        "collectives": {name: len(case["forward"] + case["backward"]) for name, case in found.items()},
    }


def step(
    wrap: Callable, *, original: nn.Module | None = None, sharded: bool = True, rows=lambda rank, step: 12,
    steps: int = 1, options: dict | None = None, executors: list | None = None,
) -> dict:  # fmt: skip
    """Compile, run and compare; what a case gives back."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    original = original or model()
    wanted = [eager(original, [batch(r, rows(r, s), s) for r in range(world)]) for s in range(steps)]
    given = [] if executors is None else executors
    compiled = wrap(thunder.jit(original, executors=given, transforms=[MemEfficient(strict=True, **(options or {}))]))
    errors = []
    for s, (losses, gradients) in enumerate(wanted):
        loss = compiled(*batch(rank, rows(rank, s), s))
        loss.backward()
        errors += [abs(loss.item() - losses[rank]) / losses[rank], gradient_error(compiled, gradients, sharded)]
        for parameter in compiled.parameters():
            parameter.grad = None
    plan = last_plan(compiled)
    forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    return {
        "error": max(errors),
        "forward": names(forward),
        "backward": names(backward),
        "saved_bytes": _saved_bytes(forward),
        "decisions": [(d.what, d.how) for d in plan.decisions],
        "peaks": (plan.candidate.forward_peak_bytes, plan.candidate.backward_peak_bytes),
        "starts": [b.flat_proxy_args[0].name for b in forward.bound_symbols if starts(b)],
        "digest": schedule_of(forward).digest + schedule_of(backward).digest,
    }


def _saved_bytes(forward) -> int:
    saved = forward.output[1][0]
    arguments = {p.name for p in forward.args}
    return sum(p.numel * p.dtype.bytes for p in saved if p.name not in arguments)


def sharding(strategy: FSDPType, bucketing: FSDPBucketingStrategy) -> Callable:
    return lambda jitted: fsdp(jitted, device=CPU, sharding_strategy=strategy, bucketing_strategy=bucketing)


@contextmanager
def late(seed: int):
    """Before each collective this rank sleeps a while, or not at all."""
    chance = random.Random(f"{seed}/{distributed.get_rank()}")

    def slowly(function):
        def call(*args, **kwargs):
            time.sleep(chance.choice([0.0, 0.0, 0.01, 0.05]))
            return function(*args, **kwargs)

        return call

    with mock.patch.multiple(
        distributed,
        **{
            f: slowly(getattr(distributed, f))
            for f in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
        },
    ):
        yield


class _Ended:
    """Of a collective that has ended: holds what a real handle holds until it is gone."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        pass


@contextmanager
def no_thread_holds_tensors():
    """Collectives end where they start: gloo's threads let go of tensors a while after a wait, not in it."""

    def at_once(function):
        def call(out, given, *args):
            *options, _ = args
            function(out, given, *options, True).wait()
            time.sleep(0.02)
            return _Ended(out, given)

        return call

    with mock.patch.multiple(
        distributed,
        **{f: at_once(getattr(distributed, f)) for f in ("all_gather_into_tensor", "reduce_scatter_tensor")},
    ):
        yield


ZERO2, ZERO3 = FSDPType.ZERO2, FSDPType.ZERO3
NONE, LAYER, BLOCK = FSDPBucketingStrategy.NONE, FSDPBucketingStrategy.LAYER, FSDPBucketingStrategy.BLOCK


def ddp_whole() -> dict:
    return step(ddp, sharded=False, options={"chunk": False})


def ddp_chunked() -> dict:
    return step(ddp, sharded=False, options={"chunk": ChunkLossHead(chunks=4)}, original=model(tied=True))


def ddp_tiles() -> dict:
    return step(ddp, sharded=False, options={"tile": Tiles(rows=5)}, original=model(layers=2))


def zero3_tiles() -> dict:
    return step(sharding(ZERO3, LAYER), options={"tile": Tiles(rows=5)}, original=model(layers=2, checkpointed=True))


@contextmanager
def few_blocks():
    """Small programs have groups of heads too."""
    with mock.patch.object(heads, "_CPU_BLOCKS", 2):
        yield


def ddp_heads() -> dict:
    options = {"tile": Tiles(rows=5)}
    with few_blocks():
        return step(ddp, sharded=False, options=options, original=model(attends=True), executors=[mem_attention_ex])


def zero3_heads() -> dict:
    original, options = model(layers=2, checkpointed=True, attends=True), {"tile": Tiles(rows=5)}
    with few_blocks():
        return step(sharding(ZERO3, LAYER), options=options, original=original, executors=[mem_attention_ex])


def zero2() -> dict:
    return step(sharding(ZERO2, NONE), options={"chunk": False})


def zero3_layer() -> dict:
    return step(sharding(ZERO3, LAYER), options={"chunk": False})


def zero3_block_chunked_late() -> dict:
    """Ranks are late at random, and get batches of different lengths, from the second step on."""
    with late(0):
        return step(
            sharding(ZERO3, BLOCK),
            options={"chunk": ChunkLossHead(chunks=4)},
            rows=lambda rank, step: 12 + 4 * step * rank,
            steps=2,
        )


def zero3_checkpointed_tied() -> dict:
    return step(sharding(ZERO3, NONE), original=model(layers=2, tied=True, checkpointed=True))


def zero3_budget() -> dict:
    """As little as there is: the backward computes again what it can."""
    return step(sharding(ZERO3, NONE), original=model(layers=2), options={"budget": 1, "on_infeasible": "warn"})


def peaks() -> dict:
    """Measured bytes of a step, of Thunder's and of both shardings, and what was planned.

    The least of several steps, because threads of gloo let go of what they hold at any time.
    """
    found = {}
    for name, transforms, strategy in (
        ("thunder", [], ZERO3),
        ("zero2", [MemEfficient(strict=True)], ZERO2),
        ("zero3", [MemEfficient(strict=True)], ZERO3),
    ):
        compiled = sharding(strategy, NONE)(
            thunder.jit(model(layers=2, width=128), executors=[], transforms=transforms)
        )
        tokens, targets = batch(distributed.get_rank(), rows=64)

        def run(compiled=compiled, tokens=tokens, targets=targets):
            compiled(tokens, targets).backward()

        run()
        held = sum(t.nbytes for t in (tokens, targets, *compiled.parameters()))
        measured = []
        for _ in range(5):
            for parameter in compiled.parameters():
                parameter.grad = None
            with no_thread_holds_tensors():
                measured.append(measure_peak(run) + held)
        found[name] = min(measured)
        if (plan := last_plan(compiled)) is not None:
            found[f"{name} planned"] = plan.candidate.peak_bytes
    return found


class Head(nn.Module):
    """A head with a loss of its logits (B, T, V) and the targets."""

    def __init__(self, loss: Callable, vocabulary: int = VOCABULARY, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)
        self.scale = nn.Parameter(torch.rand(vocabulary))
        self.register_buffer("weights", torch.rand(vocabulary))
        self.loss = loss

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self, self.head(self.embedding(tokens)).flatten(0, 1), targets.flatten())


def _of_everything(module: Head, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """All that crosses a vocabulary: sums and log-sum-exps over it, picks, and a parameter and a buffer along it."""
    capped = 5 * torch.tanh(logits * module.scale / 5)
    z = torch.logsumexp(capped, -1)
    loss = cross_entropy(capped, targets, weight=module.weights, ignore_index=3, label_smoothing=0.1)
    return loss + 0.1 * (z * z).mean()


def _plain(module: Head, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, targets) + 0 * module.scale.sum()


def _accuracy(module: Head, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """An argmax needs all logits of a row."""
    hits = (logits.argmax(-1) == targets).float().mean()
    return cross_entropy(logits, targets) + hits + 0 * module.scale.sum()


def _each_row(module: Head, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits * module.scale, targets, reduction="none")


def _entropy(module: Head, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits * module.scale, -1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def _squares(module: Head, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The gradient of a maximum over the vocabulary is none of its parts'."""
    return torch.softmax(logits * module.scale, -1).square().sum()


def in_parts(jitted, kind: type = TransformForColumnWiseParallel):
    """As Thunder's `column_parallel` and `row_parallel`, which know CUDA alone."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    transform = kind(rank=rank, world_size=world, process_group=distributed.new_group(), target_modules=("head",))
    transform.device = CPU
    return add_transform(jitted, transform=[transform])


def tensor_parallel_head(
    loss: Callable = _of_everything,
    chunk: bool | ChunkLossHead | None = None,
    kind: type = TransformForColumnWiseParallel,
) -> dict:
    """The head's vocabulary (or what it reads) is split over ranks; all ranks have the same batch."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    original = Head(loss)
    reference = copy.deepcopy(original).double()
    loss_wanted = reference(*batch(0)).sum()
    loss_wanted.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    chunk = ChunkLossHead(chunks=4) if chunk is None else chunk
    jitted = thunder.jit(original, executors=[], transforms=[MemEfficient(strict=True, chunk=chunk)])
    compiled = in_parts(jitted, kind)
    found = compiled(*batch(0)).sum()
    found.backward()
    columns = kind is TransformForColumnWiseParallel
    wanted["head.weight"] = wanted["head.weight"].chunk(world, dim=0 if columns else 1)[rank]
    if columns:
        wanted["head.bias"] = wanted["head.bias"].chunk(world)[rank]
    gradients = gradient_error(compiled, wanted, sharded=False)
    plan, trace = last_plan(compiled), thunder.last_traces(compiled)[-1]
    return {
        "error": max((abs(found - loss_wanted) / loss_wanted).item(), gradients),
        "loops": [d.how for d in plan.decisions if d.what == "loss head"],
        "refused": [f"{r.what}: {r.reason}" for r in plan.refused],
        "text": str(trace),
        "digest": schedule_of(trace).digest,
    }


def tensor_parallel_losses() -> dict:
    """Every loss, its logits in chunks and whole."""
    found = [
        tensor_parallel_head(loss, chunk)
        for loss in (_of_everything, _plain, _accuracy, _each_row, _entropy, _squares)
        for chunk in (None, True, False)
    ]
    found.append(by_rows := tensor_parallel_head(_plain, kind=TransformForRowWiseParallel))
    return {
        "error": max(f["error"] for f in found),
        "digest": "".join(f["digest"] for f in found),
        "refused by rows": by_rows["refused"],
    }


def tensor_parallel_peaks() -> dict:
    """Measured bytes of a step: of Thunder alone, with the logits in parts, and these in chunks."""
    found = {}
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(8192, (2, 512), generator=generator) for _ in range(2))
    for name, transforms in (
        ("thunder", []),
        ("in parts", [MemEfficient(strict=True, chunk=ChunkLossHead(chunks=1))]),
        ("in chunks", [MemEfficient(strict=True, chunk=ChunkLossHead(chunks=8))]),
    ):
        module = Head(_plain, vocabulary=8192, width=32)
        compiled = in_parts(thunder.jit(module, executors=[], transforms=transforms))

        def run(compiled=compiled):
            compiled(tokens, targets).backward()

        run()
        for parameter in compiled.parameters():
            parameter.grad = None
        found[name] = measure_peak(run)
    return found


def different_plans() -> dict:
    """Rank 1 orders the same program in another way."""
    order = "source" if distributed.get_rank() == 1 else "auto"
    compiled = sharding(ZERO2, NONE)(thunder.jit(model(layers=0), executors=[], transforms=[MemEfficient(sort=order)]))
    try:
        compiled(*batch(0))
    except RanksDifferError as difference:
        return {"message": str(difference)}
    return {"message": ""}


def different_models() -> dict:
    """Rank 1 has one layer more than the others."""
    compiled = sharding(ZERO3, NONE)(
        thunder.jit(model(layers=1 + (distributed.get_rank() == 1)), executors=[], transforms=[MemEfficient()])
    )
    try:
        compiled(*batch(0))
    except RanksDifferError as difference:
        return {"message": str(difference)}
    return {"message": ""}


def one_rank_fails() -> dict:
    """Rank 1 has no plan that fits its budget; the others are told so, and do not hang."""
    last = distributed.get_rank() == 1
    store = distributed.distributed_c10d._get_default_store()
    before = store.timeout
    compiled = sharding(ZERO2, NONE)(
        thunder.jit(model(layers=0), executors=[], transforms=[MemEfficient(budget=1 if last else None)])
    )
    store.set_timeout(timedelta(seconds=1))
    try:
        compiled(*batch(0))
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}
    finally:
        store.set_timeout(before)
    return {"type": ""}


def fused(strategy: FSDPType | None, bucketing: FSDPBucketingStrategy = NONE) -> Callable:
    def case() -> dict:
        from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

        wrap = ddp if strategy is None else sharding(strategy, bucketing)
        with late(1):
            return step(wrap, sharded=strategy is not None, executors=[mem_pointwise_ex])

    return case


CASES: dict[str, Callable[[], dict]] = {
    f.__name__: f
    for f in (
        ddp_chunked,
        zero3_tiles,
        zero2,
        zero3_layer,
        different_models,
        different_plans,
        one_rank_fails,
        one_rank_overflows,
        zero2_stepping,
    )
}
MORE_CASES = {
    f.__name__: f
    for f in (
        ddp_tiles,
        ddp_heads,
        zero3_heads,
        zero3_block_chunked_late,
        every_bucketing_mode,
        tensor_parallel_head,
        ddp_stepping_in_two_passes,
        zero2_stepping_from_host,
    )
}
FOUR_CASES = {f.__name__: f for f in (ddp_chunked, zero3_block_chunked_late, tensor_parallel_head, different_models)}
SLOW_CASES: dict[str, Callable[[], dict]] = {
    "fused_ddp": fused(None),
    **{
        f"fused_zero{n}_{b.name.lower()}": fused(s, b)
        for n, s in ((2, ZERO2), (3, ZERO3))
        for b in (NONE, LAYER, BLOCK)
    },
    **{
        f.__name__: f
        for f in (
            ddp_whole,
            every_bucketing_mode,
            zero3_checkpointed_tied,
            zero3_budget,
            peaks,
            tensor_parallel_losses,
            tensor_parallel_peaks,
            ddp_stepping,
            ddp_stepping_accumulated,
            zero3_stepping,
        )
    },
}


TABLES = {"two": CASES, "two, more": MORE_CASES, "four": FOUR_CASES, "four, fused": SLOW_CASES}
"""By a name, as a table itself holds functions, which no process hands another."""


def run_rank(rank: int, world: int, folder: str, which: str) -> None:
    """Some cases on one rank; what they give back lies in `folder`.

    Args:
        rank: this one.
        world: how many there are.
        folder: shared by all.
        which: the name of one of `TABLES`.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=180)
    )
    found = {}
    with looked_up_once():
        for name, case in TABLES[which].items():
            began = time.perf_counter()
            found[name] = case() | {"seconds": time.perf_counter() - began}
            distributed.barrier()
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
