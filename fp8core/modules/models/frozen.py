"""``frozen_weights``: a scope without writes to weights, which are quantized once in it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from fp8core.chain.unwrap import PLAIN
from fp8core.errors import OperandError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.models.inventory import layers_in
from fp8core.reporting import some
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.weights import WeightStore
from fp8core.torch_ops.private import FSDP_FLATTENED


class _Fingerprint(NamedTuple):
    """A parameter at one time.

    ``shapes`` are the shapes of the plain tensors with the values of this process, ``is_part``
    whether these tensors are a shard, ``hashes`` the hash of each tensor; None if a tensor has no
    memory, on meta or freed.
    """

    parameter: torch.Tensor
    shapes: tuple[torch.Size, ...]
    is_part: bool
    hashes: list[torch.Tensor] | None


_Parameters: TypeAlias = "dict[str, _Fingerprint]"
"""The parameters of the layers, by path."""


class frozen_weights:
    """Context manager for evaluation and generation, in which no weight of ``model`` changes.

    Each layer of fp8core in ``model``, converted ones included, quantizes its weight in the first
    forward that needs it, and all forwards until the scope ends use that. Outside the scope, and
    without ``is_first_microbatch``, a weight is quantized in every forward.

    The quantized weights take memory. The scope holds for the model in every thread, and may be
    nested or entered again; an exception ends it too. A layer that is moved inside (``.to``)
    quantizes its weight in every forward.

    A CUDA graph captured inside, which may be replayed later, would quantize the weight in every
    replay; it is refused. A graph reads weights that are stored quantized, by
    :func:`fp8core.quantized_model_init`, as they are.

    A weight that a parametrization computes is reused as long as its parameters and buffers do not
    change; a call with other weights (``torch.func.functional_call``) computes with those. Under
    delayed scaling a call that records amaxes quantizes the weight again.

    At the end every parameter of the layers is compared with its state at the beginning, by a hash
    of the bits in each column: one pass over the weights each time, and one wait for the device.
    Not compared are parameters on meta, and those that FSDP has gathered or sharded meanwhile,
    except their shards.

    Raises:
        UnsupportedError: in the forward of a layer whose weight is not stored quantized, while a
            CUDA graph is captured.
        OperandError: ``model`` is no module or holds no layer of fp8core. At the end: a parameter
            was written inside, so that forwards may have multiplied by its earlier value. If torch
            counted the write, already at the next forward.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise OperandError(f"frozen_weights({model!r}): expected a torch.nn.Module.")
        if not layers_in(model):
            raise OperandError(
                f"frozen_weights({type(model).__name__}): it holds no layer of fp8core. Convert it "
                f"first, with fp8core.convert."
            )
        self._model = model
        # Of each open scope the layers' stores and parameters when it was entered.
        self._open: list[tuple[list[WeightStore], _Parameters]] = []

    def __enter__(self) -> None:
        layers = layers_in(self._model)
        stores, parameters = [layer._bindings.weights for layer in layers.values()], _look(layers)
        for store in stores:
            store.open_scope()
        self._open.append((stores, parameters))

    def __exit__(self, *error: object) -> None:
        stores, parameters = self._open.pop()
        for store in stores:
            store.close_scope()
        if error[1] is not None:
            return
        written = _differing(parameters, _look(layers_in(self._model)))
        if written:
            raise OperandError(
                f"frozen_weights({type(self._model).__name__}): {some(written)} changed inside, so "
                f"that layers may have multiplied by the weight of before. Write to weights "
                f"outside of it only."
            )


@torch.no_grad()
def _look(layers: dict[str, LowPrecisionModule]) -> _Parameters:
    """Return the fingerprints of all parameters of ``layers``."""
    parameters: _Parameters = {}
    for path, layer in layers.items():
        for name, parameter in layer.named_parameters():
            full_path = f"{path}.{name}".lstrip(".")
            if full_path not in parameters:
                parameters[full_path] = _fingerprint(parameter)
    return parameters


def _fingerprint(parameter: torch.Tensor) -> _Fingerprint:
    plain = _plain(parameter)
    hashes = [_hash(part) for part in plain] if all(map(_has_memory, plain)) else None
    shapes = tuple(part.shape for part in plain)
    return _Fingerprint(parameter, shapes, hasattr(parameter, "to_local"), hashes)


def _plain(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold ``parameter`` in this process."""
    if isinstance(parameter, QuantizedTensor):
        return parameter.tensors()
    local = getattr(parameter, "to_local", None)  # a DTensor's
    return [parameter.detach() if local is None else local().detach()]


def _has_memory(x: torch.Tensor) -> bool:
    """Say whether ``x`` can be read; FSDP frees the memory of gathered parameters."""
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_meta:
        return False
    return not x.numel() or x.data_ptr() != 0


_BITS = {1: torch.uint8, 2: torch.int16}
_CHUNK = 2**22
"""Elements that are hashed at once; each takes 8 bytes of memory meanwhile."""


def _hash(x: torch.Tensor) -> torch.Tensor:
    """Return a hash of the bits in each column of ``x``, int64: the sum of the elements' bits, each
    times an odd number that belongs to the row, modulo 2**64.

    A change of one element in a column always changes the hash. Changes of several elements cancel
    if their sum, each times the number of its row, is 0: by chance one time in 2**32.
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
    """Return the odd int64 numbers of ``count`` rows from ``start`` on, the same on every device.

    Source: splitmix64, G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014, fig. 16.
    """
    z = torch.arange(start + 1, start + 1 + count, device=device) * -0x61C8864680B583EB
    z = (z ^ (z >> 30 & 2**34 - 1)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27 & 2**37 - 1)) * -0x6B2FB644ECCEEE15
    return (z ^ (z >> 31 & 2**33 - 1)) | 1


def _differing(before: _Parameters, after: _Parameters) -> list[str]:
    """Return the paths of parameters that were replaced or have other bits.

    Waits for each device once.
    """
    changed = sorted(before.keys() ^ after.keys())
    flags: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for path in before.keys() & after.keys():
        old, new = before[path], after[path]
        if _was_resharded(old, new):
            new = _fingerprint(old.parameter)  # FSDP keeps the shard beside the gathered parameter
            if _was_resharded(old, new):
                continue
        if old.shapes != new.shapes:
            changed.append(path)
        for a, b in zip(old.hashes or (), new.hashes or (), strict=False):
            flags.setdefault(a.device, []).append((path, (a != b.to(a.device)).any()))
    for on_device in flags.values():
        bits = torch.stack([flag for _, flag in on_device]).tolist()
        changed += [path for (path, _), bit in zip(on_device, bits, strict=True) if bit]
    return sorted(set(changed))


def _was_resharded(old: _Fingerprint, new: _Fingerprint) -> bool:
    """Say whether FSDP, in version 1 or 2, holds another part of the parameter now."""
    if (old.is_part, old.shapes) == (new.is_part, new.shapes):
        return False
    is_of_fsdp1 = getattr(new.parameter, FSDP_FLATTENED, False)
    return bool(old.is_part or new.is_part or is_of_fsdp1)
