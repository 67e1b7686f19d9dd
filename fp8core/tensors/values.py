"""Views of a QuantizedTensor's values, which are for reading: a write would change a copy.

Where blocks are cut, the flat view of the whole is one that torch's wrappers can send:
``DistributedDataParallel`` sends each parameter as ``p.view(-1)``, joined with others, or by itself
where it is large.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.operand_tensor import OperandTensor
from fp8core.torch_ops.private import (
    COMPOSITE,
    make_wrapper,
    no_torch_function,
    pytree,
    refuse_address,
    schema_of,
)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that ``func`` writes, tensors or lists of them."""
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_by(func)]


@cache
def _written_by(func: Any) -> list[tuple[int, str]]:
    infos = [(argument.name, argument.alias_info) for argument in schema_of(func).arguments]
    return [(at, name) for at, (name, info) in enumerate(infos) if info and info.is_write]


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


@cache
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


class FlatView(Values):
    """The values of ``whole`` as one dimension, for reading. ``copy_`` writes all of them to
    ``whole``, and a broadcast sends its operands; other writes are refused."""

    _whole: OperandTensor

    @staticmethod
    def __new__(cls, whole: OperandTensor) -> FlatView:
        """Take a tensor; its values are decoded when they are read."""
        self: FlatView = make_wrapper(cls, (whole.numel(),), dtype=whole.dtype, device=whole.device)
        refuse_address(self)
        self._whole = whole
        return self

    @property
    def whole(self) -> OperandTensor:
        """The tensor of which it is a view."""
        return self._whole

    @property
    def _plain(self) -> torch.Tensor:  # type: ignore[override]  # read from the whole each time
        return self._whole.decoded().view(-1)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_whole"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], context: None, outer_size: Any, outer_stride: Any
    ) -> FlatView:
        return FlatView(inner["_whole"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares less
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.c10d.broadcast_.default:
            return broadcast(func, args, kwargs)
        view = args[0] if args else None
        if isinstance(view, FlatView):
            whole = view.whole
            if func.overloadpacket is torch.ops.aten.copy_:
                source = args[1].whole if isinstance(args[1], FlatView) else args[1]
                whole.copy_(source.view(whole.shape), *args[2:], **kwargs)
                return view
            if func.overloadpacket is torch.ops.aten.detach:
                return FlatView(whole)
            if func.overloadpacket is torch.ops.aten.view and [*args[1]] == [*whole.shape]:
                return whole.detach()
        return super().__torch_dispatch__(func, types, args, kwargs)


def broadcast(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a broadcast of ``c10d`` in place on the operands of a tensor, or of its flat view.

    Codes and scales arrive as they are on the rank that sends. What is returned waits for all.
    """
    (tensor,), *rest = args
    work: Any = None
    for part in getattr(tensor, "whole", tensor).tensors():
        if work is not None:
            work.wait()
        sent = part if part.is_contiguous() else part.contiguous()
        coded = sent.view(torch.uint8) if sent.itemsize == 1 else sent
        _, work = func([coded], *rest, **kwargs)
        if sent is not part:
            work.wait()
            part.copy_(sent)
        if not part.is_inference():
            torch.autograd.graph.increment_version(part)
    return [tensor], work
