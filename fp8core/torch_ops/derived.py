"""Operators of torch, derived from the records of the operations.

The first argument of each is an :class:`~fp8core.torch_ops.encoding.Operation` as text, the others
are those of the call as plain tensors: an operand is ``[data, scale_inv, global_scale_inv]``,
without those that are None. Results that are None are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from inspect import Parameter
from types import NoneType
from typing import Any, get_args, get_origin

import torch

from fp8core.backend_api import OpDesc, Operand, Quantized
from fp8core.backend_api.descriptors import CastShape
from fp8core.backend_api.record import RECORDS, Record, ResultShape, shape_of
from fp8core.torch_ops.counted import run_counted
from fp8core.torch_ops.definition import bound, define, settle_all
from fp8core.torch_ops.encoding import decode

_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    Operand: "Tensor[]",
    int: "SymInt",
}
_RECORDED = ("amax_out", "nonfinite_out")
"""Tensors that a call writes. The operator returns the new values behind its other results: torch
cannot make an operator functional that both returns and writes."""


class Operator:
    """An operation as an operator of torch, called as the contract calls the operation."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._names = tuple(argument.name for argument in record.arguments)
        self._is_cast = "nonfinite_out" in self._names
        self._is_tuple = get_origin(record.returns) is tuple
        self._is_list = self._is_tuple or self._is_cast
        results = get_args(record.returns) if self._is_tuple else (record.returns,)
        self._num_results = len(results)
        optional = [at for at, result in enumerate(results) if NoneType in get_args(result)]
        assert len(optional) < 2, f"{record.name}: which of several results is left out?"
        self._optional_result = optional[0] if optional else None
        register = define(record.schema or self._schema(), self._fake, name=record.name)
        self._operator = register(self._run)

    def __call__(self, text: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the results of the operation ``text``."""
        flat = self._flat(arguments, keywords)
        results = self._operator(text, *flat)
        if self._is_cast:
            return self._restored(text, list(results), arguments, keywords)
        if not self._is_tuple:
            return results
        results = tuple(results)
        if len(results) == self._num_results:
            return results
        return (*results[: self._optional_result], None, *results[self._optional_result :])

    def _schema(self) -> str:
        words = [f"{_TYPES[each.annotation]} {each.name}" for each in self._record.arguments]
        return f"({', '.join(['str operation', *words])}) -> Tensor{'[]' * self._is_list}"

    def _flat(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
        """Return the arguments of the operator, of those of the call."""
        if self._record.arguments[0].kind is Parameter.VAR_POSITIONAL:
            arguments = (list(arguments),)
        values = dict(zip(self._names, arguments, strict=False))
        values.update(keywords)
        flat = [values.pop(name, None) for name in self._record.order]
        if values:
            raise TypeError(f"{self._record.name} takes no {', '.join(values)}")
        return [tensors(value) if type(value) is Operand else value for value in flat]

    def _call(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the call, by position and by keyword, of those of the operator.

        Trailing arguments that are None are left out, by torch as well.
        """
        by_name = dict(zip(self._record.order, values, strict=False))
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for argument in self._record.arguments:
            value: Any = by_name.get(argument.name)
            if value is None and argument.default is None:
                continue
            if argument.annotation is Operand:
                value = Operand(*value)
            if argument.kind is Parameter.KEYWORD_ONLY:
                named[argument.name] = value
            elif argument.kind is Parameter.VAR_POSITIONAL:
                positional += value
            else:
                positional.append(value)
        return positional, named

    def _shapes(self, desc: OpDesc, positional: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return the shapes of the results as a tuple."""
        shapes = self._record.shapes(desc, *positional, **named)
        return shapes if self._is_tuple else (shapes,)

    def _fake(self, text: str, *values: Any) -> Any:
        operation = decode(text)
        positional, named = self._call(values)
        shapes = self._shapes(operation.desc, positional, named)
        device = _device(values)
        results = [
            shape.empty(device) for shape in _flat_shapes(shapes, named, operation.transposes)
        ]
        return results if self._is_list else results[0]

    def _run(self, text: str, *values: Any) -> Any:
        operation = decode(text)
        positional, named = self._call(values)
        shapes = self._shapes(operation.desc, positional, named)
        flat_shapes = _flat_shapes(shapes, named, operation.transposes)
        device = _device(values)
        run = bound(text, device)
        recorded: list[torch.Tensor | None] = []
        if self._is_cast:
            nonfinite = named.pop("nonfinite_out", None)
            if "amax_out" in named:
                named["amax_out"] = named["amax_out"].clone()
            results, count = run_counted(run, positional, named, nonfinite, device)
            recorded = [named.get("amax_out"), count]
        else:
            results = run(*positional, **named)
        results = results if self._is_tuple else (results,)
        flat = _flat_results(results, shapes, operation.transposes)
        settled = settle_all([*flat, *recorded], flat_shapes)
        return settled if self._is_list else settled[0]

    def _restored(
        self, text: str, flat: list[torch.Tensor], arguments: Any, keywords: dict[str, Any]
    ) -> Any:
        """Return the results of a cast, of those of the operator."""
        for name in reversed(_RECORDED):  # the last result first
            if keywords.get(name) is not None:
                keywords[name].copy_(flat.pop())
        operation = decode(text)
        rest = iter(flat)
        results = tuple(
            _quantized(shape, rest, operation.transposes)
            if isinstance(shape, CastShape)
            else None
            if shape is None
            else next(rest)
            for shape in self._shapes(operation.desc, arguments, keywords)
        )
        return results if self._is_tuple else results[0]


def tensors(operand: Operand | None) -> list[torch.Tensor]:
    """Return the tensors of an operand."""
    return [tensor for tensor in operand or () if tensor is not None]


def _flat_shapes(
    shapes: Iterable[Any], named: dict[str, Any], transposes: bool
) -> list[ResultShape]:
    """Return the shapes of the tensors that the operator returns."""
    flat: list[ResultShape] = []
    for shape in shapes:
        if isinstance(shape, CastShape):
            flat += [*shape.rowwise(), *shape.columnwise(transposes)]
        elif shape is not None:
            flat.append(shape)
    return [*flat, *(shape_of(named[name]) for name in _RECORDED if name in named)]


def _flat_results(
    results: Iterable[Any], shapes: Iterable[Any], transposes: bool
) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for result, shape in zip(results, shapes, strict=True):
        if isinstance(shape, CastShape):
            flat += tensors(result.rowwise)
            flat += [] if shape.has_view(transposes) else tensors(result.columnwise)
        elif shape is not None:
            flat.append(result)
    return flat


def _quantized(shape: CastShape, flat: Iterator[torch.Tensor], transposes: bool) -> Quantized:
    """Return the operands of a cast, whose tensors are the next of ``flat``."""
    rowwise = [next(flat) for _ in shape.rowwise()]
    columnwise = [next(flat) for _ in shape.columnwise(transposes)]
    if shape.has_view(transposes):
        columnwise = [tensor.t() for tensor in rowwise]
    return Quantized(*(Operand(*side) if side else None for side in (rowwise, columnwise)))


def _device(values: Sequence[Any]) -> torch.device:
    first = values[0]
    device: torch.device = (first if isinstance(first, torch.Tensor) else first[0]).device
    return device


OPERATORS: dict[str, Operator] = {}
"""The derived operators by the name of the operation."""

for _record in dict.fromkeys(RECORDS.values()):
    OPERATORS.update(dict.fromkeys(_record.ops, Operator(_record)))
