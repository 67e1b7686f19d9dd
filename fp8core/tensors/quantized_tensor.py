"""``QuantizedTensor``: a tensor stored in low precision that acts as a tensor of bfloat16.

The tensor holds the operands that a layer's GEMMs read, as plain tensors, and nothing else. torch's
operators treat it in three ways:

* moving, copying, saving and padding act on the operands, bit for bit, and so do views and copies
  of whole blocks;
* other operators compute with the values, decoded to the nominal dtype, and return plain tensors;
* a value that is written to it is quantized. A view that is no part of whole blocks, such as a
  transpose, is for reading: writing to it is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import OperandError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors import operators
from fp8core.tensors.checks import (
    check_stored,
    fit_codes,
    matrix_size,
    plan_from,
    shown,
    slot_from,
    value_from,
)
from fp8core.tensors.layouts import arguments_of, is_hybrid
from fp8core.tensors.operand_tensor import OperandTensor
from fp8core.tensors.operators import write
from fp8core.tensors.quantizer import Orientations, Slot, TensorQuantizer, each_way
from fp8core.tensors.storage import (
    BY_VALUE,
    FLOATS,
    PARTS,
    Casting,
    check,
    check_parameter,
    counted,
    is_square,
    make_operands,
    matrix_shape,
    split,
    storage_plan,
    stored_operands,
    turn,
)
from fp8core.tensors.user_storage import QuantizedTensorStorage, is_users, operands_of
from fp8core.torch_ops.private import (
    IS_PARAMETER,
)

_INNER = (*PARTS, "_value")
"""The names of the plain tensors within a tensor."""

_FLAT = "_flat"
"""Under which a tensor keeps what torch asks it twice in each call of a graph."""


class QuantizedTensor(OperandTensor, QuantizedTensorStorage):
    """A tensor ``[..., k]`` stored as the operands of a GEMM; its dtype is nominal.

    Its rows are stored as a matrix ``[n, k]``, whatever the leading dimensions are.
    ``_rowwise_data``, ``_rowwise_scale_inv``, ``_rowwise_global_scale_inv`` and the same for
    ``_columnwise_`` are the plain tensors of an :class:`fp8core.backend_api.Operand`, None for
    those that the format lacks, and for an orientation that is not held, whose spec in ``plan`` is
    None. The columnwise ones are None too where they are views of the rowwise ones: a square block
    holds the same values in both orientations. The values are those of the rowwise operand, if it
    is held; in formats with blocks along k alone the columnwise operand is another rounding of the
    written value.

    ``dtype`` is float32, bfloat16 or float16: the dtype of ``dequantize``, of other operators'
    arithmetic, and of the gradient, which is a plain tensor. A gradient passes ``dequantize``
    unchanged. ``to(dtype)`` is ``dequantize(dtype)``; a move to a device stays quantized.
    The quantizers (``fp8core.MXFP8Quantizer`` and others), :class:`fp8core.quantized_model_init`,
    :meth:`quantize` and :meth:`from_codes` create one.

    A view of whole blocks (``view``, ``narrow``, ``select``, ``split``, ``chunk``) shares the
    operands, and a write to it reaches its base, unless both have a scale in common, where it is
    refused. Views that cut blocks raise UnsupportedError; copies of parts (``cat``,
    ``index_select``, ``reshape``) are plain tensors then.
    """

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
        cls, value: torch.Tensor, plan: TensorPlan, casting: Casting = BY_VALUE
    ) -> QuantizedTensor:
        """Return ``value [..., k]`` stored by ``plan``, without its history.

        An orientation that is None in ``plan`` is not held. Later writes go by ``casting`` too, but
        for its reduction of amaxes.

        Raises:
            OperandError: ``value`` has another dtype than float32, bfloat16 and float16; or
                ``plan`` holds neither orientation.
            UnsupportedError: blocks do not divide the sizes, or no backend quantizes like that.
        """
        if value.dtype not in FLOATS:
            raise OperandError(
                f"QuantizedTensor of {list(value.shape)} {value.dtype}: expected float32, bfloat16 "
                f"or float16."
            )
        plan = storage_plan(plan)
        if plan == (None, None):
            raise OperandError(
                "a QuantizedTensor of neither orientation: a quantizer needs rowwise or columnwise "
                "usage, as by set_usage(rowwise=True)."
            )
        rows, columns = matrix_shape(value.shape)
        check(plan, rows, columns)
        matrix = value.detach().reshape(rows, columns)
        operands = make_operands(matrix, plan, casting)
        tensor = cls(*stored_operands(operands, plan), plan, value.dtype, shape=value.shape)
        tensor._casting = casting._replace(reduce_amax=None, keeps_value=False)
        if casting.keeps_value:
            source = value.detach() if casting.columns_of is None else tensor.decoded()
            source = source.to(casting.value_dtype or source.dtype)
            tensor._value = source.clone(memory_format=torch.contiguous_format)
        return tensor

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

        The rowwise operand is stored, and the columnwise operand where it has the same codes.

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
        arguments = (recipe, global_scale_inv, tensor, dtype)
        operand, plan, shape = fit_codes(codes, scale_inv, *arguments)
        return cls(operand, None, plan, dtype, shape=shape)

    @staticmethod
    def check_sizes(shape: Sequence[int], plan: TensorPlan) -> None:
        """Raise unless blocks of ``plan`` divide a tensor of ``shape``.

        Raises:
            UnsupportedError: they do not.
        """
        check(storage_plan(plan), *matrix_shape(shape))

    def write(
        self,
        value: torch.Tensor,
        casting: Casting,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize the plain ``value`` into this tensor by ``casting``, for this write, and with
        ``noop_flag`` as in :meth:`quantize_`; return this tensor."""
        with torch.no_grad(), self._undone_where(noop_flag, casting.slot or self._casting.slot):
            write(self, value, casting)
        torch.autograd.graph.increment_version(self)
        return self

    @contextlib.contextmanager
    def _undone_where(self, flag: torch.Tensor | None, slot: Slot | None) -> Iterator[None]:
        """Undo a write, and what it records in ``slot``, where ``flag`` is not 0, without waiting
        to read it.

        Raises:
            OperandError: ``flag`` is something else than one number on the device.
        """
        if flag is None:
            yield
            return
        if not isinstance(flag, torch.Tensor) or (flag.numel(), flag.device) != (1, self.device):
            raise OperandError(f"noop_flag is {flag!r}; expected one number on {self.device}.")
        written = [*self.tensors(), *([] if slot is None or slot.amax is None else [slot.amax])]
        before = [part.clone() for part in written]
        yield
        for part, old in zip(written, before, strict=True):
            part.copy_(torch.where(flag.reshape(1) != 0, old, part))

    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize ``tensor`` into this one, which keeps its format, and return this one.

        Nothing is written, and no amax recorded, where ``noop_flag``, one number on the device, is
        not 0; the host does not wait to read it.
        """
        with torch.no_grad(), self._undone_where(noop_flag, self._casting.slot):
            self.copy_(tensor)
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
        if self._value is not None:
            high, low = rowwise_usage, columnwise_usage
            high, low = (high, low) if row is None else (low, high)
            if low is False:
                raise OperandError(
                    f"update_usage of {self}: what is left would be its value alone."
                )
            self._value = None if high is False else self._value
            return
        usages = (
            row is not None if rowwise_usage is None else rowwise_usage,
            column is not None if columnwise_usage is None else columnwise_usage,
        )
        if usages == (False, False):
            raise OperandError(f"update_usage of {self}: one orientation has to be held.")
        rowwise, columnwise = self.operands
        if usages[0] and rowwise is None:
            rowwise, row = _turned(self, columnwise, column, "rowwise")
        if usages[1] and columnwise is None:
            columnwise, column = _turned(self, rowwise, row, "columnwise")
        plan = TensorPlan(row if usages[0] else None, column if usages[1] else None)
        chosen = Orientations(rowwise if usages[0] else None, columnwise if usages[1] else None)
        nothing = (None,) * len(Operand._fields)
        first, second = stored_operands(chosen, plan)
        for name, part in zip(PARTS, (*(first or nothing), *(second or nothing)), strict=True):
            setattr(self, name, part)
        self.plan, self._padded = plan, None

    @property
    def rowwise_sub_storage(self) -> Any:
        """The tensor of the rowwise operand alone, in the same memory, plain where that is the
        value in high precision; None if it is not held."""
        return self._part(TensorPlan(self.plan.rowwise, None))

    @property
    def columnwise_sub_storage(self) -> Any:
        """As :attr:`rowwise_sub_storage`, of the columnwise operand."""
        return self._part(TensorPlan(None, self.plan.columnwise))

    def _part(self, plan: TensorPlan) -> torch.Tensor | None:
        if plan == (None, None):
            return self._value
        operands = self.orientations(plan.rowwise is not None, plan.columnwise is not None)
        part = type(self)(*operands, plan, self.dtype, shape=self.shape)
        part._shares_scales = self._shares_scales
        part._written_as(self)._value = None
        return part

    @property
    def _quantizer(self) -> Any:
        """A quantizer that makes tensors stored like this one, in its orientations, by its delayed
        scale if it has one.

        Raises:
            OperandError: its delayed scale is elsewhere.
        """
        if self._lacks_slot:
            raise OperandError(
                f"{self} has its delayed scale outside of the graph, or in its parts."
            )
        dtype = None if self._value is None else self._value.dtype
        casting = self._casting._replace(keeps_value=dtype is not None)
        # Another dtype is that of an IdentityQuantizer.
        casting = casting._replace(value_dtype=None if dtype == self.dtype else dtype)
        return _quantizers[0](self.plan, casting)

    def get_metadata(self) -> dict[str, Any]:
        """Return the keyword arguments by which its class of Transformer Engine's,
        :class:`fp8core.Float8Tensor` and others, makes the tensor again, in that one's layout.

        What has the same layout here is not copied. An orientation that is a view of the other is
        None; the amax of two levels is one that gives their scale.

        Raises:
            UnsupportedError: no such class stores it.
        """
        if is_hybrid(self.plan) or self._value is not None:
            row, column = self.rowwise_sub_storage, self.columnwise_sub_storage
            parts = {"rowwise_storage": row, "columnwise_storage": column}
            return {**parts, "quantizer": self._quantizer}
        return arguments_of(self, self._quantizer)

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensor,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Return another tensor of the memory of ``tensor``, without its history: of ``shape``,
        whose last dimension is the same, and with the nominal ``dtype``; None: its own.

        Raises:
            OperandError: it is no QuantizedTensor, or has other rows.
        """
        if not isinstance(tensor, QuantizedTensor):
            raise OperandError(f"make_like of {type(tensor).__name__}: expected a QuantizedTensor.")
        sizes = tuple(tensor.shape) if shape is None else counted("make_like", shape)
        if matrix_shape(sizes) != matrix_shape(tensor.shape):
            raise OperandError(
                f"make_like({tensor}, shape={list(sizes)}): leading dimensions are rows, and the "
                f"last one stays as it is."
            )
        like: Any = tensor.detach()
        if tensor._value is not None:
            like = like.rebuilt(*like.stored, sizes)
        like = like if sizes == like.shape else like.view(sizes)
        assert isinstance(like, QuantizedTensor)
        renamed = like if dtype in (None, tensor.dtype) else like.with_dtype(dtype)
        renamed.requires_grad_(requires_grad)
        return renamed

    def to_dtype(self, dtype: torch.dtype) -> QuantizedTensor:
        """Return another tensor of the same memory with the nominal ``dtype``."""
        return self.make_like(self, dtype=dtype)

    def turned_to_rows(self) -> QuantizedTensor:
        """Return this tensor, which holds columns alone, with its rows in the same memory, if they
        have the same codes; else itself."""
        spec, columnwise = self.plan.columnwise, self.stored[1]
        if self.plan.rowwise is not None or spec is None or not is_square(spec):
            return self
        assert columnwise is not None
        plan = TensorPlan(spec, spec)
        return QuantizedTensor(turn(columnwise), None, plan, self.dtype, shape=self.shape)

    def get_usages(self) -> dict[str, bool]:
        """Return which orientations are held, as ``{"rowwise": True, "columnwise": False}``."""
        row, column = (spec is not None or self._value is not None for spec in self.plan)
        return {"rowwise": row, "columnwise": column}

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
        stored = vars(self)
        flat: tuple[list[str], tuple[Any, ...]] | None = stored.get(_FLAT)
        if flat is None:  # asked once: another thread may set an attribute meanwhile
            casting = self._casting
            names = [name for name in _INNER if stored[name] is not None]
            state = self._shares_scales, casting.slot is not None or self._lacks_slot
            flat = stored[_FLAT] = names, (self.plan, self.dtype, *state, casting.columns_of)
        return flat

    def __setattr__(self, name: str, value: object) -> None:
        vars(self).pop(_FLAT, None)
        super().__setattr__(name, value)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        rowwise, columnwise = split([inner.get(name) for name in PARTS])
        plan, dtype, *state = context
        tensor = QuantizedTensor(
            rowwise, columnwise, plan, dtype, shape=outer_size, strides=outer_stride
        )
        tensor._shares_scales, tensor._lacks_slot, columns_of = state
        tensor._casting, tensor._value = Casting(columns_of=columns_of), inner.get("_value")
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._reduced(self._packed())

    def __copy__(self) -> torch.Tensor:
        """Return another tensor of the same operands, as copies of torch's tensors share memory."""
        rebuild, arguments = self._reduced(self.parts)
        copied: torch.Tensor = rebuild(*arguments)
        return copied

    def _reduced(self, parts: list[torch.Tensor | None]) -> tuple[Any, tuple[Any, ...]]:
        """Return the function and the arguments that make a tensor like this one of ``parts``."""
        planned = (*self.plan, *filter(None, [self._casting.columns_of]))
        specs = [None if spec is None else dataclasses.asdict(spec) for spec in planned]
        is_parameter = getattr(self, IS_PARAMETER, False)
        value = [] if self._value is None else [self._value]
        slot = (None, None) if self._lacks_slot else self._casting.slot or ()
        parts = [*parts, *slot, *value]
        stored = (parts, specs, self.dtype, is_parameter, self.requires_grad)
        if self._shares_scales:
            return _rebuild_part, ((*stored, list(self.shape)),)
        return _rebuild, stored if self.dim() == 2 else (*stored, list(self.shape))

    def _packed(self) -> list[torch.Tensor | None]:
        """Return its parts without the zeros behind them, with which torch would save them."""
        if self._padded is None:
            return self.parts
        pairs = zip(self.parts, self._padded.parts, strict=True)
        return [
            part
            if part is None or part is whole
            else part.clone(memory_format=torch.contiguous_format)
            for part, whole in pairs
        ]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        nominal = str(self.dtype).removeprefix("torch.")
        row, column = self.plan
        stored = f"{row}" if row is not None else f"columnwise {column}"
        stored += "" if self._value is None else " beside its value"
        return f"QuantizedTensor({list(self.shape)}, {stored}, {nominal}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares less
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return operators.run(func, args, kwargs or {})


