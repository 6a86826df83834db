"""The time of an operation: a roofline from shapes and dtypes, the same on every rank and every run.

An operation takes ``max(flops / peak, bytes / bandwidth) + launch`` seconds (Williams, Waterman and Patterson,
"Roofline", CACM 2009); a view takes nothing. A fusion region moves only its inputs and outputs, so recomputing an
elementwise value there costs its reads. No measurement enters; `measured.py` has measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
from thunder.core.dtypes import to_strong_dtype, to_torch_dtype
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, pyval
from thunder.core.symbol import BoundSymbol

from thunder_mem.memory.device_models import DEVICE_MODELS, DeviceModel
from thunder_mem.memory.device_specs import DEVICES
from thunder_mem.semantics.op_traits import traits_of

__all__ = [
    "bound_symbol_bytes",
    "bound_symbol_flops",
    "cost_s",
    "device_model_of",
    "extra_region_cost_s",
    "is_free",
    "kernels_cost_s",
    "region_cost_s",
    "tensor_bytes",
]


def device_model_of(device: torch.device) -> DeviceModel:
    """The model of a real or simulated device; an H100's for a GPU without a data sheet here.

    Plans only compare costs with each other, so the ratios of another GPU suffice.
    """
    if device.type != "cuda":
        return DEVICE_MODELS["cpu"]
    name = torch.cuda.get_device_name(device)
    known = (spec.name for spec in DEVICES.values() if spec.marketing_name == name and spec.name in DEVICE_MODELS)
    return DEVICE_MODELS[next(known, "H100-80GB")]


# Symbols are known by name: after claiming, a prim's id is gone, but its name stays inside.
_VIEWS = frozenset(
    (
        *("broadcast_in_dim", "chunk", "detach", "expand", "expand_as", "flatten", "getitem", "movedim", "narrow"),
        *("permute", "real", "reshape", "select", "shallow_copy", "slice", "slice_in_dim", "split", "squeeze"),
        *("swapaxes", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze"),
        *("update_aliases", "view", "view_as"),
    )
)
# Bookkeeping: runs on the host and moves no data.
_HOST = ("unpack", "check", "python_", "clear_", "get_grad", "put_grad", "comment", "construct", "pack_")
# Runs beside other work; exposed time is counted separately (`rewrites/transfer_scheduling.py`).
_TRANSFERS = ("offload", "prefetch")
# Reads as many rows as it returns, not the whole table.
_GATHERS = frozenset({"embedding", "gather", "index_select", "take", "take_along_axis", "take_along_dim"})
_MOVES = frozenset({"cat", "clone", "contiguous", "convert_element_type", "copy_", "empty", "full", "pad", "to"})
_CASTS = frozenset({"to", "type_as", "float", "bfloat16", "half", "double", "convert_element_type", "contiguous"})
_MATMULS = frozenset({"addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "_grouped_mm"})
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "convolution_weight_backward"})


def _name(bsym: BoundSymbol) -> str:
    """The symbol's name as the prim or torch function has it."""
    return bsym.sym.name.removeprefix("torch_").removeprefix("mem_").removesuffix("_prim_impl")


def _shape(t: TensorProxy) -> tuple[int, ...]:
    return tuple(int(str(pyval(n))) if isinstance(n, NumberProxy) else int(n) for n in t.shape)


def _numel(t: TensorProxy) -> int:
    return prod(_shape(t))


def tensor_bytes(t: TensorProxy) -> int:
    """Bytes of a tensor, if it is dense."""
    return _numel(t) * to_strong_dtype(t.dtype).bytes


def _tensors(proxies: Iterable[Proxy]) -> list[TensorProxy]:
    """The tensors among them, each name once."""
    return list({p.name: p for p in proxies if isinstance(p, TensorProxy)}.values())


def _dtype(t: TensorProxy) -> str:
    return str(to_torch_dtype(t.dtype)).removeprefix("torch.")


def is_free(bsym: BoundSymbol) -> bool:
    """Whether it moves no data: a view, a cast to the same dtype, or bookkeeping."""
    name = _name(bsym)
    if name in _VIEWS or bsym.sym.name.startswith(_HOST + _TRANSFERS):
        return True
    ins, outs = _tensors(bsym.flat_proxy_args), _tensors(bsym.flat_proxy_outs)
    if name in _CASTS and name != "contiguous" and len(ins) == len(outs) == 1:
        return ins[0].dtype == outs[0].dtype and ins[0].device == outs[0].device
    if bsym.subsymbols:
        return all(map(is_free, bsym.subsymbols))
    return not outs and not name.endswith("_")


