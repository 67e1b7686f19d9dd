"""Torch's operators on a tensor that stores operands.

Copies, moves, padding, and views of whole blocks act on the operands, bit for bit. All other
operators compute with the decoded values, and values that an operator writes are quantized again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8core.errors import UnsupportedError
from fp8core.reporting import log_once
from fp8core.tensors.operand_tensor import OperandTensor, say_dequantized
from fp8core.tensors.quantizer import Orientations, Slot
from fp8core.tensors.storage import (
    FLOATS,
    Casting,
    make_operands,
    matrix_shape,
    pad_operand,
    split,
    stored_operands,
    zeros_of_products,
)
from fp8core.tensors.values import Values, as_view, broadcast, decomposed, written
from fp8core.tensors.views import COPIES, VIEWS, collected
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.private import COLLECTIVES, pytree


def write(tensor: OperandTensor, value: torch.Tensor, casting: Casting | None = None) -> None:
    """Quantize ``value``, without a cast to the nominal dtype, into the operands of ``tensor``, by
    ``casting``, or the tensor's own, whose delayed scale is taken in any case where it has none.

    Raises:
        UnsupportedError: a scale of the operands covers more than ``tensor``, or ``tensor`` lacks
            the slot of its delayed scale.
    """
    refuse_part(tensor)
    if value.shape != tensor.shape:
        value = value.expand(tensor.shape)
    if isinstance(value, Values):  # of which a kernel would read address 0
        value = value.dequantize()
    value = value.detach().to(tensor.device)
    if value.dtype not in FLOATS:
        value = value.to(torch.float32 if value.is_floating_point() else tensor.dtype)
    if value.dim() != 2:
        value = value.reshape(matrix_shape(value.shape))
    casting = tensor._casting if casting is None else casting
    casting = casting._replace(slot=casting.slot or tensor._casting.slot)
    if casting.slot is None and tensor._lacks_slot:
        raise UnsupportedError(
            f"a write to {tensor}, whose scale a Float8Quantizer holds: in a graph it has the "
            f"operands alone, and as a HybridQuantizedTensor those of its parts. Write outside of "
            f"torch.compile, or to the parts."
        )
    assign(tensor, make_operands(value, tensor.plan, casting))
    if casting.columns_of is not None and tensor._value is not None:
        value = tensor.decoded()
    _assign_value(tensor, value)


def _assign_value(tensor: OperandTensor, value: torch.Tensor | None) -> None:
    """Copy ``value`` to that which ``tensor`` holds in high precision, if it holds one."""
    if tensor._value is not None and value is not None:
        tensor._value.copy_(value.view(tensor.shape))
        if not tensor._value.is_inference():
            torch.autograd.graph.increment_version(tensor._value)


def assign(tensor: OperandTensor, operands: Orientations) -> None:
    """Copy ``operands`` into the operands of ``tensor``, which have the same formats.

    A part that both orientations share, such as the scale of all codes, is written once: a graph of
    torch.compile refuses to write an input twice.
    """
    written_ids: set[int] = set()
    for target, source in zip(tensor.stored, operands, strict=True):
        for part, new in zip(target or (), source or (), strict=False):
            if part is not None and id(part) not in written_ids:
                written_ids.add(id(part))
                part.copy_(new)
                # A forward may have saved the part for backward, and torch counts no write within
                # __torch_dispatch__.
                if not part.is_inference():
                    torch.autograd.graph.increment_version(part)


def refuse_part(tensor: OperandTensor) -> None:
    """Refuse a write to a view whose scales cover more than the view.

    Raises:
        UnsupportedError: ``tensor`` is such a view.
    """
    if tensor._shares_scales:
        raise UnsupportedError(
            f"a write to a view of a QuantizedTensor, {tensor}, whose scale covers more than the "
            f"view: it would change the rest. Write to the whole: value = p.dequantize(), change "
            f"value, then p.copy_(value)."
        )


_KEEPING = (
    "Compute with x = q.dequantize(torch.float32), which keeps its precision, then q.copy_(x)."
)
_MASTERS = (
    "Step high-precision masters: make masters = fp8core.MasterWeights(model) and the optimizer "
    "of masters.parameters(), then masters.attach(optimizer)."
)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator ``func``; at least one of the arguments is an :class:`OperandTensor`.

    Raises:
        UnsupportedError: a view cuts blocks, or ``func`` writes what the operands cannot hold.
    """
    handler = _HANDLERS.get(func.overloadpacket)
    first = args[0] if args else None
    if isinstance(first, OperandTensor) and first._value is not None and handler not in _WHOLE:
        handler = None  # no view or part of both
    return (handler or decomposed(func) or _on_values)(func, args, kwargs)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the decoded values, and quantize again the values that ``func`` writes."""
    targets = []
    for target in written(func, args, kwargs):
        if isinstance(target, OperandTensor):
            targets.append(target)
        elif isinstance(target, (list, tuple)) and any(
            isinstance(item, OperandTensor) for item in target
        ):
            raise UnsupportedError(
                f"{func} updates several parameters at once, and cannot write to "
                f"{next(t for t in target if isinstance(t, OperandTensor))}: an optimizer "
                f"with foreach=True or fused=True.\n  {_MASTERS}"
            )
    if func is torch.ops.c10d.broadcast_.default:
        return broadcast(func, args, kwargs)
    if func.namespace == "c10d":  # in place, or into lists
        raise UnsupportedError(
            f"{func} of a QuantizedTensor: pass each of its .tensors(), a contiguous() copy of "
            f"those with gaps, or .dequantize()."
        )
    if func.namespace == COLLECTIVES:
        gathered = collected(func, args)
        if gathered is not None:
            return gathered
    for target in targets:
        refuse_part(target)
        _refuse_arithmetic(func, target)
    values: dict[int, torch.Tensor] = {}

    def value_of(tensor: OperandTensor) -> torch.Tensor:
        return values.setdefault(id(tensor), tensor.decoded())

    plain_args, plain_kwargs = pytree.tree_map_only(OperandTensor, value_of, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    owners = {id(values[id(target)]): target for target in targets}
    for target in targets:
        value = values[id(target)]
        if value.shape != target.shape:
            raise UnsupportedError(f"{func} changes the shape of {target}; that is not offered.")
        if func.overloadpacket in _UPDATES:
            _warn_of_rounding(func, target)
        write(target, value)
    out = pytree.tree_map_only(torch.Tensor, lambda value: owners.get(id(value), value), out)
    if targets:
        return out
    viewed = as_view(func, out)
    if viewed is out and not _is_dequantize(func, args):
        say_dequantized(func, _first(args, kwargs))
    return viewed


def _refuse_arithmetic(func: Any, target: OperandTensor) -> None:
    """Refuse an in-place computation, except arithmetic, and on a parameter: both are warned of."""
    if func.overloadpacket in _RESHAPES:
        raise UnsupportedError(
            f"{func} changes the shape of {target} in place; that is not offered. Its other names, "
            f"such as transpose(), return a view of the values."
        )
    if func.overloadpacket in _SETTERS | _UPDATES or target.is_of_parameter:
        return
    raise UnsupportedError(
        f"{func.overloadpacket} computes in place on {target}, and would round what it holds once "
        f"more: a change of less than half a unit would be lost without a trace. {_KEEPING}"
    )


def _warn_of_rounding(func: Any, target: OperandTensor) -> None:
    """Log once what arithmetic in place loses in the format of ``target``."""
    spec = target.plan.rowwise or target.plan.columnwise
    if target.is_of_parameter:
        log_once(
            f"parameters stored as {spec} are updated in place, as by an optimizer: "
            f"a step smaller than half a unit of that format is lost. {_MASTERS}"
        )
        return
    log_once(
        f"{func.overloadpacket} computes in place on tensors stored as {spec}, and "
        f"rounds the result: a change of less than half a unit is lost. {_KEEPING}"
    )


def _is_dequantize(func: Any, args: tuple[Any, ...]) -> bool:
    """Say whether the operator is a product with 1, by which ``dequantize`` is differentiable."""
    return func is _aten.mul.Tensor and type(args[1]) is int and args[1] == 1


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperandTensor:
    leaves = pytree.tree_leaves((args, kwargs))
    return next(leaf for leaf in leaves if isinstance(leaf, OperandTensor))


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of :data:`COPIES` on the operands where possible, else on the values."""
    first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    copied = None
    if isinstance(first, OperandTensor):
        copied = COPIES[func.overloadpacket](func, args, kwargs)
    return _on_values(func, args, kwargs) if copied is None else copied


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    if not isinstance(target, OperandTensor):
        return func(target, source.decoded(target.dtype), *args[2:], **kwargs)
    if isinstance(source, OperandTensor):
        has_both = (source._value is None) == (target._value is None)
        if has_both and source.plan == target.plan and source.shape == target.shape:
            refuse_part(target)
            assign(target, source.operands)
            _assign_value(target, source._value)
            return target
        source = source.decoded(torch.float32)
    write(target, source)
    return target


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperandTensor:
    with torch.inference_mode(False):  # as for a view outside of inference mode
        return args[0].with_dtype(args[0].dtype)  # type: ignore[no-any-return]


