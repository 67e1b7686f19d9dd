"""Views of a QuantizedTensor, which are for reading: a write to one would change a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from fp8core.backend_api import Operand
from fp8core.dispatch.select import Choice
from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.quantizer import BaseQuantizer, Groups, Orientations
from fp8core.torch_ops.private import (
    COMPOSITE,
    make_wrapper,
    no_torch_function,
    pytree,
    refuse_address,
    schema_of,
)


class HighPrecision(BaseQuantizer):
    """No quantization: the operands are the tensor in the activation dtype, and its view."""

    __slots__ = ("_dtype", "choices")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.choices: tuple[Choice, ...] = ()

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return ``x`` and ``x.T``."""
        if x.dtype != self._dtype:
            x = x.to(self._dtype)
        return Orientations(Operand(x) if rowwise else None, Operand(x.t()) if columnwise else None)


class Unturned(HighPrecision):
    """No quantization, and no view: both operands are the tensor itself, which its GEMM turns.

    What autograd saves is then the tensor that it knows, with its history.
    """

    __slots__ = ()

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return ``x`` for either orientation."""
        operand = Operand(x if x.dtype == self._dtype else x.to(self._dtype))
        return Orientations(operand if rowwise else None, operand if columnwise else None)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that ``func`` writes, tensors or lists of them."""
    for at, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[at] if at < len(args) else kwargs.get(argument.name)


def decomposed(func: Any) -> Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None:
    """Return a function that runs ``func`` as the operators that it consists of; None if it is one.

    torch decomposes a composite operator itself, but not in inference mode, where ``.to(device)``
    would then not be recognized as a move.
    """
    if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(COMPOSITE):
        return lambda func, args, kwargs: func.decompose(*args, **kwargs)
    return None


def wrapper_like(cls: type[torch.Tensor], inner: torch.Tensor) -> Any:
    """Return a tensor of class ``cls`` without memory, of the shape and strides of ``inner``."""
    with torch.inference_mode(False):  # as a view that torch creates outside of it
        return make_wrapper(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )


def as_view(func: Any, out: Any) -> Any:
    """Return ``out``, wrapped in :class:`Values` if ``func`` is a view operator."""
    return pytree.tree_map_only(torch.Tensor, Values, out) if is_view(func) else out


def is_view(func: Any) -> bool:
    """Say whether ``func`` returns memory of its arguments that it does not write."""
    infos = [returned.alias_info for returned in schema_of(func).returns]
    return any(info is not None and not info.is_write for info in infos)


class Values(torch.Tensor):
    """A view of a QuantizedTensor's values: writing to it raises, as the QuantizedTensor would not
    change."""

    _plain: torch.Tensor
    __torch_function__: ClassVar[Any] = no_torch_function

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Values:
        """Wrap ``values``."""
        self: Values = wrapper_like(cls, values)
        refuse_address(self)
        self._plain = values
        return self

    def data_ptr(self) -> int:
        """Return 0: it has no memory of its own."""
        return 0

    def dequantize(self) -> torch.Tensor:
        """Return the values as a plain tensor, through which gradients flow back."""
        if torch.is_grad_enabled() and self.requires_grad:
            return self * 1  # exact
        return self._plain

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a write to the array would not change the QuantizedTensor.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("DLPack of a view of a QuantizedTensor: use its dequantize().")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_plain"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, outer_size: Any, outer_stride: Any
    ) -> Values:
        return Values(inner["_plain"])

    def __copy__(self) -> Values:
        return self.view_as(self)  # type: ignore[return-value]  # a view is of this class

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the values as a plain tensor, as saving and loading does.

        Raises:
            OperandError: it has a history, with which torch copies no tensor either.
        """
        if not self.is_leaf:
            raise OperandError(
                "deepcopy of a view with a history, of a QuantizedTensor that requires a gradient: "
                "take its detach()."
            )
        copied = copy.deepcopy(self._plain, memo).requires_grad_(self.requires_grad)
        return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"Values({self._plain})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares less
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(tensor, Values) for tensor in written(func, args, kwargs)):
            raise UnsupportedError(
                f"{func} writes to a view of a QuantizedTensor, which would not change it. Write "
                f"to the whole: value = p.dequantize(), change value, then p.copy_(value)."
            )
        args, kwargs = pytree.tree_map_only(Values, lambda view: view._plain, (args, kwargs))
        return as_view(func, func(*args, **kwargs))
