"""Calls of a model's layers, run again under a recipe: how far their results are off, and how long
they take."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8core.context.autocast import autocast
from fp8core.errors import OperandError
from fp8core.inspection.monitoring.record import ObservedCast, measure
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.recipe import Recipe
from fp8core.torch_ops.private import pytree

_RUNS = 3  # delayed scaling has the scales of this batch in the third, also of gradients
_WARM_UPS, _TIMED = 5, 15
_LAST_RUN = re.compile(r", last run: [^,)]*")
_FLUSHED = 2**28  # bytes, more than the L2 cache of any device


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The first call of a layer in a batch: copies of its arguments, and of the gradients of its
    results by their place, in the CPU's memory. ``source`` is the tensor that it was called with.
    """

    layer: LowPrecisionModule
    source: torch.Tensor
    arguments: tuple[Any, dict[str, Any]]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return what the time depends on: the layer, shapes and dtypes, and which gradients."""
        tensors = [
            leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, torch.Tensor)
        ]
        inputs = ", ".join(f"{[*x.shape]} {str(x.dtype)[6:]}" for x in tensors)
        learned = sum(x.requires_grad for x in (*tensors, *self.layer.parameters()))
        layer = _LAST_RUN.sub("", " ".join(repr(self.layer).split()))
        return f"{layer} of {inputs}, {learned} gradients"


@contextmanager
def captured(layers: Mapping[str, LowPrecisionModule]) -> Iterator[dict[str, LayerCall]]:
    """Keep the calls of ``layers`` while the context is open, by their paths."""
    calls: dict[str, LayerCall] = {}

    def keep(path: str, layer: LowPrecisionModule, args: Any, kwargs: Any, result: Any) -> Any:
        if path in calls or not any(map(_is_learned, pytree.tree_leaves(result))):
            return result
        if "is_first_microbatch" in kwargs:  # a kept weight is another recipe's
            kwargs = kwargs | {"is_first_microbatch": None}
        tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        arguments = pytree.tree_map_only(torch.Tensor, _on_cpu, (args, kwargs))
        calls[path] = call = LayerCall(layer, next(tensors), arguments)
        # Of views: an output that the layer reads itself, as a norm's, has its gradient as well.
        leaves, structure = pytree.tree_flatten(result)
        leaves = [leaf.view_as(leaf) if _is_learned(leaf) else leaf for leaf in leaves]
        for index, output in enumerate(leaves):
            if _is_learned(output):
                output.register_hook(functools.partial(keep_gradient, call, index))
        return pytree.tree_unflatten(leaves, structure)

    def keep_gradient(call: LayerCall, index: int, gradient: torch.Tensor) -> None:
        call.gradients[index] = _on_cpu(gradient)

    with ExitStack() as stack:
        for path, layer in layers.items():
            hook = functools.partial(keep, path)
            stack.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)
        yield calls


def _is_learned(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _on(device: torch.device | str, tensor: torch.Tensor) -> torch.Tensor:
    # Sizes of groups stay where they are: a layer treats those on a device in another way.
    device = device if tensor.is_floating_point() else tensor.device
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


_on_cpu = functools.partial(_on, "cpu")


class Replay:
    """A copy of the layer of ``call``, which :meth:`run` runs under ``recipe``."""

    def __init__(self, call: LayerCall, recipe: Recipe | None) -> None:
        self.layer = copy.deepcopy(call.layer)
        self.device = next(self.layer.parameters()).device
        put = functools.partial(_on, self.device)
        self.args, self.kwargs = pytree.tree_map_only(torch.Tensor, put, call.arguments)
        self.gradients = {index: put(gradient) for index, gradient in call.gradients.items()}
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        self.learned = [x for x in (*leaves, *self.layer.parameters()) if _is_learned(x)]
        self.autocast = autocast(enabled=recipe is not None, recipe=recipe)

    @torch.enable_grad()
    def run(self) -> list[torch.Tensor | None]:
        """Return the outputs that have a gradient, and the gradients of inputs and parameters."""
        leaves = pytree.tree_leaves(self.layer(*self.args, **self.kwargs))
        outputs = [leaves[index] for index in self.gradients]
        gradients = [*self.gradients.values()]
        learned = torch.autograd.grad(outputs, self.learned, gradients, allow_unused=True)
        return [*(output.detach() for output in outputs), *learned]

    def results(self) -> list[torch.Tensor | None]:
        """Return the results of the last of several runs, each with the same random numbers."""
        device = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        kind = {} if device is None else {"device_type": device.type}
        results: list[torch.Tensor | None] = []
        for _ in range(_RUNS):
            with torch.random.fork_rng(range(count), **kind), self.autocast:
                torch.manual_seed(0)
                results = self.run()
        return results

    def microseconds(self) -> float:
        """Return the median time of a forward and backward pass that finds nothing in the L2
        cache."""
        flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device=self.device)
        spans = []
        for _ in range(_WARM_UPS + _TIMED):
            span = [torch.Event(self.device, enable_timing=True) for _ in range(2)]
            with self.autocast:  # its exit updates the scales of all layers of a model at once
                flushed.zero_()
                span[0].record()
                self.run()
                span[1].record()
            spans.append(span)
        torch.accelerator.synchronize(self.device)
        return statistics.median(1e3 * a.elapsed_time(b) for a, b in spans[_WARM_UPS:])


def relative_error(
    expected: Sequence[torch.Tensor | None], results: Sequence[torch.Tensor | None]
) -> float:
    """Return the largest relative error of a tensor, or of a row of one; NaN if NaN or inf was
    expected."""
    worst = 0.0
    for value, result in zip(expected, results, strict=True):
        if value is None or result is None or not value.numel():
            continue
        rows = value.shape[-1] if value.dim() else 1
        tally = measure(ObservedCast(value.reshape(-1, rows), result.reshape(-1, rows), None, None))
        if tally.nan or tally.inf:
            return math.nan
        of_row = 0.0 if math.isnan(tally.worst_row) else 10.0 ** (-tally.worst_row / 20)
        of_all = math.sqrt(tally.noise / tally.signal) if tally.signal else math.inf
        worst = max(worst, of_row, of_all if tally.noise else 0.0)
    return worst


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a forward and backward pass, measured on ``device``, us by layer and recipe.

    ``versions`` are those of fp8core and torch.
    """

    device: str
    versions: str
    layers: dict[str, dict[str, float]] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the times as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Times:
        """Return the times that :meth:`save` wrote.

        Raises:
            OperandError: the file cannot be read, or holds something else.
        """
        try:
            times = cls(**json.loads(Path(path).read_text(encoding="utf-8")))
            us = [time for of_layer in times.layers.values() for time in of_layer.values()]
            if not all(type(time) in (int, float) and 0 < time < math.inf for time in us):
                raise ValueError("a time is not a positive number")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise OperandError(
                f"{str(path)!r} is no file of times, as Times.save() writes it: {error}."
            ) from None
        return times

    def find(self, layer: str, recipe: str) -> float:
        """Return a time.

        Raises:
            OperandError: there is none.
        """
        if (time := self.layers.get(layer, {}).get(recipe)) is not None:
            return time
        present = ", ".join(self.layers.get(layer, ())) or "other layers"
        raise OperandError(
            f"tune: no time of {layer} under {recipe} on {self.device}; the file has {present}. "
            f"Measure there: tune(...) without times=, then tuning.times.save(path)."
        )
