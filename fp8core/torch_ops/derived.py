"""Operators of torch, derived from the records of the operations.

The first argument of each is an :class:`~fp8core.torch_ops.encoding.Operation` as text, the others
are those of the call as plain tensors: an operand is ``[data, scale_inv, global_scale_inv]``,
without those that are None. Results that are None are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_origin

import torch

from fp8core.backend_api import Operand
from fp8core.backend_api.record import RECORDS, Record, ResultShape
from fp8core.torch_ops.definition import bound, define, settle_all
from fp8core.torch_ops.encoding import decode

_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    Operand: "Tensor[]",
    int: "SymInt",
}


class Operator:
    """An operation as an operator of torch, called as the contract calls the operation."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._names = tuple(argument.name for argument in record.arguments)
        self._is_tuple = get_origin(record.returns) is tuple
        results = get_args(record.returns) if self._is_tuple else (record.returns,)
        self._num_results = len(results)
        optional = [at for at, result in enumerate(results) if NoneType in get_args(result)]
        assert len(optional) < 2, f"{record.name}: which of several results is left out?"
        self._optional_result = optional[0] if optional else None
        self._operator = define(record.schema or self._schema(), self._fake, name=record.name)(
            self._run
        )

    def __call__(self, text: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the results of the operation ``text``."""
        values = dict(zip(self._names, arguments, strict=False))
        values.update(keywords)
        flat = [_flat(values.pop(name, None)) for name in self._record.order]
        if values:
            raise TypeError(f"{self._record.name} takes no {', '.join(values)}")
        results = self._operator(text, *flat)
        if not self._is_tuple:
            return results
        results = tuple(results)
        if len(results) == self._num_results:
            return results
        return (*results[: self._optional_result], None, *results[self._optional_result :])

    def _schema(self) -> str:
        words = [f"{_TYPES[each.annotation]} {each.name}" for each in self._record.arguments]
        return f"({', '.join(['str operation', *words])}) -> Tensor{'[]' * self._is_tuple}"

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
            if argument.kind is inspect.Parameter.KEYWORD_ONLY:
                named[argument.name] = value
            else:
                positional.append(value)
        return positional, named

    def _fake(self, text: str, *values: Any) -> Any:
        positional, named = self._call(values)
        shapes = self._record.shapes(decode(text).desc, *positional, **named)
        device = _device(values)
        results = [shape.empty(device) for shape in present(shapes)]
        return results if self._is_tuple else results[0]

    def _run(self, text: str, *values: Any) -> Any:
        positional, named = self._call(values)
        shapes = self._record.shapes(decode(text).desc, *positional, **named)
        results = bound(text, _device(values))(*positional, **named)
        settled = settle_all(present(results), present(shapes))
        return settled if self._is_tuple else settled[0]


def _flat(value: Any) -> Any:
    return [tensor for tensor in value if tensor is not None] if type(value) is Operand else value


def present(results: Any) -> list[Any]:
    """Return the results, or their shapes, that are not None."""
    every = (results,) if isinstance(results, torch.Tensor | ResultShape) else results
    return [result for result in every if result is not None]


def _device(values: Sequence[Any]) -> torch.device:
    first = values[0]
    device: torch.device = (first if isinstance(first, torch.Tensor) else first[0]).device
    return device


OPERATORS = {record.name: Operator(record) for record in RECORDS.values()}
"""The derived operators by name."""
