"""``frozen_weights``: a scope in which quantized weights are kept, as nobody writes to them."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, TypeAlias

import torch

from fp8core.chain.unwrap import PLAIN
from fp8core.errors import OperandError
from fp8core.modules.base import LowPrecisionModule
from fp8core.reporting import some
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.weights import WeightStore
from fp8core.torch_ops.private import FSDP_FLATTENED

__all__ = ["frozen_weights"]


class _Seen(NamedTuple):
    """A parameter as it was found: the tensor itself, the shapes of the plain tensors that hold its
    values in this process, whether those are a part of it, and a fingerprint of each; None if one
    has no memory of its own, or was freed."""

    parameter: torch.Tensor
    shapes: tuple[torch.Size, ...]
    is_part: bool
    prints: list[torch.Tensor] | None


_Parameters: TypeAlias = "dict[str, _Seen]"
"""The parameters of the layers, by path."""


class _Frozen(NamedTuple):
    """What one entry of the scope found."""

    stores: list[WeightStore]
    parameters: _Parameters


class frozen_weights:
    """Context manager that says: no weight of ``model`` changes inside. For evaluation, generation.

    Each layer of fp8core in ``model``, converted ones included, quantizes its weight in the first
    forward that needs it and keeps it until the scope ends, however the forwards are called.
    Outside the scope, and without ``is_first_microbatch``, a weight is quantized in every forward.

    What is kept takes the memory of the quantized weights. The scope counts for the model, whatever
    thread runs it, and may be nested or entered again; an exception ends it too. A layer that is
    moved inside (``.to``), or captured in a CUDA graph, quantizes its weight as if outside.

    A weight that a parametrization computes is kept as long as its parameters and buffers stay as
    they are, and a call with other weights (``torch.func.functional_call``) computes with those.
    Under delayed scaling a call that records amaxes quantizes the weight as if outside.

    At the end every parameter of the layers is compared with what it was at the beginning, by a
    hash of the bits in each column: one pass over the weights each time, and one wait for the
    device. Not compared is a parameter without memory of its own (on meta), and one that FSDP has
    gathered or sharded meanwhile, but for its shard.

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
        frozen = _Frozen([layer._bindings.weights for layer in layers.values()], _look(layers))
        for store in frozen.stores:
            store.open_scope()
        self._open.append(frozen)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        frozen = self._open.pop()
        for store in frozen.stores:
            store.close_scope()
        if error is not None:
            return
        written = _differing(frozen.parameters, _look(_layers(self._model)))
        if written:
            raise OperandError(
                f"frozen_weights({type(self._model).__name__}): {some(written)} changed inside, so "
                f"that layers may have multiplied by the weight of before. Write to weights "
                f"outside of it only."
            )


def _layers(model: torch.nn.Module) -> dict[str, LowPrecisionModule]:
    return {path: own for path, own in model.named_modules() if isinstance(own, LowPrecisionModule)}


@torch.no_grad()
def _look(layers: dict[str, LowPrecisionModule]) -> _Parameters:
    """Return the parameters of ``layers`` as they are now."""
    found: _Parameters = {}
    for path, layer in layers.items():
        for name, own in layer.named_parameters():
            whole = f"{path}.{name}".lstrip(".")
            if whole not in found:
                found[whole] = _seen(own)
    return found


def _seen(parameter: torch.Tensor) -> _Seen:
    plain = _plain(parameter)
    prints = [_print(part) for part in plain] if all(map(_has_memory, plain)) else None
    shapes = tuple(part.shape for part in plain)
    return _Seen(parameter, shapes, hasattr(parameter, "to_local"), prints)


def _plain(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold ``parameter`` in this process."""
    if isinstance(parameter, QuantizedTensor):
        return parameter.tensors()
    local = getattr(parameter, "to_local", None)  # a DTensor's
    return [parameter.detach() if local is None else local().detach()]


def _has_memory(x: torch.Tensor) -> bool:
    """Say whether ``x`` can be read; FSDP frees the memory of what it gathers."""
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_meta:
        return False
    return not x.numel() or x.data_ptr() != 0


_BITS = {1: torch.uint8, 2: torch.int16}
_CHUNK = 2**22
"""Elements that are hashed at once; each takes 8 bytes meanwhile."""


def _print(x: torch.Tensor) -> torch.Tensor:
    """Return a hash of the bits in each column of ``x``, int64: the sum of the bits, each times an
    odd number of its row, modulo 2**64.

    A change of one element in a column always shows. More of them cancel if their sum, each times
    the number of its row, is 0: where the changes know nothing of the numbers, one time in 2**32.
    """
    if not x.numel():
        return torch.zeros(1, dtype=torch.int64, device=x.device)
    x = x.contiguous() if x.dim() else x.reshape(1)
    bits = x.view(_BITS.get(x.element_size(), torch.int32))
    rows = bits.reshape(-1, bits.shape[-1])
    hashed = torch.zeros(rows.shape[1], dtype=torch.int64, device=x.device)
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        hashed += (part * _odd_numbers(start, part.shape[0], x.device)[:, None]).sum(0)
    return hashed


def _odd_numbers(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the odd int64 numbers of the rows from ``start`` on, the same on every device.

    Source: splitmix64, G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014, fig. 16.
    """
    z = torch.arange(start + 1, start + 1 + count, device=device) * -0x61C8864680B583EB
    z = (z ^ (z >> 30 & 2**34 - 1)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27 & 2**37 - 1)) * -0x6B2FB644ECCEEE15
    return (z ^ (z >> 31 & 2**33 - 1)) | 1


def _differing(before: _Parameters, after: _Parameters) -> list[str]:
    """Return the paths whose parameter is another or has other bits; waits for each device once."""
    changed = sorted(before.keys() ^ after.keys())
    flags: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for path in before.keys() & after.keys():
        old, new = before[path], after[path]
        if _was_resharded(old, new):
            new = _seen(old.parameter)  # FSDP keeps the shard beside what it gathers
            if _was_resharded(old, new):
                continue
        if old.shapes != new.shapes:
            changed.append(path)
        for a, b in zip(old.prints or (), new.prints or (), strict=False):
            flags.setdefault(a.device, []).append((path, (a != b.to(a.device)).any()))
    for found in flags.values():
        bits = torch.stack([flag for _, flag in found]).tolist()
        changed += [path for (path, _), bit in zip(found, bits, strict=True) if bit]
    return sorted(set(changed))


def _was_resharded(old: _Seen, new: _Seen) -> bool:
    """Say whether FSDP, of either kind, holds now another part of the parameter than then."""
    if (old.is_part, old.shapes) == (new.is_part, new.shapes):
        return False
    is_of_fsdp1 = getattr(new.parameter, FSDP_FLATTENED, False)
    return bool(old.is_part or new.is_part or is_of_fsdp1)
