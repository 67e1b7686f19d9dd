"""A tensor whose memory is the operands of a GEMM: what it holds, and how it is created anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch

from fp8core.backend_api import Operand
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.errors import OperandError, UnsupportedError
from fp8core.formats import dtype_of
from fp8core.recipe.plan import TensorPlan
from fp8core.reporting import log_once
from fp8core.tensors.checks import matrix_size
from fp8core.tensors.quantizer import Orientations, Slot
from fp8core.tensors.storage import (
    BY_VALUE,
    PARTS,
    Casting,
    StoredOperands,
    decode_operand,
    matrix_shape,
    split,
    turn,
)
from fp8core.torch_ops.private import (
    IS_PARAMETER,
    counting_views,
    make_wrapper,
    no_torch_function,
    refuse_address,
)

_Self = TypeVar("_Self", bound="OperandTensor")


class OperandTensor(torch.Tensor):
    """A tensor ``[..., k]`` without memory of its own, of the plain tensors of its operands.

    Its methods answer for the operands, where torch's would read memory of its own. A change of
    shape is a view where blocks allow it, as in torch where strides do. What it does in torch's
    operators is its subclass's, :class:`fp8core.QuantizedTensor`.

    Conversions to a dtype, also to its nominal one, return plain tensors. torch's methods return
    the tensor itself if it has the dtype already: a master copy taken by such a conversion would
    then be in low precision.
    """

    plan: TensorPlan
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _initial_value: torch.Tensor | None
    _keeps_initial_value: bool
    # By what a written value is quantized, as the delayed scale of a Float8Quantizer.
    _casting: Casting
    # Whether it has such a scale elsewhere: torch rebuilt it for a graph, from its operands alone,
    # or it is of parts that have theirs.
    _lacks_slot: bool
    # Whether scales cover more than this tensor: it is a part of another one.
    _shares_scales: bool
    # Whether it is a parameter without its history, as ``data`` and ``detach`` give it.
    _is_of_parameter: bool
    # The value in high precision, for the orientation that the plan lacks; None: it holds none.
    _value: torch.Tensor | None
    # The tensor with zeros behind its ends in whose memory it lies, None for one without.
    _padded: OperandTensor | None

    __torch_function__: ClassVar[Any] = no_torch_function

    @staticmethod
    def __new__(
        cls: type[_Self],
        rowwise: Operand | None,
        columnwise: Operand | None,
        plan: TensorPlan,
        dtype: torch.dtype,
        *,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> _Self:
        """Wrap the operands; ``columnwise`` is None if it is a view of ``rowwise``, or not planned.

        ``shape`` is that of the tensor, ``[n, k]`` if None. ``strides`` are those of a view of a
        plain tensor like it, None for a contiguous one: they tell views with gaps.

        Raises:
            OperandError: their sizes or dtypes do not fit ``plan``, or ``shape``.
        """
        nothing = (None,) * len(Operand._fields)
        parts = (*(rowwise or nothing), *(columnwise or nothing))
        size = matrix_size(parts, plan)
        if shape is not None and matrix_shape(shape) != size:
            raise OperandError(
                f"a QuantizedTensor {list(shape)} of operands for {size[0]} rows of {size[1]}: "
                f"leading dimensions are rows."
            )
        device = next(part.device for part in parts if part is not None)
        self: _Self = make_wrapper(
            cls,
            size if shape is None else tuple(shape),
            strides=None if strides is None else tuple(strides),
            dtype=dtype,
            device=device,
        )
        refuse_address(self)
        for name, part in zip(PARTS, parts, strict=True):
            setattr(self, name, part)
        self.plan = plan
        self._initial_value = None
        self._keeps_initial_value = False
        self._casting = BY_VALUE
        self._lacks_slot = False
        self._shares_scales = False
        self._is_of_parameter = False
        self._value = None
        self._padded = None
        return self

    @property
    def parts(self) -> list[torch.Tensor | None]:
        """The plain tensors of its rowwise operand, then of its columnwise one, None for those that
        it lacks."""
        return [getattr(self, name) for name in PARTS]

    @property
    def stored(self) -> StoredOperands:
        """The operands that it stores, None for one that is a view of the other, or not planned."""
        return split(self.parts)

    @property
    def rowwise(self) -> Operand | None:
        """The rowwise operand, None if it is not stored."""
        data, scale_inv, global_scale_inv = map(self.__dict__.__getitem__, PARTS[:3])
        return None if data is None else Operand(data, scale_inv, global_scale_inv)

    @property
    def operands(self) -> Orientations:
        """The operands, ``rowwise [n, k]`` and ``columnwise [k, n]``, None if not planned."""
        rowwise, columnwise = self.stored
        if columnwise is None and rowwise is not None and self.plan.columnwise is not None:
            columnwise = turn(rowwise)
        return Orientations(rowwise, columnwise)

    def orientations(self, rowwise: bool, columnwise: bool) -> Orientations:
        """Return the operands of the orientations asked for."""
        row, column = self.operands
        return Orientations(row if rowwise else None, column if columnwise else None)

    def get_data_tensors(
        self, rowwise_data: bool = True, columnwise_data: bool = True
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...] | None:
        """Return the codes of both orientations, or of the one that is asked for, in its memory.

        They are laid out as in Transformer Engine: rowwise ones ``[..., k]``, columnwise ones of MX
        formats ``[n, k]``, of others ``[k, n]``; None for an orientation that is not held.

        Raises:
            OperandError: neither is asked for.
        """
        if not (rowwise_data or columnwise_data):
            raise OperandError("get_data_tensors of neither orientation: pass rowwise_data=True.")
        row, column = (None if operand is None else operand.data for operand in self.operands)
        if self._value is not None:
            row, column = (self._value, column) if row is None else (row, self._value)
        elif row is not None and self.dim() != 2:
            row = row.view(*self.shape[:-1], row.shape[1]) if self.dim() else row.view(())
        spec = self.plan.columnwise
        if column is not None and spec is not None and spec.scale_format == "e8m0":
            column = column.t()
        if rowwise_data and columnwise_data:
            return row, column
        return row if rowwise_data else column

    @property
    def _data(self) -> torch.Tensor | None:
        """The rowwise codes of a tensor with one scale, by Transformer Engine's name."""
        self._check_scale("_data")
        return self.get_data_tensors(columnwise_data=False)  # type: ignore[return-value]  # one

    @property
    def _transpose(self) -> torch.Tensor | None:
        """The columnwise codes ``[k, ...]`` of a tensor with one scale, in its memory; None if they
        are not held."""
        self._check_scale("_transpose")
        codes: Any = self.get_data_tensors(rowwise_data=False)
        if codes is not None and self.dim() > 2:
            codes = codes.unflatten(1, self.shape[:-1])
        return codes  # type: ignore[no-any-return]  # of one orientation

    @property
    def _scale_inv(self) -> torch.Tensor:
        """The one scale by which the codes of a tensor are multiplied, float32 ``[1]``."""
        self._check_scale("_scale_inv")
        row, column = self.operands
        scale: torch.Tensor = (row or column).scale_inv
        return scale.view(1)

    @property
    def _fp8_dtype(self) -> Any:
        """The format of the codes, a :class:`fp8core.DType`; its name where that has none."""
        spec = self.plan.rowwise or self.plan.columnwise
        assert spec is not None
        if codes_per_byte(spec) > 1:
            raise AttributeError(f"{self} has no _fp8_dtype: its codes have no 8 bits.")
        return dtype_of(spec.format)

    def _check_scale(self, name: str) -> None:
        """Raise AttributeError unless one scale is that of the whole tensor."""
        spec = self.plan.rowwise or self.plan.columnwise
        if spec is None or spec.block != (0, 0):
            raise AttributeError(
                f"{self} has no {name}, which tensors with one scale have. get_data_tensors() "
                f"returns its codes, get_metadata() its scales too."
            )

    def tensors(self) -> list[torch.Tensor]:
        """Return the plain tensors of its operands, for a collective or a count of bytes.

        Some may be views with gaps, which gloo sends and receives wrongly without an error: give a
        collective ``part.contiguous()``, and copy what it received to ``part``.
        """
        stored = self.__dict__
        return [stored[name] for name in (*PARTS, "_value") if stored[name] is not None]

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch's is read-only too, but for its stub
        """The bytes of its operands, scales included."""
        return sum(part.nbytes for part in self.tensors())

    @property
    def is_of_parameter(self) -> bool:
        """Whether the tensor is a parameter, or a parameter detached from its history."""
        return self._is_of_parameter or getattr(self, IS_PARAMETER, False)

    def decoded(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor without history, in the nominal dtype if None."""
        rowwise, columnwise = self.stored
        row, column = self.plan
        dtype = dtype or self.dtype
        if self._value is not None and row is None:
            return self._value.to(dtype, copy=True)
        if rowwise is not None and row is not None:
            values = decode_operand(rowwise, row, dtype)
        else:
            assert columnwise is not None
            assert column is not None
            values = decode_operand(columnwise, column, dtype).t().contiguous()
        return values if self.dim() == 2 else values.reshape(self.shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # torch's has no dtype
        """Return the values as a plain tensor in ``dtype``, the nominal one if None."""
        dtype = dtype or self.dtype
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self.decoded(dtype)
        if dtype == self.dtype:
            return self * 1  # differentiable, and exact
        return torch.ops.aten._to_copy.default(self, dtype=dtype)  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a plain tensor, rounded once, if a dtype, or a tensor that has one, is given.

        A move to another device alone, or a copy, stays quantized.
        """
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype | torch.Tensor):
                dtype = value.dtype if isinstance(value, torch.Tensor) else value
                return self.dequantize(dtype).to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """Return the values as a plain tensor of ``dtype``; without one, the type's name."""
        if dtype is None:
            return super().type()
        return self.dequantize(torch.float32).type(dtype, non_blocking)

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return the values as a plain tensor with dtype and device of ``other``."""
        return self.to(other)

    def float(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain float32 tensor, without rounding."""
        return self.dequantize(torch.float32)

    def double(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values of :meth:`float` as a plain float64 tensor."""
        return self.dequantize(torch.float64)

    def bfloat16(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain bfloat16 tensor, rounded once."""
        return self.dequantize(torch.bfloat16)

    def half(self, memory_format: Any = None) -> torch.Tensor:
        """Return the values as a plain float16 tensor, rounded once."""
        return self.dequantize(torch.float16)

    def rebuilt(
        self: _Self,
        rowwise: Operand | None,
        columnwise: Operand | None,
        shape: Sequence[int],
        *,
        strides: Sequence[int] | None = None,
        shares_scales: bool | None = None,
    ) -> _Self:
        """Return a tensor of ``shape`` and ``strides`` of operands that are stored as this
        tensor's.

        ``shares_scales``: whether their scales cover more than they do; None as this tensor's.
        """
        with torch.inference_mode(False):  # as a view that torch creates outside of it
            tensor = type(self)(
                rowwise, columnwise, self.plan, self.dtype, shape=shape, strides=strides
            )
        tensor._shares_scales = self._shares_scales if shares_scales is None else shares_scales
        tensor._written_as(self)._value = (
            None if self._value is None else self._value.view(tuple(shape))
        )
        return tensor

    def _written_as(self: _Self, tensor: OperandTensor) -> _Self:
        """Become one to which values are written as to ``tensor``, whose value in high precision
        it shares; return it."""
        self._casting, self._lacks_slot = tensor._casting, tensor._lacks_slot
        self._value = tensor._value
        return self

    def _lie_within(self: _Self, whole: OperandTensor) -> _Self:
        """Become the part of ``whole`` of this tensor's sizes; the rest of ``whole`` is zeros."""
        with torch.inference_mode(False), counting_views():  # backward reads the whole
            for name, part in zip(PARTS, whole.parts, strict=True):
                size = getattr(self, name)
                if size is not None and part is not None and size.shape != part.shape:
                    part = part[: size.shape[0], : size.shape[1]]
                setattr(self, name, part)
        self._padded = whole
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        """Return a copy, of which a write counts as one to the zeros' memory too."""
        copied: _Self = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]  # torch's
        return copied if copied._padded is None else copied._lie_within(copied._padded)

    def with_dtype(self: _Self, dtype: torch.dtype) -> _Self:
        """Return the same operands under another nominal dtype."""
        renamed = type(self)(
            *self.stored, self.plan, dtype, shape=self.shape, strides=self.stride()
        )
        renamed._written_as(self)._shares_scales = self._shares_scales
        renamed._is_of_parameter = self.is_of_parameter
        renamed._initial_value = self._initial_value
        renamed._keeps_initial_value = self._keeps_initial_value
        if self._padded is not None:
            same = dtype == self.dtype
            renamed._padded = self._padded if same else self._padded.with_dtype(dtype)
        return renamed

    def bound_to(self: _Self, slot: Slot | None) -> _Self:
        """Return this tensor, to which values are written by the delayed scale of ``slot``; None:
        by a scale from their amax."""
        self._casting, self._lacks_slot = self._casting._replace(slot=slot), False
        return self

    def pinned(self: _Self) -> _Self:
        """Return a copy in pinned memory of the CPU."""
        copies = [None if part is None else part.pin_memory() for part in self.parts]
        copy = self.rebuilt(*split(copies), self.shape, shares_scales=False)
        copy._value = None if self._value is None else self._value.pin_memory()
        return copy

    def reshape(self, *shape: Any) -> torch.Tensor:
        """Return the tensor as ``[shape]``: a view where blocks allow it, else a plain copy of the
        values, which is logged once."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        try:
            view = self.view(tuple(sizes))
        except RuntimeError:  # UnsupportedError, and torch's where a view has gaps
            view = None
        if isinstance(view, OperandTensor):  # not a flat view of its values
            return view
        say_dequantized(torch.ops.aten.view.default, self)
        return self.dequantize().reshape(*sizes)

    def reshape_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the shape of ``other``, as :meth:`reshape` does."""
        return self.reshape(other.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor:
        """Return the tensor with some dimensions as one, as :meth:`reshape` does."""
        if not self.dim():
            return self.reshape(1)
        first, last = start_dim % self.dim(), end_dim % self.dim()
        if first > last:
            raise OperandError(f"flatten({start_dim}, {end_dim}) of {self}: no such dimensions.")
        count = math.prod(self.shape[first : last + 1])
        return self.reshape(*self.shape[:first], count, *self.shape[last + 1 :])

    def ravel(self) -> torch.Tensor:
        """Return the tensor in one dimension, as :meth:`reshape` does."""
        return self.reshape(self.numel())

    def contiguous(self, memory_format: torch.memory_format | None = None) -> torch.Tensor:
        """Return the tensor itself, or a copy of a view with gaps, as every second row."""
        return self if self.is_contiguous() else self.clone()

    def share_memory_(self: _Self) -> _Self:
        """Move the operands to shared memory, as torch does a tensor's storage."""
        for part in self.tensors():
            part.share_memory_()  # type: ignore[no-untyped-call]  # torch's
        return self

    def is_shared(self) -> bool:
        """Say whether all operands are in shared memory."""
        return all(part.is_shared() for part in self.tensors())  # type: ignore[no-untyped-call]  # torch's

    def pin_memory(self: _Self, device: Any = None) -> _Self:
        """Return this tensor if its operands are in pinned memory, else a copy that is."""
        return self if self.is_pinned() else self.pinned()

    def is_pinned(self, device: Any = None) -> bool:
        """Say whether all operands are in pinned memory."""
        return all(part.is_pinned() for part in self.tensors())

    def data_ptr(self) -> int:
        """Return 0, as the tensor has no memory of its own; its :meth:`tensors` have addresses."""
        return 0

    def storage(self) -> Any:
        """Refuse: codes and scales have a storage each.

        Raises:
            OperandError: always; safetensors, which Hugging Face's ``save_pretrained`` calls, takes
                an UnsupportedError for a tensor without memory.
        """
        raise OperandError(
            f"storage() of {self}: its codes and scales have one each, tensors() returns them. To "
            f"save a model of stored weights call fp8core.huggingface.save_pretrained(model, "
            f"directory) or torch.save(); to save it as it was, fp8core.unconvert(model) first."
        )

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.dequantize().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the codes alone are no array of the values.

        Raises:
            UnsupportedError: always; without it, torch would hand out an address that is not there.
        """
        raise UnsupportedError(
            f"DLPack of {self}: its values are codes and scales. Use dequantize(), or to_torch() "
            f"for the codes and the scales as tensors."
        )


def say_dequantized(func: Any, tensor: Any) -> None:
    """Log once for each operator that it computes with dequantized values."""
    name = str(func.overloadpacket)
    log_once(
        f"{name} of {tensor} computes with its dequantized values, and returns a plain tensor",
        about=f"{name} of a QuantizedTensor",
    )
