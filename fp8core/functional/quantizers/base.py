"""The base of all quantizers: its verbs, in terms of a plan."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fp8core.backend_api import OperandSpec
from fp8core.backend_api.descriptors import operand_shapes
from fp8core.chain.differentiable import refuse_transform
from fp8core.chain.unwrap import as_readable, unwrap
from fp8core.dispatch import table
from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.calls.parameters import resolve_device
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.layouts import scale_sizes
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Slot
from fp8core.tensors.quantizer_binding import ReduceAmax
from fp8core.tensors.storage import (
    BY_VALUE,
    PARTS,
    Casting,
    counted,
    is_square,
    matrix_shape,
    storage_plan,
)
from fp8core.tensors.user_storage import QuantizedTensorStorage
from fp8core.torch_ops.capture import constant_in_graph, is_captured
from fp8core.torch_ops.expression import expression_of


class Quantizer:
    """Makes a :class:`fp8core.QuantizedTensor` of a tensor ``[..., k]``.

    ``q(x)`` quantizes, differentiably: the gradient passes unchanged. ``q.update_quantized(x,
    out)`` writes into a tensor that ``q`` made before; ``q.make_empty(shape)`` makes one to be
    written. ``q.set_usage(rowwise=, columnwise=)`` says which operands are made: the rowwise one is
    read along the last dimension, as by ``y = x w^T``, the columnwise one along the others, as by
    the gradient of a weight.

    A quantizer of one's own overrides :attr:`plan`, and :meth:`quantize_impl` where it computes
    what no plan describes; ``CustomRecipe(qfactory=...)`` takes it like those of the library. As in
    Transformer Engine it may override :meth:`quantize_impl` and :meth:`make_empty` instead.
    Quantizers are equal if they plan and use the same.
    """

    # Whether make_empty is running to tell the plan.
    _tells_plan = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False
        self._number = _register(self)

    @property
    def number(self) -> str:
        """The text that stands for this quantizer in graphs, which do not hold it."""
        return self._number

    @property
    def plan(self) -> TensorPlan:
        """How both orientations are quantized, whichever are used; where a class says it not, as
        what its ``make_empty`` returns for both usages. A class whose attribute ``custom`` is True
        makes storages of its own, which no plan describes: (None, None).

        Raises:
            NotImplementedError: a class overrides neither, or its ``make_empty`` calls this one's.
            OperandError: ``make_empty`` returns something else.
        """
        owner = type(self)
        if getattr(self, "custom", False):
            return TensorPlan(None, None)
        if owner.make_empty is Quantizer.make_empty or self._tells_plan:
            raise NotImplementedError(
                f"{owner.__name__} has no plan: override the property, or make_empty, without "
                f"Quantizer.make_empty, which makes what the plan says."
            )
        maker = self.copy()
        maker._tells_plan = True
        maker.set_usage(rowwise=True, columnwise=True)
        empty = maker.make_empty((128, 128))
        if not isinstance(empty, QuantizedTensorStorage):
            raise OperandError(
                f"{owner.__name__}.make_empty returned {type(empty).__name__}; expected a "
                f"QuantizedTensor or a QuantizedTensorStorage."
            )
        plan: TensorPlan = empty.plan
        return plan

    @property
    def cell(self) -> TensorPlan | None:
        """The plan, if it says all that this quantizer does, so that a layer can do without it.

        None for a quantizer with a state, with a reduction of its amax, with code of its own, or of
        storages of its own.
        """
        mine = (type(self).quantize, type(self).quantize_impl, type(self).__call__)
        theirs = (Quantizer.quantize, Quantizer.quantize_impl, Quantizer.__call__)
        if mine != theirs or self.slot is not None or self.reduce_amax is not None:
            return None
        plan = self.plan
        return plan if any(plan) or type(self).plan is not Quantizer.plan else None

    @property
    def _parameter_casting(self) -> Casting | None:
        """By what a parameter is written that is stored by this plan; None where a state or code of
        the quantizer would have to."""
        return None if self.cell is None else BY_VALUE

    @property
    def slot(self) -> Slot | None:
        """Scale and amax of delayed scaling, None where the scale follows from the tensor."""
        return None

    @property
    def reduce_amax(self) -> ReduceAmax | None:
        """The reduction of the amaxes of the parts of one tensor before they become scales."""
        return None

    @property
    def columns_of(self) -> OperandSpec | None:
        """The spec of rows whose values are quantized columnwise, None for the tensor itself."""
        return None

    @property
    def _casting(self) -> Casting:
        """How a value is cast, besides by the plan, a state and a reduction."""
        return Casting(columns_of=self.columns_of)

    @property
    def dequantizes(self) -> bool:
        """Whether the columns are the value of the rows, in high precision."""
        return False

    @property
    def used_plan(self) -> TensorPlan:
        """The plan of the orientations that are used, None for the others.

        Raises:
            OperandError: neither is used.
        """
        if not (self.rowwise_usage or self.columnwise_usage):
            raise OperandError(
                f"{type(self).__name__} with neither usage makes nothing: "
                f"set_usage(rowwise=True) or set_usage(columnwise=True)."
            )
        row, column = self.plan
        return TensorPlan(
            row if self.rowwise_usage else None, column if self.columnwise_usage else None
        )

    def __call__(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Quantize ``tensor``."""
        return self.quantize(tensor)

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Return ``tensor [..., k]``, float32, bfloat16 or float16, quantized; or write it to
        ``out``. ``dtype`` is the nominal one of the result, that of ``tensor`` if None.

        Raises:
            OperandError: no such tensor; or as :meth:`update_quantized`.
            UnsupportedError: blocks do not divide its sizes, or no backend quantizes like that.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        if torch.compiler.is_compiling():
            usages = (self.rowwise_usage, self.columnwise_usage)
            return quantize_in_graph(self._number, tensor, *usages, dtype)
        return self._quantized(tensor, dtype)

    def _quantized(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> QuantizedTensor:
        value = readable(tensor, f"{type(self).__name__}: the tensor")
        with table.capturing() if is_captured(value) else contextlib.nullcontext():
            if torch.is_grad_enabled() and value.requires_grad:
                result: QuantizedTensor = _StraightThrough.apply(value, self, dtype)  # type: ignore[no-untyped-call]  # torch's
                return result
            return _named(self.quantize_impl(value), dtype)

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Return the plain ``tensor`` quantized, without its history.

        Raises:
            OperandError: the scale of :attr:`slot` is on another device.
        """
        return QuantizedTensor.of(tensor, self.used_plan, self._casting_on(tensor.device))

    def _casting_on(self, device: torch.device) -> Casting:
        slot = self._slot_on(device)
        return self._casting._replace(slot=slot, reduce_amax=self.reduce_amax)

    def _slot_on(self, device: torch.device) -> Slot | None:
        slot = self.slot
        if slot is not None and slot.scale.device != device:
            raise OperandError(
                f"{type(self).__name__}: the tensor is on {device}, the scale on "
                f"{slot.scale.device}. Move one of them; nothing is moved silently."
            )
        return slot

    def multi_quantize(self, list_of_tensors: Iterable[torch.Tensor]) -> list[QuantizedTensor]:
        """Quantize each of the tensors."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize ``src`` into ``dst``, in the orientations that ``dst`` holds, and return it.

        Nothing is written, and no amax recorded, where ``noop_flag``, one number on the device, is
        not 0.

        Raises:
            OperandError: ``dst`` is not stored as this quantizer stores, or has another shape.
        """
        if torch.compiler.is_compiling():
            _captured_update(_allowed(self._number), src, dst, noop_flag)
            return dst
        return self._updated(src, dst, noop_flag)

    def _updated(
        self, src: torch.Tensor, dst: QuantizedTensor, noop_flag: torch.Tensor | None
    ) -> QuantizedTensor:
        if not isinstance(dst, QuantizedTensor):
            raise OperandError(
                f"{type(self).__name__}.update_quantized writes to a QuantizedTensor, found "
                f"{type(dst).__name__}. make_empty(shape) makes one."
            )
        mine = storage_plan(self.plan)
        planned = [(ours, theirs) for ours, theirs in zip(mine, dst.plan, strict=True) if theirs]
        if any(ours != theirs for ours, theirs in planned):
            raise OperandError(
                f"{type(self).__name__}.update_quantized: the tensor is stored as {dst.plan}, this "
                f"quantizer stores {mine}. Write by the quantizer that made it, or copy_(), which "
                f"keeps its format."
            )
        if src.shape != dst.shape:
            raise OperandError(
                f"{type(self).__name__}.update_quantized: {list(src.shape)} into "
                f"{list(dst.shape)}. Views of whole rows can be written one by one."
            )
        value = readable(src.detach(), f"{type(self).__name__}: the tensor")
        return dst.write(value, self._casting_on(dst.device), noop_flag=noop_flag)

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """Return a tensor of ``shape`` to be written, plain where what is used stays in high
        precision; it holds zeros.

        ``dtype`` is the nominal one. ``device`` None is torch's default device if one was set, else
        the selected backend's. ``pin_memory`` needs the CPU.

        Raises:
            OperandError: ``pin_memory`` on another device.
            UnsupportedError: blocks do not divide the sizes, or no backend quantizes like that.
        """
        if torch.compiler.is_compiling():
            return self._empty_in_graph(tuple(shape), dtype, device, requires_grad, pin_memory)
        where = resolve_device(device)
        if pin_memory and where.type != "cpu":
            raise OperandError(f"make_empty(pin_memory=True, device={where}): only CPU memory is.")
        zeros = torch.zeros(tuple(shape), dtype=dtype, device=where)
        casting, plan = self._casting, self.used_plan
        if not any(plan) and self.cell is not None:  # a value in high precision
            value: Any = self.quantize(zeros, dtype=dtype)
            value = value.pin_memory() if pin_memory else value
            return value.requires_grad_(requires_grad)  # type: ignore[no-any-return]
        result = QuantizedTensor.of(zeros, plan, casting)
        if pin_memory:
            result = result.pinned()
        result = result.bound_to(self.slot)
        result.requires_grad_(requires_grad)
        return result

    def _empty_in_graph(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | None,
        *history: bool,
    ) -> QuantizedTensor:
        if any(history):
            raise UnsupportedError(
                "make_empty with requires_grad or pin_memory is not offered under torch.compile."
            )
        where = _device_name(device)
        return self.quantize(torch.zeros(shape, dtype=dtype, device=where))

    def inner_tensor_specs(
        self, shape: Iterable[int]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return size and dtype of each plain tensor that a tensor of ``shape`` would hold, by its
        name. Codes that both orientations share are named once; the backend of a device whose
        products cannot read them across, as Hopper's, holds columnwise ones as well.

        Raises:
            OperandError: neither orientation is used, or ``shape`` has something else than counts.
            UnsupportedError: blocks do not divide the sizes; or it would hold a value, whose dtype
                is that of what is quantized.
        """
        if self._casting.keeps_value:
            raise UnsupportedError(f"inner_tensor_specs of {self}: its value has any dtype.")
        plan, sizes = (
            storage_plan(self.used_plan),
            matrix_shape(counted("inner_tensor_specs", shape)),
        )
        QuantizedTensor.check_sizes(sizes, plan)
        row, column = plan
        ways = [
            (row, sizes),
            (None if row and row == column and is_square(row) else column, sizes[::-1]),
        ]
        shapes = [operand_shapes(spec, size) if spec else () for spec, size in ways]
        return {
            name: (tuple(part.size), part.dtype)
            for names, parts in zip((PARTS[:3], PARTS[3:]), shapes, strict=True)
            for name, part in zip(names, parts, strict=False)
        }

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, int]:
        """Return the size of the scales of blocks of a tensor of ``shape`` as Transformer Engine
        pads them, which the constructor of :class:`fp8core.MXFP8Tensor` takes.

        Raises:
            OperandError: ``shape`` has something else than counts.
            UnsupportedError: the format has one scale for the tensor or for a row.
        """
        spec = self.plan.columnwise if columnwise else self.plan.rowwise
        if spec is None or not spec.block[1]:
            raise UnsupportedError(f"get_scale_shape of {self}: {spec} has no scales of blocks.")
        return scale_sizes(
            spec, matrix_shape(counted("get_scale_shape", shape)), columnwise=columnwise
        )[1]

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record what quantizing ``tensor`` would record; only a delayed scale has something."""

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Say which orientations are made from now on; None changes nothing."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Return which orientations are made, as ``{"rowwise": True, "columnwise": False}``."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Quantizer:
        """Return another quantizer that does the same, whose usages can be set by themselves."""
        copied = object.__new__(type(self))
        copied.__setstate__(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for a copy or a pickle, which has a number of its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_number"}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        """Take the attributes of a copy or a pickle."""
        self.__dict__.update(state)
        self._number = _register(self)

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Say whether blocks divide the sizes of ``inp``."""
        try:
            QuantizedTensor.check_sizes(inp.shape, self.used_plan)
        except (OperandError, UnsupportedError):
            return False
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        """Return False: what is gathered are the tensors of both orientations."""
        return False

    def is_requantization_safe(self) -> bool:
        """Say whether quantizing a tensor again gives the same: not if it rounds stochastically,
        nor with a delayed scale, which changes."""
        return self.slot is None and not any(spec and spec.stochastic for spec in self.plan)

    def _key(self) -> tuple[object, ...]:
        return (type(self), self.plan, self.dequantizes, *self.get_usages().values())

    def __eq__(self, value: object) -> bool:
        if self is value:
            return True
        if not isinstance(value, Quantizer) or self.cell is None or value.cell is None:
            return False
        return self._key() == value._key()

    def __hash__(self) -> int:
        return hash(self._key()) if self.cell is not None else id(self)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """Return what makes an equal quantizer in a graph of torch, where a class is registered as
        one of values.

        Raises:
            UnsupportedError: it has a state, a reduction or code of its own.
        """
        return expression_of(_planned(self._number))

    def __repr__(self) -> str:
        ways = [way for way, used in self.get_usages().items() if used]
        try:
            planned = str(self.plan.rowwise)
        except NotImplementedError:
            planned = "no plan"
        return f"{type(self).__name__}({planned}, {' and '.join(ways) or 'no usage'})"


