"""``torch.ops.fp8core``: every operation of the backend API as an operator of torch.

The first argument of each is an :class:`~fp8core.torch_ops.encoding.Operation` as text, the others
are those of the call as plain tensors: an operand is ``[data, scale_inv, global_scale_inv]``,
without those that are None. No result shares memory with another tensor, and every write is
declared, except the count of :mod:`fp8core.torch_ops.nonfinite` and the amax of a slot of delayed
scaling, which no operator reads. Schema, fake kernel and body follow from the operation's record.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from inspect import Parameter
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin

import torch

from fp8core import errors
from fp8core.backend_api import AttentionBackwardDesc, FusedDesc, Operand, OperandSpec, Quantized
from fp8core.backend_api.descriptors import CastShape, num_groups
from fp8core.backend_api.record import RECORDS, Record, ResultShape, shape_of
from fp8core.torch_ops.capture import constant_in_graph, is_captured, is_left_to_backward
from fp8core.torch_ops.definition import bound, define, settle, settle_all
from fp8core.torch_ops.encoding import Operation, decode, encode
from fp8core.torch_ops.nonfinite import run_counted
from fp8core.torch_ops.private import (
    first_row,
    is_legacy_batched,
    is_transform_active,
    legacy_vmap,
    without_interpreters,
    without_keys,
)

_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    Operand: "Tensor[]",
    Sequence[torch.Tensor]: "Tensor[]",
    Operand | Sequence[Operand]: "Tensor[]",
    Sequence[torch.Tensor] | None: "Tensor[]",
    torch.Tensor | Sequence[torch.Tensor] | None: "Tensor[]",
    int: "SymInt",
}
_NUMBERS = (float, bool, float | torch.Tensor)
_MOST_LAYOUTS = 4096
"""How many layouts an operator keeps, one for each operation and sizes."""


_Parts: TypeAlias = "tuple[int, int, bool, bool]"
"""How many tensors the operands of a cast bring, and what of the columnwise one is not brought:
all, a view of the rowwise one, or its scale, which is that one's."""


class _Layout(NamedTuple):
    """The ``shapes`` of the results of a call, whether it returns one that stands for itself, how
    many tensors each operand of a cast brings, None for other results, and the shapes of the
    tensors that the operator returns."""

    shapes: Sequence[Any]
    is_single: bool
    parts: Sequence[_Parts | None]
    flat: Sequence[ResultShape]


def _parts_of(shape: CastShape, transposes: bool) -> _Parts:
    rowwise, columnwise = shape.rowwise(), shape.columnwise(transposes)
    has_view = shape.has_view(transposes)
    return len(rowwise), len(columnwise), has_view, shape.shares_scale()


