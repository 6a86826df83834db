"""`torch.lstm`, `gru` and `rnn_*` of several layers, written out as one call for each layer.

A call of one layer stays whole: its gradient runs the layer once more, so that only the layer's input is saved, and the
values inside of one layer at a time are alive. Dropout between the layers is apart from them: inside, a gradient would
draw other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core.proxies import TensorProxy, pyval

__all__ = ["RECURRENT"]


def _layer_by_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    def recurrent(
        a: TensorProxy,
        hx: TensorProxy | Sequence[TensorProxy],
        params: Sequence[TensorProxy],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[TensorProxy, ...] | None:
        """As PyTorch's function of tensors (T, B, C), or (B, T, C) if `batch_first`; None for others or one layer."""
        layers, p = pyval(num_layers), float(pyval(dropout))
        if layers == 1 or not isinstance(params, Sequence):
            return None
        symbol = ltorch._torch_to_thunder_function_map[function]
        of_layer, directions = len(params) // layers, 2 if bidirectional else 1
        states = (hx,) if isinstance(hx, TensorProxy) else tuple(hx)
        x = ltorch.transpose(a, 0, 1) if batch_first else a  # eager draws in this layout
        last = []
        for layer in range(layers):
            own = [s[layer * directions : (layer + 1) * directions] for s in states]
            weights = list(params[layer * of_layer : (layer + 1) * of_layer])
            x = ltorch.dropout(x, p) if layer and train and p else x
            given = own[0] if isinstance(hx, TensorProxy) else own
            x, *after = symbol(x, given, weights, has_biases, 1, 0.0, train, bidirectional, False)
            last.append(after)
        result = ltorch.transpose(x, 0, 1) if batch_first else x
        return result, *(ltorch.cat(list(same)) for same in zip(*last, strict=True))

    return recurrent


RECURRENT = {fn: _layer_by_layer(fn) for fn in (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)}