def _operands(bsym: BoundSymbol) -> list[TensorProxy]:
    """Its tensor arguments in order, by position and then by keyword, with repetitions."""
    return [a for a in (*bsym.args, *bsym.kwargs.values()) if isinstance(a, TensorProxy)]


def _matmul_flops(bsym: BoundSymbol) -> int:
    factors = _operands(bsym)
    a = factors[1] if _name(bsym) in ("addmm", "baddbmm") else factors[0]
    return 2 * _numel(_tensors(bsym.flat_proxy_outs)[0]) * _shape(a)[-1]


def _convolution_flops(bsym: BoundSymbol) -> int:
    tensors, products = _operands(bsym), 1
    if "backward" not in bsym.sym.name:
        source, weight = tensors[:2]
        output = _tensors(bsym.flat_proxy_outs)[0]
    elif len(tensors) == 2:  # of the input alone, which this kernel does not read
        output, weight = tensors
        source = _tensors(bsym.flat_proxy_outs)[0]
    else:
        output, source, weight = tensors[:3]
        products = 1 if _name(bsym) == "convolution_weight_backward" else 2
    transposed = next((a for a in bsym.flat_args if isinstance(a, bool)), False)
    swept = source if transposed else output
    return 2 * products * _numel(swept) * (_numel(weight) // max(1, _shape(weight)[0]))


def _is_attention(name: str) -> bool:
    return "scaled_dot_product" in name or "sdpa" in name or name.startswith("attention")


def _attention_flops(bsym: BoundSymbol) -> int:
    """Two products forward and five backward (Dao, "FlashAttention-2", 2023), half of them if causal."""
    backward = _is_backward(bsym)
    # The first argument of a backward is the gradient of the output.
    first = 1 if backward or "mask_grad" in bsym.sym.name else 0
    query, key, value = _operands(bsym)[first : first + 3]
    *batch, rows, width = _shape(query)
    scores = prod(batch) * rows * _shape(key)[-2]
    products = 2 * scores * width, 2 * scores * _shape(value)[-1]  # scores, and scores times values
    total = 3 * products[0] + 2 * products[1] if backward else sum(products)
    return (total // 2 if _is_causal(bsym) else total) + _projection_flops(bsym)


def _is_backward(bsym: BoundSymbol) -> bool:
    return "backward" in bsym.sym.name or "bwd" in bsym.sym.name


def _projection_flops(bsym: BoundSymbol) -> int:
    """Of the product that a backward by groups of heads makes its gradient with."""
    if "groups_backward" not in bsym.sym.name:
        return 0
    grad, _query, _key, _value, _out, _log_sums, *weight = _operands(bsym)
    return 2 * _shape(grad)[0] * _numel(weight[0]) if weight else 0


def _is_causal(bsym: BoundSymbol) -> bool:
    given = bsym.kwargs.get("is_causal")
    if given is None:
        given = next((a for a in bsym.args if isinstance(a, bool)), False)
    return bool(given)


def _is_product(bsym: BoundSymbol) -> bool:
    name = _name(bsym)
    return name in _MATMULS or name in _CONVOLUTIONS or _is_attention(name)


def bound_symbol_flops(bsym: BoundSymbol) -> int:
    """Floating-point operations: two for each multiply-add of a product, one for each element of anything else.

    A reduction counts its inputs. Views and data movement count nothing. A fusion or a composite counts its
    parts.
    """
    bsym = traits_of(bsym).runs(bsym)
    if is_free(bsym):
        return 0
    rule: Callable[[BoundSymbol], int] | None = None
    name = _name(bsym)
    if name in _MATMULS:
        rule = _matmul_flops
    elif name in _CONVOLUTIONS:
        rule = _convolution_flops
    elif _is_attention(name):
        rule = _attention_flops
    if rule is not None:
        return rule(bsym)
    if bsym.subsymbols:
        return sum(map(bound_symbol_flops, bsym.subsymbols))
    if name in _GATHERS or name in _MOVES:
        return 0
    tensors = _tensors((*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
    return max(map(_numel, tensors), default=0)


def bound_symbol_bytes(bsym: BoundSymbol) -> int:
    """Bytes it reads and writes, each argument once, as if all were dense; 0 for a view.

    A gather reads only the rows that it returns, and a write in place counts its target once.
    """
    if is_free(bsym):
        return 0
    if bsym.sym.is_fusion and bsym.subsymbols:
        return _fusion_bytes(bsym)
    ins, outs = _tensors(bsym.flat_proxy_args), _tensors(bsym.flat_proxy_outs)
    written = sum(map(tensor_bytes, outs))
    if _name(bsym) in _GATHERS:
        table = max(ins, key=tensor_bytes)
        return 2 * written + sum(tensor_bytes(t) for t in ins if t.name != table.name)
    if _name(bsym) in ("copy_", "empty"):
        return 2 * written if ins else 0
    return written + sum(map(tensor_bytes, ins))


def _fusion_bytes(bsym: BoundSymbol) -> int:
    """Bytes that a region reads and writes: its views move none, whether of an argument or of another result."""
    memory: dict[str, str] = {}  # of a view: the value that it shows
    computed_from: set[str] = set()
    for sub in bsym.subsymbols:
        ins, outs = _tensors(sub.flat_proxy_args), _tensors(sub.flat_proxy_outs)
        shown = [memory.get(t.name, t.name) for t in ins]
        if ins and is_free(sub):
            memory |= {out.name: shown[0] for out in outs}
        else:
            computed_from.update(shown)
    given = {t.name: t for t in _tensors(bsym.flat_proxy_args)}
    written: dict[str, int] = {}
    for out in _tensors(bsym.flat_proxy_outs):
        if (name := memory.get(out.name, out.name)) not in given:
            written[name] = max(written.get(name, 0), tensor_bytes(out))
    return sum(written.values()) + sum(tensor_bytes(t) for name, t in given.items() if name in computed_from)


def cost_s(bsym: BoundSymbol, device: DeviceModel) -> float:
    """Seconds that one bound symbol takes on `device`.

    A fusion is one kernel over its inputs and outputs, and so is an operation that an executor has claimed.
    An unclaimed composite costs the sum of its parts.
    """
    bsym = traits_of(bsym).runs(bsym)  # a generator's state costs nothing beside what is drawn
    if is_free(bsym):
        return 0.0
    whole = bsym.sym.is_fusion or bsym.sym.executor is not None or _is_product(bsym) or not bsym.subsymbols
    if not whole:
        return sum(cost_s(sub, device) for sub in bsym.subsymbols)
    return max(_compute_s([bsym], device), bound_symbol_bytes(bsym) / device.bandwidth_bytes_per_s) + device.launch_s


def _product_s(bsym: BoundSymbol, device: DeviceModel) -> float:
    flops, rate = bound_symbol_flops(bsym), device.matmul_flops(_dtype(_operands(bsym)[0]))
    if not _is_attention(_name(bsym)):
        return flops / rate
    projection = _projection_flops(bsym)
    share = device.attention_shares(traits_of(bsym).attention_kernel(bsym))[_is_backward(bsym)]
    return ((flops - projection) / share + projection) / rate


def _compute_s(bsyms: Iterable[BoundSymbol], device: DeviceModel) -> float:
    total = 0.0
    for bsym in bsyms:
        if _is_product(bsym):
            total += _product_s(bsym, device)
        elif bsym.subsymbols:
            total += _compute_s(bsym.subsymbols, device)
        else:
            total += bound_symbol_flops(bsym) / device.vector_flops
    return total


def region_cost_s(
    bsyms: Iterable[BoundSymbol], inputs: Iterable[Proxy], outputs: Iterable[Proxy], device: DeviceModel
) -> float:
    """Seconds of one kernel that computes `outputs` from `inputs`; intermediate values stay in registers.

    A region of views alone costs nothing.
    """
    bsyms = list(bsyms)
    if all(map(is_free, bsyms)):
        return 0.0
    moved = sum(map(tensor_bytes, (*_tensors(inputs), *_tensors(outputs))))
    return max(_compute_s(bsyms, device), moved / device.bandwidth_bytes_per_s) + device.launch_s


def kernels_cost_s(bsyms: Iterable[BoundSymbol], moved_bytes: int, launches: int, device: DeviceModel) -> float:
    """Seconds of several kernels that together compute `bsyms` and read and write `moved_bytes`."""
    return max(_compute_s(bsyms, device), moved_bytes / device.bandwidth_bytes_per_s) + launches * device.launch_s


def extra_region_cost_s(bsyms: Iterable[BoundSymbol], extra_inputs: Iterable[Proxy], device: DeviceModel) -> float:
    """Seconds that a region gains when it also computes `bsyms`: their reads, and no launch.

    `extra_inputs` are those that the region does not read anyway.
    """
    moved = sum(map(tensor_bytes, _tensors(extra_inputs)))
    return max(_compute_s(bsyms, device), moved / device.bandwidth_bytes_per_s)
