"""The layer of each storage, from the names of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_mem.prediction.predict import Prediction
from thunder_mem.trace.origins import layer_numbers

__all__ = ["layers_of"]


def layers_of(
    prediction: Prediction, reads: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Storage -> its layer; storages without a layer are missing.

    A parameter's name tells its layer. A computed storage belongs to the layer of the operation's parameters.
    Without parameters, it belongs to the highest of its operands' layers in the forward, and to the lowest in
    the backward.

    Args:
        prediction: its storages are sorted into layers.
        reads, results: per operation of its timeline, the storages of its operands and of its outputs.
    """
    held = [i for i, s in enumerate(prediction.storages) if s.born < 0]
    by_name = layer_numbers((prediction.storages[i].name for i in held), from_zero=True)
    layers = {i: by_name[prediction.storages[i].name] for i in held if prediction.storages[i].name in by_name}
    parameters = frozenset(layers)
    for event, operands, made in zip(prediction.timeline, reads, results, strict=True):
        read = [s for s in operands if s in layers]
        found = [layers[s] for s in read if s in parameters] or [layers[s] for s in read]
        if found:
            layer = min(found) if event.phase == "backward" else max(found)
            for s in made:
                if prediction.storages[s].born == event.index:
                    layers.setdefault(s, layer)
    return layers