class Operator:
    """An operation as an operator of torch, called as the contract calls the operation.

    What a call writes beside its results, an amax or a count, the operator returns behind them:
    torch cannot make an operator functional that both returns and writes. An operation with the
    argument ``out`` has two operators: one returns the results, the other writes them.

    Numbers by keyword are the operator's last two arguments: ``on_device``, tensors of one element
    or None, and ``numbers``, all of them, 0 where a tensor stands for one.
    """

    def __init__(self, record: Record, *, writes_out: bool = False) -> None:
        arguments = {argument.name: argument for argument in record.arguments}
        keywords = [each for each in arguments.values() if each.kind is Parameter.KEYWORD_ONLY]
        self._record = record
        self._names = frozenset(arguments)
        self._writing: Operator | None = None
        self._writes = record.writes
        order = record.order
        if "out" in record.writes and not writes_out:
            self._writing, self._writes = type(self)(record, writes_out=True), ()
            order = tuple(name for name in order if name != "out")
        self._numbers = [each for each in keywords if each.annotation in _NUMBERS]
        on_device = [each.name for each in keywords if torch.Tensor in get_args(each.annotation)]
        self._on_device = on_device if self._numbers else []
        numbers = {*(each.name for each in self._numbers), *self._on_device}
        self._types = {
            name: _TYPES.get(arguments[name].annotation, "")
            for name in order
            if name not in numbers
        }
        places = {name: place for place, name in enumerate(self._types)}
        self._places = [
            (
                places[name],
                name,
                each.kind,
                each.annotation is Operand,
                each.default is not Parameter.empty,
            )
            for name, each in arguments.items()
            if name in places
        ]
        self._recorded = [name for name in arguments if name.endswith("_out")]
        results = get_args(record.returns) if get_origin(record.returns) is tuple else ()
        optional = [at for at, result in enumerate(results) if NoneType in get_args(result)]
        self._num_results = len(results)
        self._optional_result = optional[0] if len(optional) == 1 else None
        has_casts = any(CastShape in get_args(result) for result in results)
        self._follows_shapes = record.returns is not ResultShape and (
            not results or has_casts or len(optional) > 1
        )
        self._is_list = record.returns is not ResultShape
        schema = (not writes_out and record.schema) or self._schema()
        register = define(schema, self._fake, name=record.name + "_out" * writes_out)
        self._operator = register(self._run)
        self._layouts: dict[Any, _Layout] = {}

    def __call__(self, text: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the results of the operation ``text``."""
        for name in keywords:
            if name not in self._names:
                raise TypeError(f"{self._record.name} takes no {name}")
        if is_left_to_backward():
            text += " "  # which says the same, and merges with no operator of forward
        if self._writing is not None and keywords.get("out") is not None:
            self._writing(text, *arguments, **keywords)
            return keywords["out"]
        if self._writes and not arguments[0]:  # of no tensors
            return None
        results = self._operator(text, *self.flat(arguments, keywords))
        if self._writes or not self._is_list:
            return results
        if self._follows_shapes or any([keywords.get(x) is not None for x in self._recorded]):
            return self._restored(text, list(results), arguments, keywords)
        results = tuple(results)
        if len(results) == self._num_results:
            return results
        return (*results[: self._optional_result], None, *results[self._optional_result :])

    def flat(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
        """Return the arguments of the operator, of those of the call."""
        parameters = self._record.arguments
        if parameters[0].kind is Parameter.VAR_POSITIONAL:
            arguments = (list(arguments),)
        values = {each.name: value for each, value in zip(parameters, arguments, strict=False)}
        values.update(keywords)
        flat = [_flat(values.get(name), kind) for name, kind in self._types.items()]
        if self._numbers:
            numbers = [values.get(each.name, each.default) for each in self._numbers]
            on_device = [values.get(name) for name in self._on_device]
            flat.append([x if isinstance(x, torch.Tensor) else None for x in on_device])
            flat.append([0.0 if isinstance(x, torch.Tensor) else float(x) for x in numbers])
        return flat

    def call(self, desc: Any, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the call, by position and by keyword, of those of the operator.

        Trailing arguments that are None are left out, by torch as well.
        """
        positional: list[Any] = []
        named: dict[str, Any] = {}
        if self._numbers:
            *values, on_device, numbers = values
            for each, number in zip(self._numbers, numbers, strict=True):
                named[each.name] = bool(number) if each.annotation is bool else number
            pairs = zip(self._on_device, on_device, strict=True)
            named |= {name: x for name, x in pairs if x is not None}
        count = len(values)
        for place, name, kind, is_operand, has_default in self._places:
            value: Any = values[place] if place < count else None
            if has_default and (value is None or (type(value) is list and not value)):
                continue
            if is_operand:
                value = Operand(*value)
            if kind is Parameter.KEYWORD_ONLY:
                named[name] = value
            elif kind is Parameter.VAR_POSITIONAL:
                positional += value
            else:
                positional.append(value)
        return positional, named

    def run_of(self, text: str, device: torch.device) -> Callable[..., Any]:
        """Return what runs the operation ``text`` with the arguments of :meth:`call`."""
        return bound(text, device)

    def _schema(self) -> str:
        letters = iter("abcdefgh")
        words = ["str operation"]
        for name, kind in self._types.items():
            if name in self._writes:
                kind = kind.replace("?", "").replace("Tensor", f"Tensor({next(letters)}!)")
            words.append(f"{kind} {name}")
        words += ["Tensor?[] on_device", "float[] numbers"] if self._numbers else []
        results = "()" if self._writes else "Tensor[]" if self._is_list else "Tensor"
        return f"({', '.join(words)}) -> {results}"

    def _fake(self, text: str, *values: Any) -> Any:
        if self._writes:
            return None
        operation = decode(text)
        layout = self._layout(operation, *self.call(operation.desc, values))
        results = [shape.empty(_device(values)) for shape in layout.flat]
        return results if self._is_list else results[0]

    def _run(self, text: str, *values: Any) -> Any:
        operation, device = decode(text), _device(values)
        positional, named = self.call(operation.desc, values)
        run = self.run_of(text, device)
        if operation.slot is not None:
            run = partial(_run_in_slot, run, operation.slot)
        if self._writes:
            run(*positional, **named)
            return None
        # Half of what a call costs the host, and the same for each call of a graph.
        key = _key(text, values)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._layout(operation, positional, named)
        recorded: list[torch.Tensor | None] = []
        for name in self._recorded:
            is_in_slot = operation.slot is not None and name.endswith("amax_out")
            if name in named and name != "nonfinite_out" and not is_in_slot:
                named[name] = named[name].clone()
                recorded.append(named[name])
        if "nonfinite_out" in self._recorded:
            nonfinite = named.pop("nonfinite_out", None)
            results, count = run_counted(run, positional, named, nonfinite, device)
            recorded.append(count)
        else:
            results = run(*positional, **named)
        if type(results) is torch.Tensor and not self._is_list:
            return settle(results, layout.flat[0])
        results = (results,) if layout.is_single else results
        flat = self._stored(text, _flat_results(results, layout))
        settled = settle_all([*flat, *recorded], layout.flat)
        return settled if self._is_list else settled[0]

    def _stored(self, text: str, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that the operator returns, of those of the ``results``."""
        return results

    def _read(self, text: str, stored: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the results, of those that the operator returns."""
        return stored

    def _layout(
        self, operation: Operation, positional: Sequence[Any], named: dict[str, Any]
    ) -> _Layout:
        """Return what a call with these arguments returns."""
        recorded = self._record.shapes(operation.desc, *positional, **named)
        shapes, flat = _several(recorded), list[ResultShape]()
        for shape in shapes:
            if isinstance(shape, CastShape):
                flat += [*shape.rowwise(), *shape.columnwise(operation.transposes)]
            elif shape is not None:
                flat.append(shape)
        flat += [shape_of(named[name]) for name in self._returned(operation) if name in named]
        parts = [
            _parts_of(x, operation.transposes) if isinstance(x, CastShape) else None for x in shapes
        ]
        return _Layout(shapes, shapes is not recorded, parts, flat)

    def _returned(self, operation: Operation) -> list[str]:
        """Return the names of the written arguments that the operator returns."""
        if operation.slot is None:
            return self._recorded
        return [name for name in self._recorded if not name.endswith("amax_out")]

    def _restored(
        self, text: str, flat: list[torch.Tensor], arguments: Any, keywords: dict[str, Any]
    ) -> Any:
        """Return the results of the call, of those of the operator."""
        written = [name for name in self._recorded if keywords.get(name) is not None]
        for name in reversed(written):  # the last result first
            if not (name.endswith("amax_out") and _has_slot(text)):
                keywords[name].copy_(flat.pop())
        if self._record.returns is CastShape:  # which torch.compile traces: it reads no descriptor
            return _quantized(_parts(text), iter(flat))
        shapes = self._record.shapes(decode(text).desc, *arguments, **keywords)
        rest = iter(self._read(text, flat))
        results: list[Any] = []
        for shape in _several(shapes):
            if isinstance(shape, CastShape):
                results.append(_quantized(_parts(text), rest))
            else:
                results.append(None if shape is None else next(rest))
        if _several(shapes) is not shapes:
            return results[0]
        return results if isinstance(shapes, list) else tuple(results)


def _parts(text: str) -> _Parts:
    _, desc, transposes, _ = decode(text)
    shape = CastShape(desc.quantize if isinstance(desc, FusedDesc) else desc, (0, 0))  # type: ignore[arg-type]  # the text says a cast
    return _parts_of(shape, transposes)


constant_in_graph(_parts)


def _has_slot(text: str) -> bool:
    return decode(text).slot is not None


constant_in_graph(_has_slot)


def in_slot(run: Callable[..., Any], *entries: slice) -> Callable[..., Any]:
    """Return the cast ``run`` of a graph, from :func:`call_of`, by one slot of a delayed state, or
    a split one by two.

    It is called with ``scale [slots]``, of which it reads ``entries``, and with ``amax_out``, a
    history ``[length, slots]``, to row 0 of which it writes when the graph runs, as a kernel does:
    torch sees no write.
    """
    assert isinstance(run, partial)
    operation = decode(run.args[0])
    slot = [number for each in entries for number in (each.start, each.stop, each.step)]
    return partial(run.func, encode(operation._replace(slot=tuple(slot))))


_IN_SLOTS = (("scale", "amax_out"), ("second_scale", "second_amax_out"))


def _run_in_slot(
    run: Callable[..., Any], slot: Sequence[int], *arguments: Any, **keywords: Any
) -> Any:
    for at, names in zip(range(0, len(slot), 3), _IN_SLOTS, strict=False):
        entries = slice(*slot[at : at + 3])
        for name in names:
            if name in keywords:  # torch counts no write to an amax: a later pass saved it
                keywords[name] = first_row(keywords[name], entries)
    return run(*arguments, **keywords)


def _flat(value: Any, kind: str) -> Any:
    if not kind.endswith("[]"):
        return value
    if value is None or isinstance(value, torch.Tensor | Operand):
        value = () if value is None else (value,)
    return [x for each in value for x in (tensors(each) if isinstance(each, Operand) else (each,))]


def tensors(operand: Operand | None) -> list[torch.Tensor]:
    """Return the tensors of an operand."""
    return [tensor for tensor in operand or () if tensor is not None]


def _several(results: Any) -> Sequence[Any]:
    """Return the results of a call, or their shapes, as a sequence."""
    is_single = isinstance(results, torch.Tensor | Quantized | ResultShape | CastShape)
    return (results,) if is_single else results


def _flat_results(results: Iterable[Any], layout: _Layout) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for result, shape, parts in zip(results, layout.shapes, layout.parts, strict=True):
        if parts is not None:
            flat += tensors(result.rowwise)
            flat += tensors(result.columnwise)[: parts[1]]
        elif shape is not None:
            flat.append(result)
    return flat


def _quantized(parts: _Parts, flat: Iterator[torch.Tensor]) -> Quantized:
    """Return the operands of a cast, whose tensors are the next of ``flat``."""
    num_rowwise, num_columnwise, has_view, shares_scale = parts
    rowwise = [next(flat) for _ in range(num_rowwise)]
    columnwise = [next(flat) for _ in range(num_columnwise)]
    if has_view:
        columnwise = [tensor.t() for tensor in rowwise]
    elif shares_scale:
        columnwise.append(rowwise[1])
    return Quantized(*(Operand(*side) if side else None for side in (rowwise, columnwise)))


def _key(text: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what the shapes of the results of ``text`` follow from: of each tensor among the
    ``values``, or in a list there, size and dtype; of a list how long it is."""
    key: list[Any] = [text]
    for value in values:
        is_list = type(value) is list
        if is_list:
            key.append(len(value))
        for each in value if is_list else (value,):
            key += (each.shape, each.dtype) if isinstance(each, torch.Tensor) else (each,)
    return tuple(key)


def _device(values: Sequence[Any]) -> torch.device:
    first = values[0]
    device: torch.device = (first if isinstance(first, torch.Tensor) else first[0]).device
    return device


class GroupedProduct(Operator):
    """The product of groups: ``b`` is one operand if k is grouped, else one a group."""

    def call(self, desc: Any, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the operands and the offsets, and the keywords of the call."""
        (a, b, offsets), named = super().call(desc, values)
        if desc.contract_groups:
            return [a, Operand(*b), offsets], named
        if "out" in named:
            (named["out"],) = named["out"]
        step = len(b) // num_groups(offsets)
        return [a, [Operand(*b[at : at + step]) for at in range(0, len(b), step)], offsets], named

    def run_of(self, text: str, device: torch.device) -> Callable[..., Any]:
        """Return what runs the product without the scales that a cast's operator has added."""
        desc: Any = decode(text).desc
        run = bound(text, device)
        if desc.offsets_on_device:  # no host knows how many there would be
            return run

        def run_trimmed(a: Any, b: Any, group_offsets: torch.Tensor, **keywords: Any) -> Any:
            offsets = group_offsets.tolist()
            if desc.contract_groups:
                a, b = _trimmed(desc.a, a, offsets, 1), _trimmed(desc.b, b, offsets, 1)
            else:
                a = _trimmed(desc.a, a, offsets, 0)
            return run(a, b, group_offsets, **keywords)

        return run_trimmed


def _trimmed(
    spec: OperandSpec | None, operand: Operand, offsets: Sequence[int], dim: int
) -> Operand:
    """Return an operand grouped along ``dim`` without scales behind those of its groups."""
    if spec is None or not spec.block[dim]:
        return operand
    sizes = (end - start for start, end in itertools.pairwise(offsets))
    count = sum(-(-size // spec.block[dim]) for size in sizes)
    scale_inv = operand.scale_inv
    assert scale_inv is not None
    if scale_inv.shape[dim] == count:
        return operand
    return operand._replace(scale_inv=scale_inv.narrow(dim, 0, count).contiguous())


class Fused(Operator):
    """A producer and the cast of its result. The codes of both halves of a split one are one result
    of the operator, in which kernels write them side by side: the graph has views of it."""

    def __call__(self, text: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the results of the operation ``text``, a pair for two halves."""
        if not _is_split(text):
            return super().__call__(text, *arguments, **keywords)
        for name, second in zip(*_IN_SLOTS, strict=True):
            if name in keywords:
                keywords[name], keywords[second] = keywords[name]
        first, second, *rest = super().__call__(text, *arguments, **keywords)
        return (first, second), *rest

    def run_of(self, text: str, device: torch.device) -> Callable[..., Any]:
        """Return what runs the operation, of halves as if each were a result."""
        run = bound(text, device)
        return partial(_run_split, run) if _is_split(text) else run

    def _layout(
        self, operation: Operation, positional: Sequence[Any], named: dict[str, Any]
    ) -> _Layout:
        layout = super()._layout(operation, positional, named)
        parts = layout.parts[0]
        if parts is None or not operation.desc.quantize.split:  # type: ignore[attr-defined]  # a fusion
            return layout
        return layout._replace(flat=_joined(layout.flat, parts, _doubled))

    def _stored(self, text: str, results: list[torch.Tensor]) -> list[torch.Tensor]:
        return _joined(results, _parts(text), _together) if _is_split(text) else results

    def _read(self, text: str, stored: list[torch.Tensor]) -> list[torch.Tensor]:
        if not _is_split(text):
            return stored
        places, count = _places_of_codes(_parts(text))
        first, behind = stored[:count], stored[count:]
        for at, dim in places:
            first[at], second = first[at].chunk(2, dim)
            behind.insert(at, second)
        return first + behind


def _is_split(text: str) -> bool:
    desc: Any = decode(text).desc
    return bool(desc.quantize.split)


def _run_split(run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    for name, second in zip(*_IN_SLOTS, strict=True):
        if second in keywords:
            keywords[name] = keywords[name], keywords.pop(second)
    if "nonfinite_out" in keywords:
        keywords["nonfinite_out"] = (keywords["nonfinite_out"],) * 2
    halves, *rest = run(*arguments, **keywords)
    return *halves, *rest


def _places_of_codes(parts: _Parts) -> tuple[list[tuple[int, int]], int]:
    """Return the places of the codes among the tensors of a cast, each with the dimension along
    which columns of what was cast lie; and how many tensors there are."""
    num_rowwise, num_columnwise, *_ = parts
    places = [(0, 1)] * bool(num_rowwise) + [(num_rowwise, 0)] * bool(num_columnwise)
    return places, num_rowwise + num_columnwise


def _joined(flat: Sequence[Any], parts: _Parts, join: Callable[[Any, Any, int], Any]) -> list[Any]:
    """Return ``flat``, which has the tensors of two casts of such ``parts`` first, with the codes
    of the second one joined to those of the first."""
    places, count = _places_of_codes(parts)
    first, second = [*flat[:count]], [*flat[count : 2 * count]]
    for at, dim in reversed(places):
        first[at] = join(first[at], second.pop(at), dim)
    return [*first, *second, *flat[2 * count :]]


def _doubled(shape: ResultShape, _: ResultShape, dim: int) -> ResultShape:
    size = [*shape.size]
    size[dim] *= 2
    return shape._replace(size=tuple(size))


def _together(first: torch.Tensor, second: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the tensor whose halves along ``dim`` these are, in their own memory if they lie so,
    each row or each column behind the other."""
    for a, b, along in ((first, second, dim), (first.t(), second.t(), 1 - dim)):
        rows, columns = a.shape
        size = (2 * rows, columns) if along == 0 else (rows, 2 * columns)
        begin = a.storage_offset() + (a.numel() if along == 0 else columns)
        is_even = a.stride() == b.stride() == (size[1], 1) and b.storage_offset() == begin
        if is_even and not is_captured(a) and _storage_of(a) == _storage_of(b):
            whole = a.as_strided(size, (size[1], 1))
            return whole if along == dim else whole.t()
    return torch.cat((first, second), dim)


def _storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


_ATTENTION_TENSORS = (
    *("bias", "alibi_slopes", "mask", "softmax_offset", "cu_seqlens_q", "cu_seqlens_kv"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "rng", "s_scale", "dp_scale"),
)
_ATTENTION_SIZES = ("max_seqlen_q", "max_seqlen_kv")


class Attention(Operator):
    """Attention, whose operator takes all tensors in one list: the inputs, the codes of those that
    are quantized; the keywords; the amax that is written; the scales of the quantized inputs.

    None stands for a keyword that the call does not have. ``sizes`` are None, not empty, where a
    call has none: a package of AOTInductor cannot pass an empty list of numbers.
    """

    def flat(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
        """Return the tensors and the sizes of a call."""
        tensors = [x.data if isinstance(x, Operand) else x for x in arguments]
        tensors += [keywords.get(name) for name in (*_ATTENTION_TENSORS, *self._recorded)]
        tensors += [x.scale_inv for x in arguments if isinstance(x, Operand)]
        return [tensors, [keywords[x] for x in _ATTENTION_SIZES if x in keywords] or None]

    def call(self, desc: Any, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the inputs and the keywords of a call."""
        tensors, sizes = values
        is_input = [each.kind is not Parameter.KEYWORD_ONLY for each in self._record.arguments]
        names = (*_ATTENTION_TENSORS, *self._recorded)
        inputs, rest = list(tensors[: sum(is_input)]), tensors[sum(is_input) :]
        scales = iter(rest[len(names) :])
        is_backward = isinstance(desc, AttentionBackwardDesc)
        qkv = (desc.attention if is_backward else desc).qkv
        specs = (desc.grad_output, qkv, qkv, qkv) if is_backward else (qkv, qkv, qkv)
        for at, spec in enumerate(specs):
            if spec is not None:
                inputs[at] = Operand(inputs[at], next(scales))
        named = {name: x for name, x in zip(names, rest, strict=False) if x is not None}
        return inputs, named | dict(zip(_ATTENTION_SIZES, sizes or (), strict=False))


_KINDS = {
    **{"attention": Attention, "attention_backward": Attention},
    **{"fused": Fused, "grouped_gemm": GroupedProduct},
}

OPERATORS: dict[str, Operator] = {}
"""The operators by the name of the operation."""

for _record in dict.fromkeys(RECORDS.values()):
    OPERATORS.update(dict.fromkeys(_record.ops, _KINDS.get(_record.name, Operator)(_record)))


def call_of(operation: Operation) -> Callable[..., Any]:
    """Return the operator of ``operation`` as a callable of the backend API's signature."""
    return partial(OPERATORS[operation.desc.op], encode(operation))


# Seeds, dropout and errors of graphs


# Ordered, so that torch neither moves nor drops a draw whose seed only the backward graph uses, or
# nothing does: every later draw of the program would differ.
@define(
    "(int place) -> Tensor",
    lambda place: torch.empty(2, dtype=torch.int64, device="cpu"),
    tags=(torch.Tag.nondeterministic_seeded,),
    is_ordered=True,
)
def _draw_seed(place: int) -> torch.Tensor:
    return torch.randint(0, 2**62, (2,))


@define(
    "(Tensor x, int columns, str kind, str message) -> Tensor",
    lambda x, columns, kind, message: x.new_empty(*x.shape[:-1], columns),
)
def _refuse(x: torch.Tensor, columns: int, kind: str, message: str) -> torch.Tensor:
    raise getattr(errors, kind)(message)


_places = itertools.count()


def draw_seed() -> torch.Tensor:
    """Draw a seed and an offset, int64 ``[2]``, when the graph runs.

    ``place`` differs in each draw of a graph: torch would merge equal calls into one.
    """
    result: torch.Tensor = _draw_seed(next(_places))
    return result


def refuse(x: torch.Tensor, columns: int, error: errors.Fp8CoreError) -> torch.Tensor:
    """Return a tensor ``[..., columns]`` of a graph that raises ``error`` when it runs."""
    result: torch.Tensor = _refuse(x.detach(), columns, type(error).__name__, str(error))
    return result


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    """Run the body outside torch's transforms, so that all gradients of a batch get one mask."""
    # Not by its count of nestings: that is the thread's, and GPUs have a thread for backward.
    with without_keys(legacy_vmap), without_interpreters():
        yield


def _dropped(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    if x.is_meta:  # meta has no generator, and no values
        return x * 1
    seed, offset = (int(value) for value in rng)
    generator = torch.Generator(device=x.device)
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + offset + index) & (2**63 - 1))
    is_batched = is_legacy_batched(x)
    is_plain = not (is_batched or is_transform_active())
    with contextlib.nullcontext() if is_plain else _outside_transforms():
        noise = torch.rand(x.shape, generator=generator, device=x.device)
    kept_rate = 1 - p or 1  # nothing is kept where it is 0
    return x * ((noise >= p).to(x.dtype) / kept_rate)


@define(
    "(Tensor x, Tensor rng, int index, float p) -> Tensor",
    lambda x, rng, index, p: x.new_empty(x.shape),
)
def _drop(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    return _dropped(x, rng, index, p).contiguous()


def drop(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    """Zero elements of ``x`` with probability ``p`` and scale the rest by ``1 / (1 - p)``.

    ``rng`` int64 ``[2]`` is a seed and an offset; ``index`` tells apart the uses of one seed.
    """
    if is_captured(x):
        result: torch.Tensor = _drop(x, rng, index, p)
        return result
    return _dropped(x, rng, index, p)


@define(
    "(Tensor cos, Tensor sin) -> Tensor",
    lambda cos, sin: cos.new_empty(cos.shape, dtype=torch.float32),
)
def _angles(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.atan2(sin.float(), cos.float()).contiguous()


def angles_of(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the float32 angles of cosines and sines of one shape, in a graph with torch's bits: a
    compiler has an arc tangent of its own."""
    if not is_captured(cos):
        return torch.atan2(sin.float(), cos.float())
    result: torch.Tensor = _angles(cos, sin)
    return result
