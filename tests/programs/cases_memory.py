"""Cases about memory: views, aliases and writes in place, of arguments and of intermediate values."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.programs.cases import Case, case, randn

__all__ = ["MEMORY", "VIEWS"]

MEMORY: dict[str, Case] = {}

# What may hand out its operand's memory, and what must not; the argument is a dense 4 x 4 tensor.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "movedim": lambda x: x.movedim(0, 1),
    "select": lambda x: x.select(0, 1),
    "index": lambda x: x[1],
    "slice": lambda x: x[::2, 1:],
    "ellipsis and None": lambda x: x[..., None, 0],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "diagonal": lambda x: x.diagonal(),
    "flatten": lambda x: x.flatten(),
    "flatten, a copy": lambda x: x.t().flatten(),
    "view": lambda x: x.view(2, -1),
    "view of bits": lambda x: x.view(torch.int32).view(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "contiguous, a copy": lambda x: x.t().contiguous(),
    "contiguous, channels last": lambda x: x.reshape(1, 1, 4, 4).contiguous(memory_format=torch.channels_last),
    "to the same dtype": lambda x: x.to(torch.float32),
    "to the same dtype, a copy": lambda x: x.to(torch.float32, copy=True),
    "to the same device": lambda x: x.to("cpu"),
    "type_as": lambda x: x.type_as(x),
    "there and back": lambda x: x.double().float(),
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: x.split(1)[0],
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "unbind": lambda x: x.unbind(0)[2],
    "chunk, transposed, flat": lambda x: x.chunk(4)[3].t().flatten(),
    "unsqueeze and squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand to its own shape": lambda x: x.expand(4, 4),
    "sum_to_size": lambda x: x.sum_to_size(4, 4),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[0])[0],
    "dropout in evaluation": lambda x: torch.dropout(x, 0.5, False),
    "alpha_dropout in evaluation": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "cat of one": lambda x: torch.cat([x]),
    "index_select": lambda x: torch.index_select(x, 0, torch.arange(2)),
}


def _through(view: Callable, double: bool) -> Case:
    """The view is read before and after its base is overwritten, the base before and after its view is."""

    def program(x, w):
        y = w * 1 + x * 2
        a = view(y)
        before = a.sin()
        y.mul_(2)
        z = w * 3 + x
        b = view(z)
        early = z.cos()
        b.add_(1)
        return before, a * 3, y.exp(), early, b * 2, z.sin()

    return Case(lambda: (program, (randn(4, 4, grad=False), randn(4, 4, grad=False, seed=1))), double=double)


_OF_FLOAT32_ALONE = ("view of bits", "to the same dtype")
MEMORY |= {f"view: {name}": _through(view, double=name not in _OF_FLOAT32_ALONE) for name, view in VIEWS.items()}


@case(MEMORY)
def _write_to_an_intermediate():
    def program(x, w):
        y = x @ w
        z = y.sin()
        y.add_(1)
        return y * z, z.exp()

    return program, (randn(4, 4, grad=False), randn(4, 4, grad=False, seed=1))


@case(MEMORY)
def _write_to_an_intermediate_with_gradient():
    def program(x, w):
        y = x @ w
        y.add_(1)
        y = y.sin()
        y.mul_(2)
        return y.exp()

    return program, (randn(4, 4), randn(4, 4, seed=1))


@case(MEMORY, held_to="eager")
def _overwritten_operand_of_a_saved_function():
    def program(x):
        y = x * 2
        y.sin_()
        return y

    return program, (randn(4),)


@case(MEMORY)
def _write_to_an_argument():
    def program(x, y):
        z = x * y
        x.mul_(2)
        return z + x, y.cos()

    return program, (randn(4, 3, grad=False), randn(4, 3, grad=False, seed=1))


@case(MEMORY, held_to="eager")
def _argument_overwritten_by_what_has_a_gradient():
    def program(buffer, w):
        buffer.mul_(w)
        return buffer.sum()

    return program, (randn(4, 3, grad=False), randn(4, 3, seed=1))


@case(MEMORY, held_to="eager")
def _argument_overwritten_twice_by_what_has_a_gradient():
    def program(buffer, w):
        before = buffer.sin() * 2
        buffer.mul_(w)
        buffer.mul_(w)
        return (buffer.sin() + before).sum()

    return program, (randn(4, 3, grad=False), randn(4, 3, seed=1))


@case(MEMORY)
def _write_to_an_argument_beside_a_gradient():
    def program(x, buffer):
        y = (x * buffer.exp()).sin()
        buffer.mul_(0.9).add_(x.detach() * 0.1)
        return y, buffer * x

    return program, (randn(4, 3), randn(4, 3, grad=False, seed=1))


@case(MEMORY)
def _written_argument_returned():
    def program(x):
        x.mul_(2)
        return x, x.t(), x + 1

    return program, (randn(4, 3, grad=False),)


@case(MEMORY)
def _write_through_a_view_of_an_argument():
    def program(x):
        v = x[1:3].t()
        before = x * 1
        v.mul_(2)
        return before, x.sum(), v * 3

    return program, (randn(4, 5, grad=False),)


@case(MEMORY)
def _write_through_a_view_of_a_view():
    def program(x):
        y = x * 2
        v = y[1:].t()[1:]
        early = y.sin()
        v.add_(1)
        return early, y, v.cos()

    return program, (randn(4, 5, grad=False),)


@case(MEMORY)
def _views_of_a_value_that_is_written_later():
    def program(x):
        y = x.sin()
        v = y[1:]
        y.mul_(2)
        return v, y, y.t().reshape(-1)

    return program, (randn(4, 5, grad=False),)


@case(MEMORY)
def _expand_and_write():
    def program(x):
        e = x.expand(4, 5).clone()
        e[1:2].mul_(3)
        return e, x + 1

    return program, (randn(5, grad=False),)


@case(MEMORY)
def _setitem():
    def program(x):
        y = x * 2
        y[1:3] = 0
        y[0, 0] = x[1, 1]
        return y, y.sin()

    return program, (randn(6, 3),)


@case(MEMORY)
def _setitem_of_an_argument():
    def program(x, y):
        before = x.exp()
        x[1:3] = y[1:3] * 2
        return before, x.sum(), y.cos()

    return program, (randn(6, 3, grad=False), randn(6, 3, grad=False, seed=1))


@case(MEMORY)
def _zeros_filled_part_by_part():
    def program(x):
        out = torch.zeros(4, 3, dtype=x.dtype)
        out[:, 0:1] = x[:, 0:1]
        out[:, 1:] = x[:, 1:].exp()
        return out

    return program, (randn(4, 3),)


@case(MEMORY)
def _sum_in_place():
    def program(x):
        out = torch.zeros_like(x)
        for k in range(5):
            out += (x * k).sin()
        return out

    return program, (randn(4, 3),)


@case(MEMORY)
def _arguments_swapped():
    def program(a, b):
        t = a.clone()
        a.copy_(b)
        b.copy_(t)
        return a * 1, b * 2

    return program, (randn(4, 3, grad=False), randn(4, 3, grad=False, seed=1))


@case(MEMORY)
def _halves_of_an_argument_swapped():
    def program(a):
        t = a[0:2].clone()
        a[0:2] = a[2:4]
        a[2:4] = t
        return a.sum(0)

    return program, (randn(4, 3, grad=False),)


@case(MEMORY)
def _detached_copy_written():
    def program(x):
        y = x.sin()
        z = y.detach().clone()
        z[0:2] = 5
        return y * z, z

    return program, (randn(4),)


@case(MEMORY)
def _one_tensor_twice():
    x = randn(4)
    return lambda a, b: (a * b, a.sin()), (x, x)


@case(MEMORY)
def _one_tensor_twice_and_written():
    def program(a, b):
        early = b * 2
        a.add_(1)
        return early, b * 2, a

    x = randn(4, grad=False)
    return program, (x, x)


@case(MEMORY)
def _overlapping_arguments():
    x = randn(8, grad=False)
    return lambda a, b: (a * 2, b.sin(), a[2:] * b[:4]), (x[:6], x[2:])


@case(MEMORY)
def _arguments_of_odd_strides():
    a, b = randn(6, 4, grad=False).t().requires_grad_(), randn(8, 6, grad=False)[:4:2].requires_grad_()
    return lambda a, b: (a[:2].contiguous() * b, (a @ b.t()).sin(), a.reshape(-1)), (a, b)


@case(MEMORY)
def _expanded_argument():
    return lambda a, b: ((a + b).sum(0), a.sin()), (randn(1, 6, grad=False).expand(5, 6), randn(5, 6))


@case(MEMORY, held_to="thunder")  # Thunder loses the gradient of an argument that is also returned as a view
def _outputs_that_alias_arguments():
    return lambda x, y: (x, x.t(), x[1:], y.reshape(-1), x.detach(), y), (randn(4, 5), randn(3, 2))


@case(MEMORY)
def _outputs_that_alias_each_other():
    def program(x):
        y = x.sin()
        return y[1:], y.t(), y[0], y.reshape(-1), y

    return program, (randn(4, 5),)


@case(MEMORY)
def _one_output_twice():
    def program(x):
        y = x.sin()
        return y, y, [y, (y,)], {"a": y}

    return program, (randn(4),)


@case(MEMORY)
def _early_returned_argument():
    def program(x, flag):
        y = x.sin()
        if flag:
            return x
        return y

    return program, (randn(4), True)


@case(MEMORY)
def _identity():
    return lambda x: x, (randn(4),)


@case(MEMORY)
def _chunk_and_split():
    def program(x):
        a, b = x.chunk(2, -1)
        c, d, e = torch.split(x * 2, (1, 2, 3), -1)
        return a * b, c, d.sin() + 1, torch.unbind(e, 0)[0]

    return program, (randn(4, 6),)


@case(MEMORY)
def _casts_that_change_nothing():
    def program(x):
        y = x.to(x.dtype).type_as(x)
        return y * 2, x.to("cpu"), x.to(torch.float64).to(x.dtype)

    return program, (randn(4, 6),)


@case(MEMORY)
def _many_views_in_a_row():
    def program(x):
        for k in range(8):
            x = x.t().reshape(4, 5).t() if k % 2 else x.reshape(5, 4)
        return x * 2

    return program, (randn(4, 5),)