def _shared(tensor: QuantizedTensor) -> tuple[Any, tuple[Any, ...]]:
    return tensor._reduced(tensor.parts)


# Another process gets the memory itself, as of torch's tensors: copies would be freed here first.
ForkingPickler.register(QuantizedTensor, _shared)


def _rebuild(
    parts: Sequence[torch.Tensor | None],
    specs: Sequence[dict[str, Any] | None],
    dtype: torch.dtype,
    is_parameter: bool,
    requires_grad: bool,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the tensor that ``torch.save`` stored as plain tensors and plain values.

    Behind the ``parts`` are the delayed scale and its amax, by which values are written, both None
    where they are elsewhere, and the value in high precision, if it has them. A third of the
    ``specs`` is that of the rows whose values the columns are of.

    Raises:
        OperandError: they are not those of a saved QuantizedTensor.
    """
    has_source = isinstance(specs, list) and len(specs) == 3
    plan = plan_from(specs[:2] if has_source else specs)
    rest: list[Any] = []
    if isinstance(parts, list):
        parts, rest = parts[: len(PARTS)], parts[len(PARTS) :]
    check_stored(parts, plan, dtype)
    is_shape = shape is None or (
        isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    )
    if not is_shape:
        raise OperandError(f"a stored QuantizedTensor has the shape {shown(shape)}.")
    tensor = QuantizedTensor(*split(parts), plan, dtype, shape=shape)
    check(plan, *matrix_size(parts, plan))
    if has_source:
        tensor._casting = Casting(columns_of=plan_from([specs[2], None]).rowwise)
    if len(rest) % 2:
        tensor._value = value_from(rest.pop(), tensor)
    if len(rest) == 2 and rest[0] is None and rest[1] is None:
        tensor._lacks_slot = True
    elif rest:
        tensor.bound_to(slot_from(rest, tensor.device))
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
        raise OperandError(f"a stored view of a QuantizedTensor is {shown(stored)}.")
    tensor = _rebuild(*stored)
    assert isinstance(tensor, QuantizedTensor)
    tensor._shares_scales = True
    return tensor


def initial_value(tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the initial value that ``tensor`` keeps, on its device, or its value, in ``dtype``."""
    initial = tensor.get_high_precision_init_val()
    return tensor.dequantize(dtype) if initial is None else initial.to(tensor.device, dtype)


torch.serialization.add_safe_globals([_rebuild, _rebuild_part])


_quantizers: list[Callable[[TensorPlan, Casting], Any]] = []
"""Makes a quantizer of a plan and what casts go by: of the room above, which imports this one."""


def set_quantizers(make: Callable[[TensorPlan, Casting], Any]) -> None:
    """Have ``make`` return the quantizers that :class:`QuantizedTensor` gives for itself."""
    _quantizers[:] = [make]


def _turned(
    tensor: QuantizedTensor, operand: Operand | None, spec: OperandSpec | None, way: str
) -> tuple[Operand, OperandSpec]:
    """Return the orientation ``way`` from the other one, which has the same codes."""
    if operand is None or spec is None or not is_square(spec):
        raise OperandError(
            f"update_usage of {tensor}: its {way} codes are another rounding of the value that was "
            f"written. Quantize that value again by a quantizer with {way} usage."
        )
    return turn(operand), spec


_turns = threading.RLock()
"""Lets one thread cast at a time, as usages are set on the object, which layers may share, and so
may be the memory of what it makes. The code of an object may run layers that cast."""


def object_quantizer(
    maker: Any, plan: TensorPlan, role: str, *, is_split: bool = False
) -> TensorQuantizer:
    """Return the quantizer by ``maker``, an object with ``set_usage`` and a call that quantizes.

    ``plan`` is how it stores both orientations, (None, None) for a storage of the user's, whose
    operands are freed one by one if it ``is_split``; ``role`` is what messages call it. A cast
    raises OperandError if the object makes something else.
    """
    stored = storage_plan(plan)
    cast = partial(_cast_by, maker, stored, role, is_split)
    columns_of = getattr(maker, "columns_of", None)
    return TensorQuantizer(
        each_way(cast), plan=stored if any(stored) else None, columns_of=columns_of
    )


def _cast_by(
    maker: Any,
    plan: TensorPlan,
    role: str,
    is_split: bool,
    x: torch.Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    rng: torch.Tensor | None = None,
) -> Orientations:
    ways = {"rowwise": rowwise, "columnwise": columnwise}
    with _turns:
        with torch.no_grad():
            maker.set_usage(**ways)
            quantized = maker(x)
        if not any(plan) and is_users(quantized):
            return operands_of(quantized, x, **ways, is_split=is_split)
    if not any(plan):
        raise OperandError(
            f"{role} returned {type(quantized).__name__}, no QuantizedTensorStorage of its own."
        )
    if not isinstance(quantized, QuantizedTensor):
        raise OperandError(f"{role} returned {type(quantized).__name__}, no QuantizedTensor.")
    for (way, is_used), spec, planned in zip(ways.items(), quantized.plan, plan, strict=True):
        if is_used and spec != planned:
            raise OperandError(
                f"{role} is planned {way} as {planned}, and returned {spec}. What it "
                f"makes has to be stored as its plan, or its make_empty(), says."
            )
    if (quantized.shape, quantized.device) != (x.shape, x.device):
        raise OperandError(
            f"{role} made {list(quantized.shape)} on {quantized.device} of "
            f"{list(x.shape)} on {x.device}."
        )
    return quantized.orientations(rowwise, columnwise)
