"""LoRA adapters beside a model's weights: each row of a step gets those of its own request.

A step with adapters replaces the `forward` of the layers that any adapter targets, and takes it back
afterwards. So a step without one runs the model as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from reprise_worker.batch import Batch
from reprise_worker.lora_folder import LoraPair, LoraWeights
from reprise_worker.model_folder import BadModel

Rows = slice | torch.Tensor
"""Of the flattened batch."""
AdapterRows = Sequence[tuple[int, Rows]]
"""Adapter ids with the rows that each has; rows without an adapter are in none."""


class NotEveryToken(Exception):
    """A layer that was called with other rows than the step's tokens."""


class LoraLayers:
    """The adapters of one model; ids count from 1 in the order in which they were added."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.num_adapters = 0
        self._model = model
        self._layers: dict[str, _AdaptedLayer] = {}

    def add(self, weights: LoraWeights) -> int:
        """Its id. Raises BadModel where it does not fit the model; then nothing has changed."""
        modules = dict(self._model.named_modules())
        linears: dict[str, torch.nn.Linear] = {}
        for name, pair in weights.pairs.items():
            module = modules.get(name)
            if not isinstance(module, torch.nn.Linear):
                what = "no such layer" if module is None else f"a {type(module).__name__} there, no Linear"
                raise BadModel(f"adapter {weights.folder}: layer {name!r}: the model has {what}")
            shapes = (pair.b.shape[0], pair.a.shape[1])
            if shapes != (module.out_features, module.in_features):
                raise BadModel(
                    f"adapter {weights.folder}: layer {name!r} has {shapes[1]} inputs and {shapes[0]}"
                    f" outputs, the model's has {module.in_features} and {module.out_features}"
                )
            linears[name] = module
        self.num_adapters += 1
        for name, linear in linears.items():
            layer = self._layers.setdefault(name, _AdaptedLayer(linear))
            layer.add(self.num_adapters, weights.pairs[name], weights.scale)
        return self.num_adapters

    @contextmanager
    def applied(self, rows: AdapterRows, num_tokens: int) -> Iterator[None]:
        """Forward passes within are over `num_tokens` rows, each with its adapter. Raises NotEveryToken."""
        layers = self._layers.values() if rows else ()
        for layer in layers:
            layer.begin(rows, num_tokens)
        try:
            yield
        finally:
            for layer in layers:
                layer.end()


class _AdaptedLayer:
    def __init__(self, linear: torch.nn.Linear) -> None:
        self._linear = linear
        self._plain: Callable[[torch.Tensor], torch.Tensor] = linear.forward
        self._pairs: dict[int, LoraPair] = {}
        self._rows: AdapterRows = ()
        self._num_tokens = 0

    def add(self, adapter_id: int, pair: LoraPair, scale: float) -> None:
        weight = self._linear.weight
        # Scaled once, before the cast.
        scaled = pair.b.to(torch.float32) * scale
        self._pairs[adapter_id] = LoraPair(
            *(part.to(weight.device, weight.dtype) for part in (pair.a, scaled))
        )

    def begin(self, rows: AdapterRows, num_tokens: int) -> None:
        self._rows = [(adapter_id, where) for adapter_id, where in rows if adapter_id in self._pairs]
        self._num_tokens = num_tokens
        if self._rows:
            self._linear.forward = self._forward  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        if self._rows:
            # What the class has comes back to light.
            del self._linear.forward
            self._rows = ()

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._plain(x)
        inputs, outputs = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        if len(inputs) != self._num_tokens:
            raise NotEveryToken(f"{len(inputs)} rows, the step has {self._num_tokens}")
        for adapter_id, rows in self._rows:
            pair = self._pairs[adapter_id]
            added = F.linear(F.linear(inputs[rows], pair.a), pair.b)
            if isinstance(rows, slice):
                outputs[rows] += added
            else:
                outputs.index_add_(0, rows, added)
        return output


def adapter_rows(batch: Batch) -> AdapterRows:
    """By adapter id; neighbouring segments of one adapter are a slice, without copies."""
    runs: dict[int, list[list[int]]] = {}
    for segment in batch.segments:
        if not segment.adapter_id:
            continue
        own = runs.setdefault(segment.adapter_id, [])
        if own and own[-1][1] == segment.start:
            own[-1][1] += segment.num_new
        else:
            own.append([segment.start, segment.start + segment.num_new])
    return [(adapter_id, _rows(runs[adapter_id], batch.device)) for adapter_id in sorted(runs)]


def _rows(runs: Sequence[Sequence[int]], device: torch.device) -> Rows:
    if len(runs) == 1:
        return slice(*runs[0])
    rows: np.ndarray[Any, Any] = np.concatenate([np.arange(start, stop) for start, stop in runs])
    return torch.from_numpy(rows).to(device)
