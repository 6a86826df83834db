"""What plain Thunder 0.2.6 gets wrong, each with the smallest program: why the generator leaves things out.

`test_fuzz.py` asserts that every one is still wrong, so that an exclusion goes when Thunder is repaired.
`BEYOND` names those that MemEfficient must get right all the same; `fuzz.PROFILES` has a profile for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.programs.program_functions import FUNCTIONS
from tests.programs.programs import Input, Program, Region, Step

__all__ = ["BEYOND", "DEFECTS", "ON_A_GPU", "UNSUPPORTED", "UNSUPPORTED_UNDER_DYNAMO", "WRONG", "Defect", "defect_of"]


@dataclass(frozen=True)
class Defect:
    """A program that plain Thunder gets wrong, and where the cause lies.

    Attributes:
        program: the smallest one.
        reason: the cause.
        raises: how it shows, as `oracle.check` words it: a pattern, of something that nothing else raises. What
            shows so excuses a failure of the fuzzer; see `defect_of`.
        warned: where MemEfficient warns of it, a pattern of its words, which excuse likewise.
        fusion_type: the option of `thunder.jit` that it needs.
    """

    program: Program
    reason: str
    raises: str = ""
    warned: str = ""
    fusion_type: str = "consecutive"


def _x(name: str = "x0", shape: tuple[int, ...] = (4,), **options) -> Input:
    return Input(name, shape, **options)


_G = _x(grad=True)

DEFECTS = {
    "dropout in checkpoint": Defect(
        Program(
            (_x(shape=(64,), grad=True),),
            (
                Region(
                    "checkpoint", (Step("dropout", ("v0",), ("x0",), (0.5,)), Step("sin", ("v1",), ("v0",))), ("v1",)
                ),
            ),
            ("v1",),
        ),
        "the backward recomputes with another mask",
    ),
    "random in checkpoint": Defect(
        Program(
            (_G,),
            (Region("checkpoint", (Step("rand_like", ("v0",), ("x0",)), Step("mul", ("v1",), ("v0", "x0"))), ("v1",)),),
            ("v1",),
        ),
        "the backward draws again",
    ),
    "write in checkpoint": Defect(
        Program(
            (_x(shape=(3, 3), grad=True),),
            (
                Region(
                    "checkpoint",
                    (
                        Step("gram", ("v0",), ("x0",)),
                        Step("add_scalar_", ("v1",), ("v0",), (2,)),
                        Step("sin", ("v2",), ("v1",)),
                    ),
                    ("v2",),
                ),
            ),
            ("v2",),
        ),
        "the recompute leaves the write out where its result is used",
    ),
    "overwritten argument of a function": Defect(
        Program((_G,), (Step("mul_scalar", ("v0",), ("x0",), (2,)), Step("sin_", (), ("v0",))), ("v0",)),
        "the derivative is taken at the overwritten value: the proxy that is saved shares its memory",
    ),
    "overwritten factor": Defect(
        Program(
            (_G, _x("x1", grad=True)),
            (Step("mul_scalar", ("v0",), ("x0",), (2,)), Step("mul_", (), ("v0", "x1"))),
            ("v0",),
        ),
        "the gradient of x1 is the product, not the first factor: as above",
    ),
    "input overwritten by a value with a gradient": Defect(
        Program((_G, _x("x1")), (Step("add_", (), ("x1", "x0")),), ("x1",)), "the output has no gradient"
    ),
    "write to a detached value": Defect(
        Program((_G,), (Step("detach", ("v0",), ("x0",)), Step("zero_", (), ("v0",))), ("x0",)), "the write is lost"
    ),
    "write to a diagonal": Defect(
        Program(
            (_x(shape=(3, 3)), _x("x1", (3, 3), grad=True)),
            (
                Step("diagonal", ("v0",), ("x0",)),
                Step("zero_", (), ("v0",)),
                Step("linear", ("v1",), ("x1", "x1")),
            ),
            ("x0",),
        ),
        "its derivative gathers, so the diagonal is a copy",
        warned=r"^warned that Thunder's autograd misses the write at .* to a torch\.diagonal",
    ),
    "write through a view": Defect(
        Program(
            (_x(shape=(3, 3), grad=True), _x("x1", (3, 1, 3))),
            (
                Step("atan", ("v0",), ("x0",)),
                Step("unsqueeze", ("v1",), ("v0",), (1,)),
                Step("mul_", (), ("v1", "x1")),
                Step("sin", ("v2",), ("v0",)),
            ),
            ("v2",),
        ),
        "autograd sees the new value of the view alone",
        warned=r"^warned that Thunder's autograd misses the write at .* goes through a view",
    ),
    "write to what a view shows": Defect(
        Program(
            (_x(shape=(3, 3), grad=True),),
            (Step("sin", ("v0",), ("x0",)), Step("select", ("v1",), ("v0",), (0,)), Step("isub", (), ("v0", "x0"))),
            ("v1",),
        ),
        "the view has the gradient of the value as it was, and the write is dropped where nothing else reads it",
    ),
    "written value returned under both its names": Defect(
        Program(
            (_G,),
            (Step("sin", ("v0",), ("x0",)), Step("sub_scalar_", ("v1",), ("v0",), (2,))),
            ("v1", "v0"),
        ),
        "both are one value by then, and the gradient of one of the two outputs is counted for both",
    ),
    "overwritten mean of a variance": Defect(
        Program(
            (_x(shape=(3, 3), grad=True),),
            (Step("var_mean", ("v0", "v1"), ("x0",), (0, True)), Step("neg_", (), ("v1",))),
            ("v0",),
        ),
        "the derivative of the variance is taken at the overwritten mean, and eager computes the mean again",
    ),
    "write under dataflow fusion": Defect(
        Program(
            (_x("x0"), _x("x1")),
            (Step("sin", ("v0",), ("x0",)), Step("add_scalar_", (), ("v0",), (2,))),
            ("x1",),
        ),
        "the partition has no edge from a write that nobody reads to the return, and may put it after that",
        fusion_type="dataflow",
    ),
    "write to a copy taken for a view": Defect(
        Program(
            (_x(shape=(2, 2), layout="transposed", grad=True),),
            (
                Step("contiguous", ("v0",), ("x0",)),
                Step("tanh", ("v1",), ("v0",)),
                Step("isub", (), ("v0", "v1")),
            ),
            ("v0",),
        ),
        "contiguous and reshape copy what has other strides, and the write counts as one to the argument",
    ),
    "write to a cast value": Defect(
        Program((_G,), (Step("to", ("v0",), ("x0",), ("float16",)), Step("add_scalar_", (), ("v0",), (2,))), ("v0",)),
        "the gradient is lost",
    ),
    "write under no_grad": Defect(
        Program(
            (_G,),
            (
                Step("mul_scalar", ("v0",), ("x0",), (2,)),
                Region("no_grad", (Step("mul_scalar_", (), ("v0",), (2,)),), ()),
            ),
            ("v0",),
        ),
        "the gradient is lost",
    ),
    "loss under autocast": Defect(
        Program(
            (_x(dtype="float16"),),
            (Region("autocast", (Step("mse_loss", ("v0",), ("x0",)),), ("v0",)),),
            ("v0",),
        ),
        "float16, where eager's autocast makes it float32",
    ),
    "prod under autocast": Defect(
        Program(
            (_x(shape=(3,), dtype="float16"),),
            (Region("autocast", (Step("prod", ("v0",), ("x0",), (0,)),), ("v0",)),),
            ("v0",),
        ),
        "float16, where eager's autocast makes it float32",
    ),
    "attention under autocast with a mask": Defect(
        Program(
            (_x(shape=(1, 1, 3, 4)), _x("x1", (3, 3))),
            (Region("autocast", (Step("attention_masked", ("v0",), ("x0", "x0", "x0", "x1")),), ("v0",)),),
            ("v0",),
        ),
        "the mask keeps its dtype, which is refused; the end of the autocast is traced inside of what was refused",
        r"A symbol \[Symbol name=autocast_exit\] was called while processing a primitive",
    ),
    "contiguous under no_grad": Defect(
        Program(
            (_G,),
            (Region("no_grad", (Step("contiguous", ("v0",), ("x0",)),), ("v0",)), Step("sin", ("v1",), ("v0",))),
            ("v1",),
        ),
        "what is contiguous already comes back as it is, with its gradient",
    ),
    "dropout under no_grad beside gradients": Defect(
        Program(
            (_x(shape=()), _x("x1", grad=True)),
            (
                Region("no_grad", (Step("dropout", ("v0",), ("x0",), (0.25,)),), ("v0",)),
                Step("dropout", ("v1",), ("v0",), (0.5,)),
                Step("add", ("v2",), ("v1", "x1")),
            ),
            ("v2",),
        ),
        "one of them draws as eager does and the other by Thunder's decomposition",
    ),
    "scatter_add of a part": Defect(
        Program(
            (_x(shape=(1, 3), grad=True), _x("x1", (1, 1), dtype="int64")),
            (Step("zeros_like", ("v0",), ("x0",)), Step("scatter_add", ("v1",), ("v0", "x1"), (-1,))),
            ("v1",),
        ),
        "asks for the derivative of zeros_like, and takes the source to be as small as the index",
        r"baseutils.py:check: Shapes were expected to be the same, but got shapes",
    ),
    "scatter_add of a larger source": Defect(
        Program(
            (_x(shape=(5, 4), grad=True), _x("x1", (3, 2), dtype="int64")),
            (
                Step("scatter_add", ("v0",), ("x0", "x1"), (0,)),
                Region("no_grad", (Step("mul_scalar", ("v1",), ("v0",), (2,)),), ("v1",)),
            ),
            ("v1",),
        ),
        "asks for its derivative though no gradient comes, and that takes the source to be as small as the index",
        r"baseutils.py:check: The gradient for the value Tensor is implemented only when value.shape == index.shape",
    ),
    "setitem of another dtype": Defect(
        Program(
            (_x(shape=(1,), dtype="bfloat16"), _x("x1", (8, 2), grad=True)),
            (Step("sin", ("v0",), ("x1",)), Step("setitem", (), ("v0", "x0"), ("4, ::2",))),
            ("v0",),
        ),
        "its derivative makes the gradient in the dtype of what was written",
        r"baseutils.py:check: Expected dtype thunder.dtypes.\w+ but found",
    ),
    "cat of empty tensors": Defect(
        Program((_x(shape=(0,), grad=True),), (Step("cat_same", ("v0",), ("x0",), (0,)),), ("v0",)),
        "its backward hands on zeros and never takes what it was given, which Thunder asserts that it did",
        r"^raises AssertionError in torch_autograd.py:backward: $",
    ),
    "broadcast of one element": Defect(
        Program((_G,), (Step("index", ("v0",), ("x0",), ("0",)), Step("mul", ("v1",), ("v0", "x0"))), ("v1",)),
        "its gradient keeps the dims it was broadcast to, and the next step of the backward fails on them",
        r"number of sizes provided \(\d+\) must be greater or equal|expand: the requested shape has too few dim"
        r"|tensors must be of the same shape, tensor at 1 is|v has invalid size: should be torch"
        r"|Expected a single element grad_output tensor, but got",
    ),
    "broadcast of one element used twice": Defect(
        Program(
            (_x("x0"), _x("x1", (), grad=True)),
            (Step("add", ("v0",), ("x0", "x1")), Step("exp", ("v1",), ("x1",))),
            ("v0", "v1"),
        ),
        "as above, and the other gradient is broadcast and counted many times: wrong, without a word",
    ),
    "integers and a float number": Defect(
        Program(
            (_x(shape=(2,), dtype="float16", grad=True), _x("x1", (2,), dtype="int64")),
            (Step("div", ("v0",), ("x0", "x1")),),  # x0 / (abs(x1) + 1.0)
            ("v0",),
        ),
        "the sum promotes like a number: float16 where eager gives float32",
    ),
    "write to an expanded value": Defect(
        Program((_x(shape=()),), (Step("expand", ("v0",), ("x0",), ((4,),)), Step("zero_", (), ("v0",))), ("x0",)),
        "written by copy_, which refuses it; eager's zero_ does not",
    ),
    "unbind in checkpoint": Defect(
        Program(
            (_x(shape=(4, 2), grad=True),),
            (
                Region("checkpoint", (Step("unbind", ("v0", "v1", "v2", "v3"), ("x0",), (-2,)),), ("v3",)),
                Step("div", ("v4",), ("x0", "v3")),
            ),
            ("v4", "v3"),
        ),
        "KeyError of a recomputed name when the traces are split",
    ),
    "linear with an empty dim": Defect(
        Program((_x(shape=(1, 0), grad=True),), (Step("linear", ("v0",), ("x0", "x0")),), ("v0",)),
        "the backward divides by the size",
        r"ZeroDivisionError in __init__.py:reshape: integer modulo by zero",
    ),
    "write beside empty inputs": Defect(
        Program((_x("x0", ()), _x("x1", (0,)), _x("x2", (0, 1))), (Step("add_scalar_", (), ("x1",), (2,)),), ("x1",)),
        "empty tensors have no address, so all are taken for aliases of each other",
    ),
    "write beside aliased inputs": Defect(
        Program(
            (_x("x0", (4,), dtype="int64"), _x("x1", (4,), dtype="int64", alias="x0"), _x("x2", (3,))),
            (Step("index_select", ("v0",), ("x2", "x1"), (-1,)), Step("mul_scalar_", (), ("v0",), (2,))),
            ("v0",),
        ),
        "arguments are counted without their repetitions",
    ),
    "write to one of two interleaved slices": Defect(
        Program(
            (_x("x0", (4,)), _x("x1", (2,), alias="x0[..., ::2]")),
            (Step("add_scalar_", (), ("x1",), (2,)), Step("mul_scalar", ("v0",), ("x0",), (2,))),
            ("v0",),
        ),
        "a view of the other argument is reshaped from it, whatever its offset and strides",
    ),
    "nested checkpoint of an inner value": Defect(
        Program(
            (_G,),
            (
                Region(
                    "checkpoint",
                    (
                        Step("sin", ("v0",), ("x0",)),
                        Region("checkpoint", (Step("cos", ("v1",), ("v0",)),), ("v1",)),
                        Step("mul_scalar", ("v2",), ("v1",), (2,)),
                    ),
                    ("v2",),
                ),
            ),
            ("v2",),
        ),
        "the interpreter loses where the value came from and raises while it traces",
    ),
}

DEFECTS |= {
    "random value in a checkpoint in a checkpoint": Defect(
        Program(
            (_x(shape=(64,), grad=True),),
            (
                Region(
                    "checkpoint",
                    (
                        Step("dropout", ("v0",), ("x0",), (0.5,)),
                        Region("checkpoint", (Step("dropout", ("v1",), ("x0",), (0.25,)),), ("v1",)),
                    ),
                    ("v0", "v1"),
                ),
            ),
            ("v0", "v1"),
        ),
        "all of the inner one comes before the outer one, which draws the numbers that eager has drawn by then",
    ),
    "lerp of a scalar": Defect(
        Program(
            (_x(shape=()), _x("x1")),
            (Step("lerp", ("v0",), ("x0", "x1")), Step("layer_norm", ("v1",), ("v0",))),
            ("v1",),
        ),
        "its proxy has the shape of the first operand",
        r"Expected normalized_shape=\(\) to have length >= 1!",
    ),
    "a value twice in a torch.autograd.Function": Defect(
        Program((_G,), (Step("apply_Product", ("v0",), ("x0", "x0")),), ("v0",)),
        "the function's trace has two parameters of one name",
        r"SyntaxError: duplicate argument '\w+' in function definition \(thunder\._Product_",
    ),
    "lerp beside a gradient": Defect(
        Program(
            (_x(shape=(1,), grad=True), _x("x1")),
            (Step("lerp", ("v0",), ("x1", "x1")), Step("layer_norm", ("v1",), ("x0",))),
            ("v0",),
        ),
        "it has no derivative, which is asked for though none of its arguments needs one",
        r"Failed to find a gradient transform for bound symbol bsym=\w+ = prims.lerp\(",
    ),
    "nll_loss": Defect(
        Program(
            (_x(shape=(3, 3)), _x("x1", (3,), dtype="int64")),
            (Step("nll_loss", ("v0",), ("x0", "x1"), ("none",)),),
            ("v0",),
        ),
        "PyTorch is handed None for ignore_index",
        r"nll_loss_nd\(\): argument 'ignore_index' \(position 5\) must be int, not NoneType",
    ),
    "nll_loss with a gradient": Defect(
        Program(
            (_x(shape=(3, 3), grad=True), _x("x1", (3,), dtype="int64")),
            (Step("nll_loss", ("v0",), ("x0", "x1"), ("mean",)),),
            ("v0",),
        ),
        "ignore_index is None, and compared with",
        r"check: None had an unexpected type <class 'NoneType'>. Supported types are \(<class 'thunder",
    ),
    "sum of a float32 loss of a bfloat16 head": Defect(
        Program(
            (
                _x(shape=(6, 8), dtype="bfloat16"),
                _x("x1", (3, 8), dtype="bfloat16", grad=True),
                _x("x2", (6,), dtype="int64"),
            ),
            (Step("head_float", ("v0",), ("x0", "x1", "x2"), ("sum", "")),),
            ("v0",),
        ),
        "the number of targets, which the backward divides by, is a float64",
        r"_nll_loss_backward_impl: expected scalar type \w+ but found Double",
    ),
}


def defect_of(difference: str) -> str:
    """The name of the defect that shows as a `difference` from eager; "" if none does so."""
    shown = [(name, pattern) for name, d in DEFECTS.items() for pattern in (d.raises, d.warned) if pattern]
    shown += [(name, pattern) for name, (_, pattern) in ON_A_GPU.items()]
    found = (name for name, pattern in shown if re.search(pattern, difference))
    return next(found, "")


# Calls that plain Thunder refuses on a GPU alone, with arguments of shapes (2, 1, 3, 4) and (3, 3), and how that shows.
ON_A_GPU: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]] = {
    "attention with a mask of two dims": (
        lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask),
        "grad_forward_sdpa: Expected attn_mask tensor to have 4 dimension, but it has 2",
    ),
}

BEYOND = (
    "dropout in checkpoint",
    "random in checkpoint",
    "write in checkpoint",
    "overwritten argument of a function",
    "overwritten factor",
    "write to what a view shows",
    "written value returned under both its names",
    "overwritten mean of a variance",
    "unbind in checkpoint",
    "nll_loss",
    "nll_loss with a gradient",
)

# Calls that plain Thunder refuses, with an argument of shape (4, 3) that asks for a gradient.
UNSUPPORTED: dict[str, Callable[[torch.Tensor], object]] = {
    "lerp with a gradient": lambda x: torch.lerp(x, x + 1, 0.25),
    "boolean index": lambda x: x[x > 0],
    "sigmoid_": lambda x: (x * 2).sigmoid_(),
    "copy_ that broadcasts": lambda x: torch.zeros_like(x).copy_(x[0]),
    "log_softmax over an empty dim": lambda x: torch.log_softmax(x[:0], 0),
    "tril of an empty matrix": lambda x: torch.tril(x[:0, :0]),
    "split of an empty dim": lambda x: torch.split(x[:0], 1, 0)[0],
}

# What plain ThunderFX cannot compile though `thunder.jit` does, and a pattern of what it raises.
UNSUPPORTED_UNDER_DYNAMO: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    # Dynamo of PyTorch 2.11 hands the function's arguments over without the keyword that Thunder reads.
    "torch.autograd.Function": (FUNCTIONS["SineA"].apply, "KeyError: 'args_tensor_mask'"),
}

# Calls whose gradient plain Thunder gets wrong, likewise, and that no operation of the generator makes.
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max of equal values": lambda x: torch.max(x, 0)[0],  # shared among them, where eager takes one
    "clamp at its bound": lambda x: torch.clamp(x - x.detach() + 1, -1, 1),  # 0, where eager has 1
}
