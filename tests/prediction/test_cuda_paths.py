"""What autograd saves on CPU stand-ins is what it saves on CUDA: forwards on fake CUDA tensors are the oracle."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from thunder.executors.utils import SpdaBackend
from torch import nn

from thunder_mem.memory.device_specs import device_spec
from thunder_mem.prediction.cuda_paths import cuda_paths
from thunder_mem.prediction.simulate import attention_backend_for, simulate


class Wrapped(nn.Module):
    """A function of the product of its input and a weight."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return self.fn(x @ self.weight)


class Attention(nn.Module):
    def __init__(self, mask=False, groups=4):
        super().__init__()
        self.qkv, self.out, self.mask, self.groups = nn.Linear(64, 192), nn.Linear(64, 64), mask, groups

    def forward(self, x):
        q, k, v = (t.view(2, 16, 4, 16).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v = k[:, : self.groups], v[:, : self.groups]
        mask = torch.ones(16, 16, dtype=torch.bool, device=x.device).tril() if self.mask else None
        options = {"is_causal": mask is None, "dropout_p": 0.1, "enable_gqa": self.groups < 4}
        y = F.scaled_dot_product_attention(q, k, v, mask, **options)
        return self.out(y.transpose(1, 2).reshape(2, 16, 64))


def labels(x):
    return torch.zeros(32, dtype=torch.long, device=x.device)


FUNCTIONS = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax into float32": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "half softmax into float32": lambda x: F.softmax(x.half(), -1, dtype=torch.float32),
    "cross entropy": lambda x: F.cross_entropy(x.flatten(0, 1), labels(x)),
    "smoothed cross entropy": lambda x: F.cross_entropy(x.flatten(0, 1), labels(x), label_smoothing=0.1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "norm": lambda x: x.norm(dim=-1),
    "pow": lambda x: x.pow(2),
    "exp": lambda x: x.exp(),
    "rsqrt": lambda x: x.rsqrt(),
    "softplus": F.softplus,
    "silu": F.silu,
    "logsumexp": lambda x: x.logsumexp(-1),
    "group norm": lambda x: F.group_norm(x, 4),
    "einsum": lambda x: torch.einsum("btd,bsd->bts", x, x),
    "kl": lambda x: F.kl_div(F.log_softmax(x, -1), torch.zeros_like(x), reduction="batchmean"),
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "cat": lambda x: torch.cat([x, x.float()], -1),
    "cumsum": lambda x: x.cumsum(-1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "cosine": lambda x: F.cosine_similarity(x, x * 2),
}
MODULES = {
    **{name: lambda fn=fn: Wrapped(fn) for name, fn in FUNCTIONS.items()},
    "mlp with dropout": lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1)),
    "dropout of nothing": lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.0)),
    "dropout when it is off": lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)).eval(),
    "rms norm": lambda: nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64)),
    "conv": lambda: nn.Conv1d(16, 16, 3),
    "prelu": lambda: nn.Sequential(nn.Linear(64, 64), nn.PReLU()),
    "attention": Attention,
    "attention with a mask": lambda: Attention(mask=True),
    "attention of groups": lambda: Attention(groups=1),
}
WAYS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


def saved(make, device, dtype, autocast):
    """Shapes, dtypes and bytes of what a forward saves, and what its storages take together."""
    kept, found = [], []

    def pack(t):
        kept.append(t)
        found.append((tuple(t.shape), t.dtype, t.untyped_storage().nbytes(), t.untyped_storage()._cdata))
        return t

    with torch.device(device):
        module, x = make().to(dtype), torch.randn(2, 16, 64, dtype=dtype).requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext(),
    ):
        y = module(x)
    layouts = sorted(str(entry[:3]) for entry in set(found))
    return y.dtype, layouts, sum({cdata: nbytes for *_, nbytes, cdata in found}.values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_a_forward_saves_what_it_saves_on_cuda(way):
    wrong = []
    with simulate("H100-80GB", fusion=None):
        for name, make in MODULES.items():
            on_cuda = saved(make, "cuda", *WAYS[way])
            # Fake CUDA tensors have no device to ask which attention it takes, so PyTorch takes none of the kernels.
            with cuda_paths(lambda *_: SpdaBackend.MATH):
                here = saved(make, "cpu", *WAYS[way])
            if on_cuda != here:
                wrong.append((name, on_cuda, here))
    assert not wrong


def test_attention_is_the_kernel_that_the_device_takes():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    def kernel(device, dtype, make):
        names.clear()
        spec = device_spec(device)
        with simulate(device, fusion=None), cuda_paths(attention_backend_for(spec)), Names():
            module = make().to(dtype)
            module(torch.randn(2, 16, 64, dtype=dtype))
        return next(n.rpartition("product_")[2] for n in names if "attention" in n)

    names = []
    assert kernel("H100-80GB", torch.bfloat16, Attention) == "flash_attention"
    assert kernel("H100-80GB", torch.bfloat16, lambda: Attention(groups=1)) == "flash_attention"
    assert kernel("H100-80GB", torch.bfloat16, lambda: Attention(mask=True)) == "efficient_attention"
    assert kernel("H100-80GB", torch.float32, Attention) == "efficient_attention"
    assert kernel("T4", torch.float16, Attention) == "efficient_attention"


def test_pytorch_is_left_as_it_was():
    x = torch.randn(4, 8, requires_grad=True)
    before = [type(F.dropout(x, 0.5).grad_fn), type(F.rms_norm(x, (8,)).grad_fn), torch.set_autocast_enabled]
    with simulate("A100-80GB", fusion=None), cuda_paths(lambda *_: SpdaBackend.MATH):
        inside = torch.randn(4, 8).requires_grad_()
        assert type(F.dropout(inside, 0.5).grad_fn) is not before[0]
    after = [type(F.dropout(x, 0.5).grad_fn), type(F.rms_norm(x, (8,)).grad_fn), torch.set_autocast_enabled]
    assert after == before and not torch.is_autocast_enabled("cpu")
