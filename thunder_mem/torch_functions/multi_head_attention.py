"""`multi_head_attention_forward`, which `nn.MultiheadAttention` and `nn.Transformer` call, written out.

Thunder 0.2.6 passes it to PyTorch whole. Without its weights (``need_weights=False``, as in every
`nn.TransformerEncoderLayer`) it has no derivative, its dropout draws other numbers in the backward, and nothing of it
fuses or runs in tiles. The steps are those of `torch/nn/functional.py`, with heads as a dimension of their own, so that
queries, keys and values are views of their projections.

Shapes: L queries, S keys, B samples, E channels, H heads of D = E / H.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.devices import DeviceType
from thunder.core.proxies import TensorProxy, pyval

__all__ = ["masked_attention_with_dropout", "multi_head_attention"]


def multi_head_attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: TensorProxy | None,
    in_proj_bias: TensorProxy | None,
    bias_k: TensorProxy | None,
    bias_v: TensorProxy | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: TensorProxy,
    out_proj_bias: TensorProxy | None,
    training: bool = True,
    key_padding_mask: TensorProxy | None = None,
    need_weights: bool = True,
    attn_mask: TensorProxy | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: TensorProxy | None = None,
    k_proj_weight: TensorProxy | None = None,
    v_proj_weight: TensorProxy | None = None,
    static_k: TensorProxy | None = None,
    static_v: TensorProxy | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[TensorProxy, TensorProxy | None] | None:
    """As PyTorch's function, whose own checks have passed; None for static keys or values."""
    if static_k is not None or static_v is not None:
        return None
    batched, heads = query.ndim == 3, pyval(num_heads)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    q, k, v = _projected((query, key, value), weights, in_proj_bias)
    if not batched:
        q, k, v = (ltorch.unsqueeze(x, 1) for x in (q, k, v))
        key_padding_mask = None if key_padding_mask is None else ltorch.unsqueeze(key_padding_mask, 0)
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None
    else:
        is_causal = False  # the mask says so
    mask = _mask(attn_mask, key_padding_mask, q.shape[1], heads, query.dtype)

    added = 0
    if bias_k is not None:
        k, v = (ltorch.cat([x, ltorch.expand(b, (1, *x.shape[1:]))]) for x, b in ((k, bias_k), (v, bias_v)))
        added += 1
    if add_zero_attn:
        k, v = (ltorch.cat([x, ltorch.zeros_like(x[:1])]) for x in (k, v))
        added += 1
    if mask is not None and added:
        mask = ltorch.pad(mask, (0, added))

    q, k, v = (_by_heads(x, heads) for x in (q, k, v))
    drop = float(pyval(dropout_p)) if training else 0.0
    if need_weights:
        out, weights = _with_weights(q, k, v, mask, drop)
        weights = ltorch.mean(weights, 1) if average_attn_weights else weights
    else:
        out, weights = masked_attention_with_dropout(q, k, v, mask, drop, is_causal), None
        out = ltorch.scaled_dot_product_attention(q, k, v, mask, drop, is_causal) if out is None else out
    rows = ltorch.reshape(ltorch.permute(out, (2, 0, 1, 3)), (q.shape[2], q.shape[0], heads * v.shape[3]))
    result = ltorch.linear(rows, out_proj_weight, out_proj_bias)
    if batched:
        return result, weights
    return ltorch.squeeze(result, 1), None if weights is None else ltorch.squeeze(weights, 0)


