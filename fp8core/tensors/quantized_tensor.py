"""``QuantizedTensor``: a tensor stored in low precision that acts as a tensor of bfloat16.

It holds the operands that a layer's GEMMs read, as plain tensors, and nothing else. torch's
operators treat it in three ways:

* moving, copying, saving and padding act on the operands, bit for bit, and so do views and copies
  of whole blocks;
* other operators compute with the values, decoded to the nominal dtype, and return plain tensors;
* a value that is written to it is quantized. A view that is no part of whole blocks, such as a
  transpose, is for reading: writing to it is refused.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.reporting import log_once
from fp8core.tensors.casts import Casts
from fp8core.tensors.checks import check_stored, matrix_size, plan_from
from fp8core.tensors.coded import fit_codes
from fp8core.tensors.collectives import collected
from fp8core.tensors.quantizer import Orientations, Slot
from fp8core.tensors.reduced_amax import ReduceAmax
from fp8core.tensors.storage import (
    FLOATS,
    PARTS,
    Held,
    check,
    check_parameter,
    decode_operand,
    kept,
    make_operands,
    pad_operand,
    per_byte,
    split,
    storage_plan,
    turn,
)
from fp8core.tensors.values import as_view, decomposed, written
from fp8core.tensors.views import COPIES, VIEWS, say_dequantized
from fp8core.torch_ops.private import (
    COLLECTIVES,
    IS_PARAMETER,
    make_wrapper,
    no_torch_function,
    pytree,
    refuse_address,
)

__all__ = ["QuantizedTensor"]

_MASTERS = (
    "Step high-precision masters: make masters = fp8core.MasterWeights(model) and the optimizer "
    "of masters.parameters(), then masters.attach(optimizer)."
)


class QuantizedTensor(Casts):
    """A tensor ``[..., k]`` stored as the operands of a GEMM; its dtype is nominal.

    It is stored as the matrix ``[n, k]`` of its rows, whatever its leading dimensions are.
    ``_rowwise_data``, ``_rowwise_scale_inv``, ``_rowwise_global_scale_inv`` and the same for
    ``_columnwise_`` are the plain tensors of an :class:`fp8core.backend_api.Operand`, None for
    those that the format lacks, and for an orientation that is not held, whose spec in ``plan`` is
    None. The columnwise ones are None too where they are views of the rowwise ones: a square block
    holds the same values in both orientations. The values are those of the rowwise operand, if it
    is held; in formats with blocks along k alone the columnwise operand is another rounding of the
    written value.

    ``dtype`` is float32, bfloat16 or float16: the dtype of ``dequantize``, of other operators'
    arithmetic, and of the gradient, which is a plain tensor. A gradient passes ``dequantize``
    unchanged. ``to(dtype)`` is ``dequantize().to(dtype)``; a move to a device stays quantized.
    The quantizers (``fp8core.MXFP8Quantizer`` and others), :class:`fp8core.quantized_model_init`,
    :meth:`quantize` and :meth:`from_codes` create one.

    A view of whole blocks (``view``, ``narrow``, ``select``, ``split``, ``chunk``) shares the
    operands, and a write to it reaches its base, unless both have a scale in common, where it is
    refused. Views that cut blocks raise UnsupportedError; copies of parts (``cat``,
    ``index_select``, ``reshape``) are plain tensors then.
    """

    plan: TensorPlan
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _initial_value: torch.Tensor | None
    _keeps_initial_value: bool
    # The delayed scale by which a written value is quantized, from a Float8Quantizer.
    _slot: Slot | None
    # Whether it has such a scale elsewhere: torch rebuilt it for a graph, from its operands alone.
    _lacks_slot: bool
    # Whether scales cover more than this tensor: it is a part of another one.
    _shares_scales: bool
    # Whether it is a parameter without its history, as ``data`` and ``detach`` give it.
    _is_of_parameter: bool

    __torch_function__: ClassVar[Any] = no_torch_function

    @staticmethod
    def __new__(
        cls,
        rowwise: Operand | None,
        columnwise: Operand | None,
        plan: TensorPlan,
        dtype: torch.dtype,
        *,
        shape: Sequence[int] | None = None,
    ) -> QuantizedTensor:
        """Wrap the operands; ``columnwise`` is None if it is a view of ``rowwise``, or not planned.

        ``shape`` is that of the tensor, ``[n, k]`` if None.

        Raises:
            OperandError: their sizes or dtypes do not fit ``plan``, or ``shape``.
        """
        nothing = (None,) * len(Operand._fields)
        parts = (*(rowwise or nothing), *(columnwise or nothing))
        size = matrix_size(parts, plan)
        if shape is not None and (math.prod(shape[:-1]), *shape[-1:]) != size:
            raise OperandError(
                f"a QuantizedTensor {list(shape)} of operands for {size[0]} rows of {size[1]}: "
                f"leading dimensions are rows."
            )
        device = next(part.device for part in parts if part is not None)
        self: QuantizedTensor = make_wrapper(
            cls, size if shape is None else tuple(shape), dtype=dtype, device=device
        )
        refuse_address(self)
        for name, part in zip(PARTS, parts, strict=True):
            setattr(self, name, part)
        self.plan = plan
        self._initial_value = None
        self._keeps_initial_value = False
        self._slot = None
        self._lacks_slot = False
        self._shares_scales = False
        self._is_of_parameter = False
        return self

    @classmethod
    def quantize(cls, value: torch.Tensor, plan: TensorPlan) -> QuantizedTensor:
        """Return the matrix ``value [n, k]`` stored by ``plan``, as ``recipe.plan(role).weight``.

        The nominal dtype is that of ``value``. Scales come from its amax, also where ``plan`` has
        delayed scales.

        Raises:
            OperandError: ``value`` is no floating-point matrix.
            UnsupportedError: the plan rounds stochastically, transforms, or leaves fprop in high
                precision, its blocks do not divide the sizes, or no backend quantizes like that.
        """
        if value.dim() != 2 or value.dtype not in FLOATS:
            raise OperandError(
                f"QuantizedTensor of {list(value.shape)} {value.dtype}: expected a matrix in "
                f"float32, bfloat16 or float16."
            )
        plan = storage_plan(plan)
        check_parameter(plan, tuple(value.shape))
        return cls.of(value, plan)

    @classmethod
    def of(
        cls,
        value: torch.Tensor,
        plan: TensorPlan,
        *,
        slot: Slot | None = None,
        reduce_amax: ReduceAmax | None = None,
    ) -> QuantizedTensor:
        """Return ``value [..., k]`` stored by ``plan``, without its history.

        An orientation that is None in ``plan`` is not held. ``slot`` holds a delayed scale, which
        later writes take too. ``reduce_amax``, if given, reduces the amaxes that scales follow
        from over all parts of a tensor of which ``value`` is one.

        Raises:
            OperandError: ``value`` has no dimension, or another dtype than float32, bfloat16 and
                float16; or ``plan`` holds neither orientation.
            UnsupportedError: blocks do not divide the sizes, or no backend quantizes like that.
        """
        if not value.dim() or value.dtype not in FLOATS:
            raise OperandError(
                f"QuantizedTensor of {list(value.shape)} {value.dtype}: expected at least one "
                f"dimension, in float32, bfloat16 or float16."
            )
        plan = storage_plan(plan)
        if plan == (None, None):
            raise OperandError(
                "a QuantizedTensor of neither orientation: a quantizer needs rowwise or columnwise "
                "usage, as by set_usage(rowwise=True)."
            )
        columns = value.shape[-1]
        rows = math.prod(value.shape[:-1])
        check(plan, rows, columns)
        matrix = value.detach().reshape(rows, columns)
        operands = make_operands(matrix, plan, slot=slot, reduce_amax=reduce_amax)
        made = cls(*kept(operands, plan), plan, value.dtype, shape=value.shape)
        made._slot = slot
        return made

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scale_inv: torch.Tensor,
        recipe: Any,
        *,
        global_scale_inv: torch.Tensor | None = None,
        tensor: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedTensor:
        """Return the quantized tensor of ``codes`` and scales, which it holds without a copy.

        It holds the rowwise operand, and the columnwise one where that has the same codes.

        Args:
            codes: ``[..., k]`` in one of torch's FP8 dtypes or as uint8; of 4-bit formats
                ``[..., k / 2]`` as uint8 or ``torch.float4_e2m1fn_x2``, the even element in the low
                half.
            scale_inv: what elements are multiplied by, one for each block: float32, or the bytes of
                the scale format.
            recipe: how it is stored: a recipe or its name, an OperandSpec, or a TensorPlan.
            global_scale_inv: the scales above those of blocks, float32, for two levels.
            tensor: which tensor of a linear layer the recipe is asked about, ``"input"``,
                ``"weight"`` or ``"grad_output"``; None takes the first whose format and scales fit.
            dtype: the nominal dtype, float32, bfloat16 or float16.

        Raises:
            RecipeError: ``recipe`` is none of these, or leaves the tensor in high precision.
            OperandError: codes and scales do not fit it, or hold what no cast writes.
        """
        given = (recipe, global_scale_inv, tensor, dtype)
        operand, plan, shape = fit_codes(codes, scale_inv, *given)
        return cls(operand, None, plan, dtype, shape=shape)

    @property
    def held(self) -> Held:
        """The operands that it stores, None for one that is a view of the other, or not planned."""
        return _stored(self)

    @property
    def operands(self) -> Orientations:
        """The operands, ``rowwise [n, k]`` and ``columnwise [k, n]``, None if not planned."""
        rowwise, columnwise = _stored(self)
        if columnwise is None and rowwise is not None and self.plan.columnwise is not None:
            columnwise = turn(rowwise)
        return Orientations(rowwise, columnwise)

    def rebuilt(
        self,
        rowwise: Operand | None,
        columnwise: Operand | None,
        shape: Sequence[int],
        *,
        shares_scales: bool | None = None,
    ) -> QuantizedTensor:
        """Return a tensor of ``shape`` of other operands that are stored alike.

        ``shares_scales``: whether their scales cover more than they do; None as this tensor's.
        """
        with torch.inference_mode(False):  # as a view that torch creates outside of it
            made = QuantizedTensor(rowwise, columnwise, self.plan, self.dtype, shape=shape)
        made._slot, made._lacks_slot = self._slot, self._lacks_slot
        made._shares_scales = self._shares_scales if shares_scales is None else shares_scales
        return made

    def tensors(self) -> list[torch.Tensor]:
        """Return the plain tensors of its operands, for a collective or a count of bytes."""
        parts = (getattr(self, name) for name in PARTS)
        return [part for part in parts if part is not None]

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch's is read-only too, but for its stub
        """The bytes of its operands, scales included."""
        return sum(part.nbytes for part in self.tensors())

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor in ``dtype``, the nominal one if None."""
        dtype = dtype or self.dtype
        if not (torch.is_grad_enabled() and self.requires_grad):
            return _decode(self, dtype)
        if dtype == self.dtype:
            return self * 1  # differentiable, and exact
        return torch.ops.aten._to_copy.default(self, dtype=dtype)  # type: ignore[no-any-return]

    @staticmethod
    def check_sizes(shape: Sequence[int], plan: TensorPlan) -> None:
        """Raise unless blocks of ``plan`` divide a tensor of ``shape``.

        Raises:
            OperandError: it has no dimension.
            UnsupportedError: they do not.
        """
        if not shape:
            raise OperandError("a QuantizedTensor has at least one dimension.")
        check(storage_plan(plan), math.prod(shape[:-1]), shape[-1])

    def pinned(self) -> QuantizedTensor:
        """Return a copy in pinned memory of the CPU."""
        parts = [getattr(self, name) for name in PARTS]
        copies = [None if part is None else part.pin_memory() for part in parts]
        return self.rebuilt(*split(copies), self.shape, shares_scales=False)

    def bound_to(self, slot: Slot | None) -> QuantizedTensor:
        """Return this tensor, to which values are written by the delayed scale of ``slot``; None:
        by a scale from their amax."""
        self._slot, self._lacks_slot = slot, False
        return self

    def write(
        self,
        value: torch.Tensor,
        *,
        slot: Slot | None = None,
        reduce_amax: ReduceAmax | None = None,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize the plain ``value`` into this tensor, with ``slot`` and ``reduce_amax`` as in
        :meth:`of` and ``noop_flag`` as in :meth:`quantize_`; return this tensor."""
        before = [] if noop_flag is None else [part.clone() for part in self.tensors()]
        with torch.no_grad():
            _write(self, value, slot=slot, reduce_amax=reduce_amax)
            self._keep_where(noop_flag, before)
        torch.autograd.graph.increment_version(self)
        return self

    def _keep_where(self, flag: torch.Tensor | None, before: Sequence[torch.Tensor]) -> None:
        """Undo a write where ``flag`` is not 0, without waiting to read it."""
        if flag is not None:
            for part, old in zip(self.tensors(), before, strict=True):
                part.copy_(torch.where(flag.reshape(-1)[:1] != 0, old, part))

    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize ``tensor`` into this one, which keeps its format, and return this one.

        Nothing is written where ``noop_flag``, one number on the device, is not 0; the host does
        not wait to read it.
        """
        before = [] if noop_flag is None else [part.clone() for part in self.tensors()]
        with torch.no_grad():
            self.copy_(tensor)
            self._keep_where(noop_flag, before)
        return self

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Hold the orientations that are True, and drop those that are False; None changes nothing.

        An orientation is created where it holds the same codes as the other: with one scale for the
        tensor, and with square blocks.

        Raises:
            OperandError: neither would be held, or one would have to be quantized from values that
                are rounded already.
        """
        row, column = self.plan
        wanted = (
            row is not None if rowwise_usage is None else rowwise_usage,
            column is not None if columnwise_usage is None else columnwise_usage,
        )
        if wanted == (False, False):
            raise OperandError(f"update_usage of {self}: one orientation has to be held.")
        rowwise, columnwise = self.operands
        if wanted[0] and rowwise is None:
            rowwise, row = _turned(self, columnwise, column, "rowwise")
        if wanted[1] and columnwise is None:
            columnwise, column = _turned(self, rowwise, row, "columnwise")
        plan = TensorPlan(row if wanted[0] else None, column if wanted[1] else None)
        chosen = Orientations(rowwise if wanted[0] else None, columnwise if wanted[1] else None)
        nothing = (None,) * len(Operand._fields)
        one, other = kept(chosen, plan)
        for name, part in zip(PARTS, (*(one or nothing), *(other or nothing)), strict=True):
            setattr(self, name, part)
        self.plan = plan

    def get_usages(self) -> dict[str, bool]:
        """Return which orientations are held, as ``{"rowwise": True, "columnwise": False}``."""
        return {
            "rowwise": self.plan.rowwise is not None,
            "columnwise": self.plan.columnwise is not None,
        }

    def reshape(self, *shape: Any) -> torch.Tensor:
        """Return the tensor as ``[shape]``: a view where blocks allow it, else a plain copy of the
        values, which is logged once."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        try:
            return self.view(*sizes)
        except UnsupportedError:
            say_dequantized(_aten.view.default, self)
            return self.dequantize().reshape(*sizes)

    def reshape_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the shape of ``other``, as :meth:`reshape` does."""
        return self.reshape(other.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor:
        """Return the tensor with some dimensions as one, as :meth:`reshape` does."""
        first, last = start_dim % self.dim(), end_dim % self.dim()
        if first > last:
            raise OperandError(f"flatten({start_dim}, {end_dim}) of {self}: no such dimensions.")
        count = math.prod(self.shape[first : last + 1])
        return self.reshape(*self.shape[:first], count, *self.shape[last + 1 :])

    def ravel(self) -> torch.Tensor:
        """Return the tensor in one dimension, as :meth:`reshape` does."""
        return self.reshape(self.numel())

    def contiguous(self, memory_format: torch.memory_format | None = None) -> torch.Tensor:
        """Return the tensor itself: the strides of operands are the backend's."""
        return self

    def share_memory_(self) -> QuantizedTensor:
        """Move the operands to shared memory, as torch does a tensor's storage."""
        for part in self.tensors():
            part.share_memory_()  # type: ignore[no-untyped-call]  # torch's
        return self

    def data_ptr(self) -> int:
        """Return 0: it has no memory of its own. That of its :meth:`tensors` has addresses."""
        return 0

    def is_shared(self) -> bool:
        """Say whether all operands are in shared memory."""
        return all(part.is_shared() for part in self.tensors())  # type: ignore[no-untyped-call]  # torch's

    def pin_memory(self, device: Any = None) -> QuantizedTensor:
        """Return this tensor if its operands are in pinned memory, else a copy that is."""
        return self if self.is_pinned() else self.pinned()

    def is_pinned(self, device: Any = None) -> bool:
        """Say whether all operands are in pinned memory."""
        return all(part.is_pinned() for part in self.tensors())

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

    def with_dtype(self, dtype: torch.dtype) -> QuantizedTensor:
        """Return the same operands under another nominal dtype."""
        renamed = QuantizedTensor(*_stored(self), self.plan, dtype, shape=self.shape)
        renamed._slot, renamed._lacks_slot = self._slot, self._lacks_slot
        renamed._shares_scales = self._shares_scales
        renamed._is_of_parameter = _is_of_parameter(self)
        renamed._initial_value = self._initial_value
        renamed._keeps_initial_value = self._keeps_initial_value
        return renamed

    def initialize(self, value: torch.Tensor) -> None:
        """Write ``value``, and keep a copy on the CPU if quantized_model_init asked for that."""
        self.copy_(value)
        if self._keeps_initial_value:
            self._initial_value = value.detach().to("cpu", copy=True)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """Return the initial value in high precision, on the CPU; None if not kept, or cleared."""
        return self._initial_value

    def clear_high_precision_init_val(self) -> None:
        """Forget the value that :meth:`get_high_precision_init_val` returns."""
        self._initial_value = None

    @property
    def data(self) -> torch.Tensor:  # torch declares an attribute
        """The tensor without its autograd history, as in torch; shares the operands."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # torch would exchange the outer tensors and not the operands
        if value.shape != self.shape:
            raise OperandError(f"data of {self} cannot become one of {list(value.shape)}.")
        with torch.no_grad():
            self.copy_(value.detach())

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in PARTS if getattr(self, name) is not None]
        refusals = (self._shares_scales, self._slot is not None or self._lacks_slot)
        return names, (self.plan, self.dtype, *(refusals if any(refusals) else ()))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        rowwise, columnwise = split([inner.get(name) for name in PARTS])
        plan, dtype, *refusals = context
        made = QuantizedTensor(rowwise, columnwise, plan, dtype, shape=outer_size)
        made._shares_scales, made._lacks_slot = refusals or (False, False)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        specs = [None if spec is None else dataclasses.asdict(spec) for spec in self.plan]
        is_parameter = getattr(self, IS_PARAMETER, False)
        parts = [getattr(self, name) for name in PARTS]
        stored = (parts, specs, self.dtype, is_parameter, self.requires_grad)
        if self._shares_scales:
            return _rebuild_part, ((*stored, list(self.shape)),)
        return _rebuild, stored if self.dim() == 2 else (*stored, list(self.shape))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        nominal = str(self.dtype).removeprefix("torch.")
        row, column = self.plan
        held = f"{row}" if row is not None else f"columnwise {column}"
        return f"QuantizedTensor({list(self.shape)}, {held}, {nominal}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares less
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func.overloadpacket) or decomposed(func) or _on_values
        return handler(func, args, kwargs or {})


def _rebuild(
    parts: Sequence[torch.Tensor | None],
    specs: Sequence[dict[str, Any] | None],
    dtype: torch.dtype,
    is_parameter: bool,
    requires_grad: bool,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the tensor that ``torch.save`` stored as plain tensors and plain values.

    Raises:
        OperandError: they are not those of a saved QuantizedTensor.
    """
    plan = plan_from(specs)
    check_stored(parts, plan, dtype)
    is_shape = shape is None or (
        isinstance(shape, list) and shape and all(type(size) is int and size >= 0 for size in shape)
    )
    if not is_shape:
        raise OperandError(f"a stored QuantizedTensor has the shape {reprlib.repr(shape)}.")
    tensor = QuantizedTensor(*split(parts), plan, dtype, shape=shape)
    check(plan, *matrix_size(parts, plan))
    if is_parameter is True:
        return torch.nn.Parameter(tensor, requires_grad is True)
    return tensor.requires_grad_(requires_grad is True)


def _rebuild_part(stored: Sequence[Any]) -> torch.Tensor:
    """Return a view whose scale covers more than itself: it is saved with the memory of its base,
    as torch's views are, and stays one for reading. ``stored`` are the arguments of
    :func:`_rebuild`.

    Raises:
        OperandError: as :func:`_rebuild`.
    """
    if not isinstance(stored, tuple) or len(stored) != 6:
        raise OperandError(f"a stored view of a QuantizedTensor is {reprlib.repr(stored)}.")
    tensor = _rebuild(*stored)
    assert isinstance(tensor, QuantizedTensor)
    tensor._shares_scales = True
    return tensor


torch.serialization.add_safe_globals([_rebuild, _rebuild_part])


def _stored(tensor: QuantizedTensor) -> Held:
    return split([getattr(tensor, name) for name in PARTS])


def _turned(
    tensor: QuantizedTensor, operand: Operand | None, spec: OperandSpec | None, way: str
) -> tuple[Operand, OperandSpec]:
    """Return the orientation ``way`` from the other one, which has the same codes."""
    if operand is None or spec is None or spec.block[0] != spec.block[1] or per_byte(spec) != 1:
        raise OperandError(
            f"update_usage of {tensor}: its {way} codes are another rounding of the value that was "
            f"written. Quantize that value again by a quantizer with {way} usage."
        )
    return turn(operand), spec


def _decode(tensor: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    rowwise, columnwise = _stored(tensor)
    row, column = tensor.plan
    dtype = dtype or tensor.dtype
    if rowwise is not None and row is not None:
        values = decode_operand(rowwise, row, dtype)
    else:
        assert columnwise is not None
        assert column is not None
        values = decode_operand(columnwise, column, dtype).t().contiguous()
    return values if tensor.dim() == 2 else values.reshape(tensor.shape)


def _write(
    tensor: QuantizedTensor,
    value: torch.Tensor,
    *,
    slot: Slot | None = None,
    reduce_amax: ReduceAmax | None = None,
) -> None:
    """Quantize ``value``, without a cast to the nominal dtype, into the operands of ``tensor``."""
    _refuse_part(tensor)
    if value.shape != tensor.shape:
        value = value.expand(tensor.shape)
    value = value.detach().to(tensor.device)
    if value.dtype not in FLOATS:
        value = value.to(torch.float32 if value.is_floating_point() else tensor.dtype)
    if value.dim() != 2:
        value = value.reshape(math.prod(value.shape[:-1]), value.shape[-1])
    slot = tensor._slot if slot is None else slot
    if slot is None and tensor._lacks_slot:
        raise UnsupportedError(
            f"a write in a graph to {tensor}, whose scale a Float8Quantizer holds: the graph has "
            f"the operands alone. Write outside of torch.compile."
        )
    _assign(tensor, make_operands(value, tensor.plan, slot=slot, reduce_amax=reduce_amax))


def _refuse_part(tensor: QuantizedTensor) -> None:
    if tensor._shares_scales:
        raise UnsupportedError(
            f"a write to a view of a QuantizedTensor, {tensor}, whose scale covers more than the "
            f"view: it would change the rest. Write to the whole: value = p.dequantize(), change "
            f"value, then p.copy_(value)."
        )


def _is_of_parameter(tensor: QuantizedTensor) -> bool:
    """Say whether ``tensor`` is a parameter, or one without its history."""
    return tensor._is_of_parameter or getattr(tensor, IS_PARAMETER, False)


def _refuse_arithmetic(func: Any, target: QuantizedTensor) -> None:
    """Refuse to compute in place, but on parameters, whose optimizers do so and are warned."""
    if func.overloadpacket in _RESHAPES:
        raise UnsupportedError(
            f"{func} changes the shape of {target} in place; that is not offered. Its other names, "
            f"such as transpose(), return a view of the values."
        )
    if func.overloadpacket in _SETTERS or _is_of_parameter(target):
        return
    raise UnsupportedError(
        f"{func.overloadpacket} computes in place on {target}, and would round what it holds once "
        f"more: a change of less than half a unit would be lost without a trace. Compute with "
        f"x = q.dequantize(torch.float32), which keeps its precision, then q.copy_(x)."
    )


def _assign(tensor: QuantizedTensor, operands: Orientations) -> None:
    for target, source in zip(_stored(tensor), operands, strict=True):
        for part, new in zip(target or (), source or (), strict=False):
            if part is not None:
                part.copy_(new)
                # Backward may have saved it, and torch counts no write within __torch_dispatch__.
                if not part.is_inference():
                    torch.autograd.graph.increment_version(part)


def _like(tensor: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    """Return zeros stored as ``tensor`` is, on ``device``, in the layout of the backend there."""
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    like = QuantizedTensor.of(zeros, tensor.plan)
    like._keeps_initial_value = tensor._keeps_initial_value
    return like


# --- operations ---


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the values; a value that it writes is quantized again."""
    targets = []
    for target in written(func, args, kwargs):
        if isinstance(target, QuantizedTensor):
            targets.append(target)
        elif isinstance(target, (list, tuple)) and any(
            isinstance(item, QuantizedTensor) for item in target
        ):
            raise UnsupportedError(
                f"{func} updates several parameters at once, and cannot write to "
                f"{next(t for t in target if isinstance(t, QuantizedTensor))}: an optimizer "
                f"with foreach=True or fused=True.\n  {_MASTERS}"
            )
    if func.namespace == "c10d":  # in place, or into lists
        raise UnsupportedError(
            f"{func} of a QuantizedTensor: pass each of its .tensors(), or .dequantize()."
        )
    if func.namespace == COLLECTIVES:
        made = collected(func, args)
        if made is not None:
            return made
    for target in targets:
        _refuse_part(target)
        _refuse_arithmetic(func, target)
    values: dict[int, torch.Tensor] = {}

    def value_of(tensor: QuantizedTensor) -> torch.Tensor:
        return values.setdefault(id(tensor), _decode(tensor))

    plain_args, plain_kwargs = pytree.tree_map_only(QuantizedTensor, value_of, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    owners = {id(values[id(target)]): target for target in targets}
    for target in targets:
        value = values[id(target)]
        if value.shape != target.shape:
            raise UnsupportedError(f"{func} changes the shape of {target}; that is not offered.")
        if func.overloadpacket in _UPDATES:
            log_once(
                f"an optimizer updates parameters stored as {target.plan.rowwise} in place: a "
                f"step smaller than half a unit of that format is lost. {_MASTERS}"
            )
        _write(target, value)
    out = pytree.tree_map_only(torch.Tensor, lambda value: owners.get(id(value), value), out)
    if targets:
        return out
    viewed = as_view(func, out)
    if viewed is out and not _is_dequantize(func, args):
        say_dequantized(func, _first(args, kwargs))
    return viewed


def _is_dequantize(func: Any, args: tuple[Any, ...]) -> bool:
    """Say whether this is a product with 1, which is how ``dequantize`` is differentiable."""
    return func is _aten.mul.Tensor and type(args[1]) is int and args[1] == 1


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    leaves = pytree.tree_leaves((args, kwargs))
    return next(one for one in leaves if isinstance(one, QuantizedTensor))


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of :data:`COPIES` on the operands, or on the values."""
    first = args[0] if isinstance(args[0], QuantizedTensor) else None
    if first is None and isinstance(args[0], (list, tuple)):
        first = args[0][0]
    made = None
    if isinstance(first, QuantizedTensor):
        made = COPIES[func.overloadpacket](func, args, kwargs)
    return _on_values(func, args, kwargs) if made is None else made


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    if not isinstance(target, QuantizedTensor):
        return func(target, _decode(source), *args[2:], **kwargs)
    if not isinstance(source, QuantizedTensor):
        _write(target, source)
    elif source.plan == target.plan and source.shape == target.shape:
        _refuse_part(target)
        _assign(target, source.operands)
    else:
        _write(target, _decode(source, torch.float32))
    return target


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    with torch.inference_mode(False):  # as a view that torch creates outside of it
        return args[0].with_dtype(args[0].dtype)  # type: ignore[no-any-return]


def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor itself for its own strides, as FSDP asks for them; else its values."""
    tensor, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    asked = (tuple(size), tuple(stride), offset or 0)
    if asked == (tuple(tensor.shape), tensor.stride(), 0):
        return _detach(func, args, kwargs)
    return _on_values(func, args, kwargs)


def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    tensor = args[0]
    parts = [getattr(tensor, name) for name in PARTS]
    copies = [None if part is None else part.clone() for part in parts]
    clone = QuantizedTensor(*split(copies), tensor.plan, tensor.dtype, shape=tensor.shape)
    clone._slot, clone._lacks_slot = tensor._slot, tensor._lacks_slot
    return clone


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    device = kwargs.get("device") or tensor.device
    if dtype != tensor.dtype:
        return _decode(tensor, dtype).to(device)
    if device == tensor.device:
        return _clone(func, args, {})
    moved = _like(tensor, device)
    _assign(moved, tensor.operands)
    moved._initial_value = tensor._initial_value
    return moved


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, device = args[0], kwargs.get("device")
    is_deferred = func.overloadpacket is _aten.empty_like and tensor.is_meta
    if is_deferred and device is not None and device.type != "meta":  # Module.to_empty
        return _like(tensor, device)
    if func.overloadpacket is _aten.new_zeros and _is_of_parameter(tensor):
        log_once(
            f"zeros like the parameter {tensor} are a plain tensor. If fully_shard makes its "
            f"shards of them, the parameter becomes its dequantized value: call "
            f"fp8core.distributed.gather_quantized(model, recipe) before fully_shard, which keeps "
            f"initial values and gathers codes.",
            about="new_zeros of a quantized parameter",
        )
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return func(plain, *args[1:], **kwargs)  # type: ignore[no-any-return]


def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for part in args[0].tensors():
        func(part, *args[1:], **kwargs)


def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, amounts = args[0], list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    is_plain = len(amounts) == 4 and not amounts[0] and not amounts[2] and min(amounts) >= 0
    rowwise, columnwise = _stored(tensor)
    plan = tensor.plan
    if value != 0 or not is_plain or tensor.dim() != 2 or rowwise is None:
        return _on_values(func, args, kwargs)  # type: ignore[no-any-return]
    _, columns, _, rows = amounts
    return QuantizedTensor(
        pad_operand(rowwise, plan.rowwise, rows, columns),
        None if columnwise is None else pad_operand(columnwise, plan.columnwise, columns, rows),
        plan,
        tensor.dtype,
    )


_aten = torch.ops.aten
# They write a value that does not depend on the present one.
_SETTERS = {
    *(_aten.zero_, _aten.fill_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_),
    *(_aten.exponential_, _aten.cauchy_, _aten.geometric_, _aten.log_normal_),
}
# Refused for the shape that they change.
_RESHAPES = {
    *(_aten.t_, _aten.transpose_, _aten.squeeze_, _aten.unsqueeze_, _aten.as_strided_),
    *(_aten.resize_, _aten.resize_as_, _aten.set_),
}
_UPDATES = {_aten.add_, _aten.sub_, _aten.mul_, _aten.addcdiv_, _aten.addcmul_, _aten.lerp_}
_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.copy_: _copy,
    _aten.detach: _detach,
    _aten.clone: _clone,
    _aten._to_copy: _to_copy,
    _aten.constant_pad_nd: _pad,
    _aten.alias: _detach,
    _aten.record_stream: _record_stream,
    _aten.as_strided: _as_strided,
    **VIEWS,
    **dict.fromkeys(COPIES, _copied),
}
for _name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"):
    _HANDLERS[getattr(_aten, _name)] = _new
for _name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
    _HANDLERS[getattr(_aten, _name)] = _new