def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the detached tensor for its own strides, which FSDP requests; else strided values."""
    tensor, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    geometry = (tuple(size), tuple(stride), offset or 0)
    if geometry == (tuple(tensor.shape), tensor.stride(), 0):
        return _detach(func, args, kwargs)
    return _on_values(func, args, kwargs)


def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperandTensor:
    tensor: OperandTensor = args[0]
    if tensor._padded is not None:
        whole = _clone(func, (tensor._padded,), {})
        return tensor.rebuilt(*tensor.stored, tensor.shape)._lie_within(whole)
    copies = [None if part is None else part.clone() for part in tensor.parts]
    clone = type(tensor)(*split(copies), tensor.plan, tensor.dtype, shape=tensor.shape)
    clone._written_as(tensor)._value = None if tensor._value is None else tensor._value.clone()
    return clone


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: OperandTensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    device = kwargs.get("device") or tensor.device
    if dtype != tensor.dtype:
        return tensor.decoded(dtype).to(device)
    if device == tensor.device:
        return _clone(func, args, {})
    moved = _like(tensor, device)
    assign(moved, tensor.operands)
    moved._initial_value = tensor._initial_value
    moved._value = None if tensor._value is None else tensor._value.to(device)
    slot, moved._lacks_slot = tensor._casting.slot, tensor._lacks_slot
    if slot is not None:  # a copy of its own, as its codes are
        amax = None if slot.amax is None else slot.amax.to(device)
        moved.bound_to(Slot(slot.scale.to(device), amax))
    return moved


def _like(tensor: OperandTensor, device: torch.device) -> OperandTensor:
    """Return zeros on ``device``, quantized by the plan of ``tensor`` and in the layout of the
    backend of ``device``."""
    rows, columns = matrix_shape(tensor.shape)
    zeros = torch.zeros(rows, columns, dtype=tensor.dtype, device=device)
    stored = stored_operands(make_operands(zeros, tensor.plan), tensor.plan)
    like = with_room(type(tensor)(*stored, tensor.plan, tensor.dtype, shape=tensor.shape))
    like._keeps_initial_value = tensor._keeps_initial_value
    like._casting = Casting(columns_of=tensor._casting.columns_of)
    if tensor._value is not None:
        like._value = zeros.new_zeros(tensor.shape, dtype=tensor._value.dtype)
    return like


def with_room(tensor: OperandTensor) -> OperandTensor:
    """Return ``tensor`` in memory with the zeros behind its ends that products on its device need,
    which so copy none of it; itself where they need none, and in a graph."""
    codes = tensor.tensors()[0]
    if tensor.dim() != 2 or codes.is_meta or is_captured(codes):
        return tensor
    rows, columns = zeros_of_products(tensor.plan, tensor.shape, tensor.device)
    if not (rows or columns):
        return tensor
    return tensor._lie_within(_copy_with_zeros(tensor, rows, columns))


def with_zeros(tensor: OperandTensor, rows: int, columns: int) -> torch.Tensor:
    """Return ``tensor [n, k]`` with ``rows`` and ``columns`` of zeros at its ends, for reading
    alone: a copy only where its memory does not have them."""
    whole, (n, k) = tensor._padded, tensor.shape
    if whole is not None and whole.shape == (n + rows, k + columns):
        return whole
    return torch.nn.functional.pad(tensor, (0, columns, 0, rows))


def _copy_with_zeros(tensor: OperandTensor, rows: int, columns: int) -> OperandTensor:
    """Return a copy of ``tensor [n, k]`` with ``rows`` and ``columns`` of zeros at its ends, which
    shares what needs none, as the scale of all codes."""
    plan, (rowwise, columnwise) = tensor.plan, tensor.stored
    assert plan.rowwise is not None
    assert rowwise is not None
    turned = None
    if columnwise is not None:
        assert plan.columnwise is not None
        turned = pad_operand(columnwise, plan.columnwise, columns, rows)
    operand = pad_operand(rowwise, plan.rowwise, rows, columns)
    return type(tensor)(operand, turned, plan, tensor.dtype)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, device, op = args[0], kwargs.get("device"), func.overloadpacket
    if op is _aten.empty_like and tensor.is_meta and device not in (None, tensor.device):
        return _like(tensor, device)  # Module.to_empty
    if op is _aten.new_empty and device and (*args[1],) == tensor.shape and "dtype" not in kwargs:
        # So torch.distributed.checkpoint begins a copy of a state, and sets what the tensor has.
        empty = [None if x is None else func(x, x.shape, device=device) for x in tensor.parts]
        return type(tensor)(*split(empty), tensor.plan, tensor.dtype, shape=tensor.shape)  # type: ignore[no-any-return]
    if op is _aten.new_zeros and tensor.is_of_parameter:
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
    if value != 0 or not is_plain or tensor.dim() != 2 or tensor.stored[0] is None:
        return _on_values(func, args, kwargs)  # type: ignore[no-any-return]
    _, columns, _, rows = amounts
    parts = _copy_with_zeros(tensor, rows, columns).parts
    shared = {id(part) for part in tensor.tensors()}
    copies = [part if part is None or id(part) not in shared else part.clone() for part in parts]
    padded: OperandTensor = type(tensor)(*split(copies), tensor.plan, tensor.dtype)
    return padded._written_as(tensor)


_aten = torch.ops.aten
# What acts on a tensor with a value in high precision beside its operand.
_WHOLE = (_copy, _detach, _clone, _to_copy, _new, _record_stream)
# Operators that write values which do not depend on the present values.
_SETTERS = {
    *(_aten.zero_, _aten.fill_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_),
    *(_aten.exponential_, _aten.cauchy_, _aten.geometric_, _aten.log_normal_),
}
# Operators that change a shape in place, and are refused.
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