def _projected(
    given: tuple[TensorProxy, TensorProxy, TensorProxy],
    weights: tuple[TensorProxy, TensorProxy, TensorProxy] | TensorProxy,
    bias: TensorProxy | None,
) -> list[TensorProxy]:
    """Queries, keys and values; by one product where arguments are the same and weights are packed."""
    query, key, value = (x.name for x in given)
    parts = 3 if query == key == value else 2 if key == value else 1
    if isinstance(weights, tuple) or parts == 1:
        each = weights if isinstance(weights, tuple) else ltorch.chunk(weights, 3)
        biases = (None, None, None) if bias is None else ltorch.chunk(bias, 3)
        return [ltorch.linear(x, w, b) for x, w, b in zip(given, each, biases, strict=True)]
    if parts == 3:
        return list(ltorch.chunk(ltorch.linear(given[0], weights, bias), 3, -1))
    channels = weights.shape[1]
    of_q, of_kv = ltorch.split(weights, [channels, 2 * channels])
    bias_q, bias_kv = (None, None) if bias is None else ltorch.split(bias, [channels, 2 * channels])
    return [ltorch.linear(given[0], of_q, bias_q), *ltorch.chunk(ltorch.linear(given[1], of_kv, bias_kv), 2, -1)]


def _by_heads(x: TensorProxy, heads: int) -> TensorProxy:
    """(L, B, E) as (B, H, L, D), a view."""
    length, samples, channels = x.shape
    return ltorch.permute(ltorch.reshape(x, (length, samples, heads, channels // heads)), (1, 2, 0, 3))


def _with_weights(
    q: TensorProxy, k: TensorProxy, v: TensorProxy, mask: TensorProxy | None, drop: float
) -> tuple[TensorProxy, TensorProxy]:
    """The values, (B, H, L, D), and the weights that they have, (B, H, L, S)."""
    scores = ltorch.matmul(ltorch.mul(q, sqrt(1.0 / q.shape[-1])), ltorch.transpose(k, -2, -1))
    weights = ltorch.softmax(scores if mask is None else ltorch.add(mask, scores), -1)
    weights = ltorch.dropout(weights, drop) if drop else weights
    return ltorch.matmul(weights, v), weights


def _mask(
    of_pairs: TensorProxy | None, of_keys: TensorProxy | None, samples: int, heads: int, dtype: dtypes.dtype
) -> TensorProxy | None:
    """What is added to the scores, for pairs (L, S) or (B H, L, S) and for keys (B, S), in a form that broadcasts."""
    parts = []
    if of_pairs is not None:
        lead = (1, 1) if of_pairs.ndim == 2 else (samples, heads)
        parts.append(ltorch.reshape(_added(of_pairs, dtype), (*lead, *of_pairs.shape[-2:])))
    if of_keys is not None:
        parts.append(ltorch.reshape(_added(of_keys, dtype), (samples, 1, 1, of_keys.shape[-1])))
    return ltorch.add(*parts) if len(parts) == 2 else parts[0] if parts else None


def _added(mask: TensorProxy, dtype: Any) -> TensorProxy:
    """A mask as numbers; of booleans, true ones are left out."""
    if not dtypes.is_boolean_dtype(mask.dtype):
        return mask
    return ltorch.to(ltorch.where(mask, float("-inf"), 0.0), dtype)


def masked_attention_with_dropout(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> TensorProxy | None:
    """`scaled_dot_product_attention` with mask and dropout on a CPU, where no kernel of PyTorch's runs it as a whole.

    Queries of which the mask leaves no key get zeros, as in PyTorch, where Thunder's own steps give NaN. None for other
    calls.
    """
    if attn_mask is None or not pyval(dropout_p) or is_causal or query.device.devicetype is not DeviceType.CPU:
        return None
    factor = sqrt(1 / sqrt(query.shape[-1]) if scale is None else scale)
    scores = ltorch.matmul(ltorch.mul(query, factor), ltorch.transpose(ltorch.mul(key, factor), -2, -1))
    if dtypes.is_boolean_dtype(attn_mask.dtype):
        scores = ltorch.where(attn_mask, scores, float("-inf"))
    else:
        scores = ltorch.add(scores, attn_mask)
    empty = ltorch.eq(ltorch.amax(scores, -1, keepdim=True), float("-inf"))
    weights = ltorch.softmax(ltorch.where(empty, 0.0, scores), -1)
    weights = ltorch.dropout(ltorch.where(empty, 0.0, weights), float(pyval(dropout_p)))
    return ltorch.matmul(weights, value)
