"""A loss head, its inputs and its exact gradients, for the tests of the chunker."""

import thunder
import torch
import torch.nn.functional as F

from thunder_mem.loop_body.leaves import Program, read_program
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead


def head(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)


def inputs(n=37, d=16, v=101, dtype=torch.float32, scale=0.3):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(v, d, generator=g) * scale).to(dtype).requires_grad_()
    return x, w, torch.randint(0, v, (n,), generator=g)


def chunked(fn, **options):
    transform = ChunkLossHead(**(options or {"chunks": 4}))
    return thunder.jit(fn, transforms=[transform]), transform


def program_of(fn, *args) -> Program:
    """The leaves of a function's computation trace, before autograd."""
    jitted = thunder.jit(fn, executors=[])
    jitted(*args)
    return read_program(thunder.last_traces(jitted)[0])


def exact(fn, *args, tangent=1.0):
    """Value and gradients in float64 eager."""
    args = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    out = fn(*args)
    wanted = [a for a in args if a.requires_grad]
    return out.detach(), torch.autograd.grad(out, wanted, torch.full_like(out, tangent))


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def packed_bytes(rows: int, d: int, v: int, dtype: torch.dtype) -> int:
    """The most that a product of a head takes beside its result on this CPU, whose kernels may pack their operands."""
    x, w, logits = (torch.zeros(shape, dtype=dtype) for shape in ((rows, d), (v, d), (rows, v)))
    products = [lambda: x @ w.t(), lambda: logits @ w, lambda: logits.t() @ x]
    return max(measure_peak(product) - product().nbytes for product in products)
