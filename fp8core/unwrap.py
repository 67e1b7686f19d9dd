"""Tensor subclasses become plain tensors by their own rule, or are refused by name.

A backend reads memory at an address. Many subclasses of ``torch.Tensor`` have none of their own:
they hold other tensors and answer torch's operations with those. Whatever goes to a backend passes
here first, in :mod:`fp8core.chain`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fp8core.errors import OperandError
from fp8core.parameter.tensor import QuantizedTensor
from fp8core.parameter.values import Values

__all__ = ["PLAIN", "has_no_plain_form", "unwrap"]

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""The types of tensors that a backend may see."""

# What torch traces with: operators know their shapes, and nobody reads their memory.
_STAND_INS = (FakeTensor, FunctionalTensor)
_NO_RULE = torch._C._disabled_torch_dispatch_impl


def unwrap(x: torch.Tensor, role: str) -> torch.Tensor:
    """Return ``x`` as a plain tensor of the same values; ``role`` is what messages call it.

    A :class:`QuantizedTensor` is dequantized, the result of a collective that is under way is
    waited for, and a subclass over ordinary memory is taken for that memory. Gradients flow back
    through all of these. Tensors that torch traces with stay as they are.

    Raises:
        OperandError: a subclass that holds its values elsewhere, such as a DTensor.
    """
    rule = _rule_of(x)
    if rule is None:
        raise OperandError(f"{role} is a {type(x).__name__}, {_HELD_ELSEWHERE}. {_remedy(x)}")
    return rule(x)


def has_no_plain_form(x: torch.Tensor) -> bool:
    """Say whether :func:`unwrap` refuses ``x``, and torch's own operators may take it."""
    return _rule_of(x) is None and not _is_lazy(x)


def _rule_of(x: torch.Tensor) -> Callable[[Any], torch.Tensor] | None:
    if type(x) in PLAIN or isinstance(x, _STAND_INS):
        return _as_it_is
    if isinstance(x, QuantizedTensor | Values):
        return methodcaller("dequantize")
    if type(x).__torch_dispatch__ is _NO_RULE and not _is_lazy(x):
        return methodcaller("as_subclass", torch.Tensor)
    if type(x).__name__ == "AsyncCollectiveTensor":  # torch's class, of a private module
        return _waited_for
    return None


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _waited_for(x: Any) -> torch.Tensor:
    made: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x.elem)
    return made


_HELD_ELSEWHERE = "a subclass of torch.Tensor whose values are not in memory of its own"


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
