"""``frozen_weights``: a scope in which quantized weights are kept, as nobody writes to them."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, TypeAlias

import torch

from fp8core.errors import OperandError
from fp8core.modules.base import LowPrecisionModule
from fp8core.parameter.tensor import QuantizedTensor
from fp8core.reporting import some
from fp8core.weights import WeightStore

__all__ = ["frozen_weights"]


_Prints: TypeAlias = "dict[str, list[torch.Tensor]]"
"""The fingerprint of each parameter, by its path."""


class _Frozen(NamedTuple):
    """What one entry of the scope found."""

    stores: list[WeightStore]
    prints: _Prints


class frozen_weights:
    """Context manager that says: no weight of ``model`` changes inside. For evaluation, generation.

    Each layer of fp8core in ``model``, converted ones included, quantizes its weight in the first
    forward that needs it and keeps it until the scope ends, however the forwards are called.
    Outside the scope, and without ``is_first_microbatch``, a weight is quantized in every forward.

    What is kept takes the memory of the quantized weights. The scope counts for the model, whatever
    thread runs it, and may be nested or entered again; an exception ends it too. A layer that is
    moved inside (``.to``), or captured in a CUDA graph, quantizes its weight as if outside.

    At the end every parameter of the layers is compared with what it was at the beginning, by the
    sums of its bits along rows and along columns: two passes over the weights each time, and one
    wait for the device. A parameter without memory of its own (on meta) is not compared.

    Raises:
        OperandError: ``model`` is no module or holds no layer of fp8core. At the end: a parameter
            was written inside, so that forwards may have multiplied by the weight of before.
            Inside, already at the forward, where torch counted the write.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise OperandError(f"frozen_weights({model!r}): expected a torch.nn.Module.")
        if not _layers(model):
            raise OperandError(
                f"frozen_weights({type(model).__name__}): it holds no layer of fp8core. Convert it "
                f"first, with fp8core.convert."
            )
        self._model = model
        self._open: list[_Frozen] = []

    def __enter__(self) -> None:
        layers = _layers(self._model)
        frozen = _Frozen([layer._bindings.weights for layer in layers.values()], _prints(layers))
        for store in frozen.stores:
            store.num_frozen += 1
        self._open.append(frozen)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        frozen = self._open.pop()
        for store in frozen.stores:
            store.num_frozen -= 1
            if not store.num_frozen:
                store.kept.clear()
        if error is not None:
            return
        written = _differing(frozen.prints, _prints(_layers(self._model)))
        if written:
            raise OperandError(
                f"frozen_weights({type(self._model).__name__}): {some(written)} changed inside, so "
                f"that layers may have multiplied by the weight of before. Write to weights "
                f"outside of it only."
            )


def _layers(model: torch.nn.Module) -> dict[str, LowPrecisionModule]:
    return {path: own for path, own in model.named_modules() if isinstance(own, LowPrecisionModule)}


@torch.no_grad()
def _prints(layers: dict[str, LowPrecisionModule]) -> _Prints:
    """Return the fingerprint of each parameter that has memory."""
    found: _Prints = {}
    for path, layer in layers.items():
        for name, own in layer.named_parameters():
            whole = f"{path}.{name}".lstrip(".")
            if whole not in found and not own.is_meta:
                found[whole] = [part for plain in _plain(own) for part in _sums(plain)]
    return found


def _plain(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold ``parameter`` in this process."""
    if isinstance(parameter, QuantizedTensor):
        return parameter.tensors()
    local = getattr(parameter, "to_local", None)  # a DTensor's
    return [parameter.detach() if local is None else local().detach()]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sums(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of the bits of ``x`` along its rows and along its columns, int64."""
    bits = x.contiguous().view(_BITS[x.element_size()])
    rows = bits.reshape(x.shape[0], -1) if x.dim() > 1 else bits.reshape(1, -1)
    return [rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)]


def _differing(before: _Prints, after: _Prints) -> list[str]:
    """Return the paths whose parameter is another or has other bits; waits for each device once."""
    changed = sorted(before.keys() ^ after.keys())
    flags: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for path in before.keys() & after.keys():
        old, new = before[path], after[path]
        if [own.shape for own in old] != [own.shape for own in new]:
            changed.append(path)
            continue
        for a, b in zip(old, new, strict=True):
            flags.setdefault(a.device, []).append((path, (a != b.to(a.device)).any()))
    for found in flags.values():
        bits = torch.stack([flag for _, flag in found]).tolist()
        changed += [path for (path, _), bit in zip(found, bits, strict=True) if bit]
    return sorted(set(changed))
