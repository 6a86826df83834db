"""Cases about everything but memory: modules, random numbers, dtypes, structures, gradients, checkpoints."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.programs.cases import Case, case, randn

__all__ = ["PROGRAMS"]

PROGRAMS: dict[str, Case] = {}


class Net(nn.Module):
    """Runs `forward_of(net, *args)` over the given submodules."""

    def __init__(self, forward_of, **modules):
        super().__init__()
        self.forward_of = forward_of
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args):
        return self.forward_of(self, *args)


def _conv_net():
    torch.manual_seed(1)
    return Net(lambda m, x: F.relu(m.norm(m.conv(x))).sum((2, 3)), conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4))


@case(PROGRAMS)
def _batch_norm_in_training():
    return _conv_net(), (randn(3, 2, 6, 6),)


@case(PROGRAMS)
def _batch_norm_in_evaluation():
    return _conv_net().eval(), (randn(3, 2, 6, 6),)


@case(PROGRAMS)
def _one_batch_norm_twice():
    return Net(lambda m, x: m.norm(m.norm(x) * 2 + 1), norm=nn.BatchNorm1d(5)), (randn(6, 5),)


@case(PROGRAMS)
def _batch_norm_whose_statistics_are_computed_and_read():
    """Eager updates them outside of autograd: they hand no gradient to what they are statistics of."""

    def forward(x, y):
        mean, var = y * 2, y * y
        normed = F.batch_norm(x, mean, var, training=True, momentum=0.25)
        return normed + mean, var * x

    return forward, (randn(3, 5), randn(5, grad=False))


@case(PROGRAMS)
def _batch_norm_without_gradient():
    return Net(lambda m, x: m.norm(x) * 2, norm=nn.BatchNorm1d(5, affine=False)), (randn(6, 5, grad=False),)


@case(PROGRAMS)
def _counting_buffer():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return x * self.count

    return Counting(), (randn(3),)


@case(PROGRAMS)
def _frozen_parameters():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    net[2].weight.requires_grad_(False)
    net[0].bias.requires_grad_(False)
    return net, (randn(3, 4, grad=False),)


@case(PROGRAMS)
def _only_the_last_layer_learns():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).requires_grad_(False)
    net[2].requires_grad_(True)
    return net, (randn(3, 4, grad=False),)


@case(PROGRAMS)
def _tied_weights():
    torch.manual_seed(1)
    layer = nn.Linear(4, 4, bias=False)
    return Net(lambda m, x: m.b(m.a(x).sin()).cos(), a=layer, b=layer), (randn(3, 4),)


@case(PROGRAMS)
def _embedding_as_head():
    torch.manual_seed(1)
    return Net(lambda m, i: m.e(i).sin() @ m.e.weight.t(), e=nn.Embedding(7, 4)), (torch.tensor([1, 2, 6]),)


@case(PROGRAMS, held_to="eager")  # Thunder saves the overwritten value
def _activations_in_place():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True)), (randn(3, 4),)


@case(PROGRAMS)
def _attention_block():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).view(2, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(y.transpose(1, 2).reshape(2, 6, 16))

    torch.manual_seed(1)
    return Block(), (randn(2, 6, 16),)


@case(PROGRAMS, held_to="thunder")  # Thunder draws dropout's mask by `uniform`
def _dropout():
    def program(x):
        a = F.dropout(x * 2, 0.5)
        b = F.dropout(x.sin(), 0.3)
        return (a + b.cos()).sum(0), b

    return program, (randn(16, 16),)


@case(PROGRAMS, double=False)
def _random_numbers_between_regions():
    def program(x):
        a = x.sin() + torch.rand_like(x)
        y = a @ a
        b = torch.randn_like(x) * y
        return b.cos() + a * torch.rand(16, 16), torch.randn(3)

    return program, (randn(16, 16),)


@case(PROGRAMS, double=False)
def _random_mask_with_gradient():
    def program(x):
        mask = (torch.rand_like(x) > 0.5).float()
        return x * mask * (torch.rand_like(x) * x).exp(), mask

    return program, (randn(4, 3),)


@case(PROGRAMS)
def _nested_structure():
    def program(x, d):
        return {"a": (x * d["u"], None), "b": [x, {"c": d["v"].sin()}], "n": 3}

    return program, (randn(4), {"u": randn(4, seed=1), "v": randn(2, seed=2)})


@case(PROGRAMS)
def _keyword_arguments():
    def program(x, *, scale=2.0, bias=None):
        return x * scale + bias

    return program, (randn(4),), {"scale": 3.0, "bias": randn(4, seed=1)}


@case(PROGRAMS)
def _python_numbers_among_the_outputs():
    return lambda x: (x.shape[0], x.ndim, 3.5, "s", None, x * x.shape[0], True), (randn(4, 6),)


@case(PROGRAMS)
def _constants_alone():
    return lambda x: (1, 2.0, (3, [4])), (randn(4),)


@case(PROGRAMS)
def _nothing_returned():
    return lambda x: None, (randn(4),)


@case(PROGRAMS, double=False)
def _no_tensor_argument():
    return lambda n: (torch.ones(3) * n, torch.arange(4), torch.zeros(2, 2).exp()), (3,)


@case(PROGRAMS)
def _numbers_as_arguments():
    return lambda x, n, f, s, b, none: (x * n + f if b else x, n + 1), (randn(4), 3, 2.5, "s", True, None)


@case(PROGRAMS)
def _prints():
    def program(x):
        y = x.sin()
        print("one")
        z = y * 2
        print("two", 3)
        return z.cos()

    return program, (randn(4),)


@case(PROGRAMS)
def _zero_dims():
    return lambda x, y: (x * y, x.exp().sum(), y.expand(3) * 2, x.reshape(1)), (randn(), randn(seed=1))


@case(PROGRAMS)
def _zero_size():
    def program(x, y):
        return x * 2, x.sum(0), torch.cat([x, y]).sin(), y @ x.t()

    return program, (randn(0, 3), randn(2, 3))


@case(PROGRAMS, double=False)
def _integers_and_booleans():
    def program(i, b, x):
        return i * 2 + b, b & ~b, b | (i > 1), x[i], b.sum(), i // 2, b.to(torch.int32), i.argmax(), (i > 2).any()

    return program, (torch.tensor([0, 1, 2, 3]), torch.tensor([True, False, True, True]), randn(5))


@case(PROGRAMS)
def _scalars_in_where():
    def program(x):
        return torch.where(x > 0, 1.0, x), torch.where(x > 0, x, 0), torch.where(x.isnan(), float("inf"), x * 2)

    return program, (randn(4),)


@case(PROGRAMS, held_to="thunder")  # Thunder gives index_put's values no gradient
def _index_put():
    def program(x, i, v):
        y = x * 2
        return torch.index_put(y, (i,), v, True), y.sum()

    return program, (randn(6, 3), torch.tensor([1, 1, 2]), randn(3, 3, seed=1))


@case(PROGRAMS)
def _scatter_and_gather():
    def program(x, i):
        y = x.exp()
        return torch.scatter(y, 0, i, x * 2), torch.scatter_add(y, 0, i, x), torch.gather(y, 0, i)

    return program, (randn(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3], [2, 0, 0], [3, 3, 1]]))


@case(PROGRAMS)
def _cumsum_sort_and_topk():
    def program(x):
        values, where = x.topk(2, -1)
        ordered, places = torch.sort(x, -1)
        return values * 2, where, ordered, places, x.argmax(-1), x.cumsum(0).sin()

    return program, (randn(4, 6),)


@case(PROGRAMS)
def _reductions():
    def program(x):
        return x.var(0), x.std(), x.mean(1), *torch.var_mean(x, 0), x.prod(0), x.amax(1), x.norm()

    return program, (randn(4, 5),)


@case(PROGRAMS)
def _masks_and_clamps():
    def program(x, m):
        return x.masked_fill(m, float("-inf")).softmax(-1), torch.tril(x), torch.triu(x, 1), x.clamp(-1, 1)

    return program, (randn(4, 4), torch.eye(4).bool())


@case(PROGRAMS)
def _powers():
    return lambda x: (x.abs() ** 0.5, 2**x, x**2, x**3, x.abs() ** x), (randn(4),)


@case(PROGRAMS)
def _loss_inside():
    def program(x, w, t):
        return F.cross_entropy(x @ w, t), F.cross_entropy(x @ w, t, reduction="none"), F.mse_loss(x, x * 2)

    return program, (randn(4, 4), randn(4, 9, seed=1), torch.tensor([0, 3, 8, -100]))


@case(PROGRAMS)
def _great_fan_out():
    def program(x):
        y = x.sin()
        return sum([(y * k).cos() for k in range(12)])

    return program, (randn(8),)


@case(PROGRAMS)
def _an_input_that_is_not_used():
    return lambda x, y, z: (x.sin(), z.detach() * 2), (randn(4), randn(4, seed=1), randn(4, seed=2))


@case(PROGRAMS)
def _some_inputs_want_gradients():
    def program(x, w, b):
        return torch.tanh(x @ w + b) * x.sum(), (w * b).exp()

    return program, (randn(4, 4, grad=False), randn(4, 4, seed=1), randn(4, grad=False, seed=2))


@case(PROGRAMS)
def _no_grad_inside():
    def program(x, w):
        y = (x @ w).sin()
        with torch.no_grad():
            scale = y.abs().mean() + 1
        return y / scale, scale

    return program, (randn(4, 4), randn(4, 4, seed=1))


@case(PROGRAMS)
def _enable_grad_inside_no_grad():
    def program(x):
        with torch.no_grad():
            y = x.sin()
            with torch.enable_grad():
                z = x.cos()
        return y + z

    return program, (randn(4),)


@case(PROGRAMS, double=False)
def _autocast():
    def program(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        return y.float().sin(), y

    return program, (randn(4, 4), randn(4, 4, seed=1))


@case(PROGRAMS, double=False)
def _half_precision():
    def program(x, w):
        return F.gelu(x @ w).softmax(-1) * x, x.float().sum()

    return program, (randn(4, 4, dtype=torch.bfloat16), randn(4, 4, dtype=torch.bfloat16, seed=1))


@case(PROGRAMS, double=False)
def _complex_numbers():
    x = torch.complex(randn(4, grad=False), randn(4, grad=False, seed=1))
    return lambda x, y: (x * y, x.real, x.abs()), (x, randn(4, grad=False, seed=2))


@case(PROGRAMS)
def _channels_last():
    x = randn(2, 3, 6, 6, grad=False).to(memory_format=torch.channels_last).requires_grad_()
    return lambda x, w: F.conv2d(x, w).relu().sum((2, 3)), (x, randn(4, 3, 3, 3))


@case(PROGRAMS)
def _checkpoints():
    def program(x, w):
        def block(x, w):
            return torch.softmax((x @ w).sin(), -1) @ w

        y = checkpoint(block, x, w, use_reentrant=False)
        return checkpoint(block, y, w, use_reentrant=False).sum(0)

    return program, (randn(4, 4), randn(4, 4, seed=1))


@case(PROGRAMS)
def _checkpoint_with_several_results():
    def program(x, w):
        def block(x, w):
            y = (x @ w).sin()
            return y, y.t() @ x, x

        a, b, c = checkpoint(block, x, w, use_reentrant=False)
        return a * b, c

    return program, (randn(4, 4), randn(4, 4, seed=1))


@case(PROGRAMS)
def _autograd_function():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp() * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.exp() * 3  # not the derivative, so that nobody else's will do

    return lambda x: Twice.apply(x.sin()).cos(), (randn(4),)


@case(PROGRAMS)
def _jitted_function_inside():
    import thunder

    inner = thunder.jit(lambda x: x.sin() * 2, executors=[])
    return lambda x: inner(x).cos(), (randn(4),)