class PlannedQuantizer(Quantizer):
    """A quantizer of any plan."""

    def __init__(self, plan: TensorPlan, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._plan = plan

    @property
    def plan(self) -> TensorPlan:
        """The plan that the quantizer was made of."""
        return self._plan


_registered: weakref.WeakValueDictionary[str, Quantizer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _register(quantizer: Quantizer) -> str:
    """Return a text that stands for ``quantizer`` in graphs that torch captures."""
    number = str(next(_numbers))
    _registered[number] = quantizer
    return number


def _allowed(number: str) -> str:
    for function in (_captured, _captured_update):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return number


def _device_name(device: torch.device | str | None) -> str:
    return str(resolve_device(device))


constant_in_graph(_allowed)
constant_in_graph(_device_name)


def quantize_in_graph(
    number: str,
    tensor: torch.Tensor,
    rowwise: bool,
    columnwise: bool,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Quantize, as torch.compile records it, by the quantizer whose ``number`` is given."""
    return _captured(_allowed(number), tensor, rowwise, columnwise, dtype)


def _captured(
    number: str, tensor: torch.Tensor, rowwise: bool, columnwise: bool, dtype: torch.dtype | None
) -> QuantizedTensor:
    """Quantize by operators, which torch.compile records without reading this code.

    Raises:
        UnsupportedError: the quantizer does more than its plan says.
    """
    quantizer = _planned(number).copy()
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    with table.capturing():
        return quantizer._quantized(tensor, dtype)


def _captured_update(
    number: str, src: torch.Tensor, dst: QuantizedTensor, noop_flag: torch.Tensor | None
) -> None:
    """Write by operators, as :func:`_captured` quantizes.

    Raises:
        UnsupportedError: the quantizer does more than its plan says.
    """
    with table.capturing():
        _planned(number)._updated(src, dst, noop_flag)


def _planned(number: str) -> Quantizer:
    quantizer = _registered[number]
    if quantizer.cell is None:
        raise UnsupportedError(
            f"{type(quantizer).__name__}: a state, a reduction or code of its own is not offered "
            f"under torch.compile. Use a quantizer without, or torch.compiler.disable around it."
        )
    return quantizer


def readable(tensor: Any, role: str, remedy: str = "Quantize outside of it.") -> torch.Tensor:
    """Return ``tensor`` as one whose memory a backend can read; ``remedy`` is for transforms.

    Raises:
        OperandError: it is none, or has no memory of its own.
    """
    if not isinstance(tensor, torch.Tensor):
        raise OperandError(f"{role} is {type(tensor).__name__}; expected a torch.Tensor.")
    refuse_transform(tensor, role, remedy)
    plain = unwrap(tensor, role)
    return as_readable(plain, plain.device, role)


class _StraightThrough(torch.autograd.Function):
    """Quantizes by a quantizer; the gradient passes as it is."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype | None
    ) -> QuantizedTensor:
        return _named(quantizer.quantize_impl(tensor), dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def _named(tensor: QuantizedTensor, dtype: torch.dtype | None) -> QuantizedTensor:
    """Return ``tensor`` with the nominal ``dtype``, its own if None; a user's storage as it is."""
    if dtype is None or not isinstance(tensor, QuantizedTensor) or dtype == tensor.dtype:
        return tensor
    return tensor.with_dtype(dtype)
