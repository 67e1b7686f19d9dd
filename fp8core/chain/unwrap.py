"""Makes sure that a backend can read the memory of every tensor it is given.

A backend reads memory at an address. Many subclasses of ``torch.Tensor`` have no memory: they wrap
other tensors. Some plain tensors cannot be read either: torch may still have to negate them or to
write their zeros, their storage may be freed, they may be sparse, or on another device. Tensors are
converted here before they reach a backend, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import torch

from fp8core.errors import OperandError, elsewhere
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import ShardedWeight
from fp8core.tensors.storage import PARTS
from fp8core.tensors.values import Values
from fp8core.torch_ops.private import (
    FakeTensor,
    FunctionalTensor,
    is_functional,
    is_legacy_batched,
    is_transform_wrapped,
    is_zero_tensor,
    no_torch_dispatch,
    wait_for_collective,
)

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""The types of tensors that a backend may see."""

WEIGHTS = PLAIN | {QuantizedTensor}
"""The types of parameters that a backend may see, or whose stored operands it may."""

# What torch traces with: operators know their shapes, and nobody reads their memory.
_STAND_INS = (FakeTensor, FunctionalTensor)


def unwrap(x: torch.Tensor, role: str) -> torch.Tensor:
    """Return ``x`` as a plain tensor of the same values; ``role`` is its name in messages.

    A :class:`QuantizedTensor` is dequantized, a :class:`ShardedWeight` that FSDP does not manage is
    its values, a collective that is still running is awaited, and a subclass over ordinary memory
    becomes a plain tensor of that memory. Gradients flow back through all of these. Tensors that
    torch traces with stay as they are.

    Raises:
        OperandError: a subclass that holds its values elsewhere, such as a DTensor.
    """
    rule = _rule_of(x)
    if rule is None:
        raise OperandError(f"{role} is a {type(x).__name__}, {_WITHOUT_MEMORY}. {_remedy(x)}")
    return rule(x)


def has_no_plain_form(x: torch.Tensor) -> bool:
    """Say whether :func:`unwrap` refuses ``x`` although torch's operators may accept it."""
    return _rule_of(x) is None and not _is_lazy(x)


def are_readable(x: torch.Tensor, more: Sequence[torch.Tensor] = ()) -> bool:
    """Say whether a kernel on the device of ``x`` may read each of the tensors as it is: plain
    ones, and the operands of quantized ones.

    False also for empty ones; :func:`as_readable` looks closer.
    """
    device = x.get_device()
    try:
        for tensor in (x, *more):
            if not address_of(tensor) or tensor.is_neg() or tensor.get_device() != device:
                return False
    except RuntimeError:  # it has no storage
        return False
    return True


def address_of(x: torch.Tensor) -> int:
    """Return where the memory of ``x`` begins, 0 if it was freed; of a quantized tensor, that of
    the last of its operands' tensors, 0 if one was freed."""
    if type(x) is not QuantizedTensor:
        return x.data_ptr()
    address, stored = 0, x.__dict__
    for name in PARTS:
        part = stored[name]
        if part is not None:
            address = part.data_ptr()
            if not address:
                break
    return address


_stored: list[tuple[tuple[str, ...], Any, torch.Size]] = []


def stored_in_graph(param: torch.Tensor | None) -> tuple[int, tuple[str, ...]]:
    """Return a number for how ``param`` is stored, and the names of the plain tensors in it, which
    a graph takes instead: it would take a subclass apart in each call. -1 and nothing of any other
    parameter than a quantized one without a gradient."""
    if type(param) is not QuantizedTensor or param.requires_grad:
        return -1, ()
    names, context = param.__tensor_flatten__()
    kind = (*names,), context, param.shape
    if kind not in _stored:
        _stored.append(kind)
    return _stored.index(kind), kind[0]


def put_together(number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parameter of ``parts`` that :func:`stored_in_graph` has this ``number`` for."""
    if number < 0:
        return parts[0]
    names, context, shape = _stored[number]
    inner = dict(zip(names, parts, strict=True))
    return QuantizedTensor.__tensor_unflatten__(inner, context, shape, None)


def is_strided(x: torch.Tensor) -> bool:
    """Say whether ``x`` is laid out in memory by strides: not sparse, nor as oneDNN does it."""
    return x.layout is torch.strided


def as_readable(x: torch.Tensor, device: torch.device, role: str) -> torch.Tensor:
    """Return ``x`` with its values in memory of ``device``; ``role`` is its name in messages.

    A pending negation is carried out, and pending zeros are written. Subclasses, and tensors that
    torch traces or transforms with, stay as they are; the operands of quantized ones are checked.

    Raises:
        OperandError: it is on another device or in another layout, or its memory was freed.
    """
    if type(x) is QuantizedTensor:
        for part in x.tensors():
            as_readable(part, device, f"an operand of {role}")
    if type(x) not in PLAIN or is_transform_wrapped(x) or is_legacy_batched(x) or is_functional(x):
        return x
    if x.is_nested:
        raise OperandError(f"{role} is nested; expected a dense one, as its values() are.")
    shape = list(x.shape)
    if x.device != device:
        raise elsewhere(role, x.device, "the input", device)
    if not is_strided(x):
        layout = str(x.layout).removeprefix("torch.").lstrip("_")
        raise OperandError(
            f"{role} {shape} is in layout {layout}; expected a dense one, as to_dense() gives it."
        )
    if x.is_neg():
        return x.resolve_neg()
    if is_zero_tensor(x):
        return x.clone()
    if x.numel() and not x.is_meta and not x.data_ptr():
        raise OperandError(
            f"{role} {shape} has no memory: its storage was freed, as that of a sharded parameter "
            f"between its uses. Gather or fill it first, as by calling the model that owns it."
        )
    return x


def _rule_of(x: torch.Tensor) -> Callable[[Any], torch.Tensor] | None:
    if type(x) in PLAIN or isinstance(x, _STAND_INS):
        return _as_it_is
    if isinstance(x, QuantizedTensor | Values):
        return methodcaller("dequantize")
    if isinstance(x, ShardedWeight):
        return methodcaller("plain")
    if type(x).__torch_dispatch__ is no_torch_dispatch and not _is_lazy(x):
        return methodcaller("as_subclass", torch.Tensor)
    if type(x).__name__ == "AsyncCollectiveTensor":  # torch's class, of a private module
        return wait_for_collective
    return None


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


_WITHOUT_MEMORY = "a subclass of torch.Tensor that has no memory for its values"


def _is_lazy(x: torch.Tensor) -> bool:
    return torch.nn.parameter.is_lazy(x)


def _remedy(x: torch.Tensor) -> str:
    if _is_lazy(x):
        return "Run the module that fills it first."
    if hasattr(x, "to_local"):
        return "Pass x.to_local(), the part of this rank, or x.full_tensor()."
    if hasattr(x, "dequantize") and type(x).dequantize is not torch.Tensor.dequantize:
        return "Pass x.dequantize()."
    return "Pass a plain tensor."
