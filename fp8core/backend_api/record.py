"""The record of an operation: a function whose signature is the call, and whose result the shapes.

The function lies beside its descriptor, which is its first argument. The other arguments are those
of the contract's call, which need sizes and dtypes alone; so a record is also the fake kernel of
its operation. The names of operations, the union of descriptors and the operators of torch follow
from the records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import torch

Samples: TypeAlias = Callable[[torch.dtype], Mapping[str, Any]]
_Shapes = TypeVar("_Shapes", bound=Callable[..., Any])


class ResultShape(NamedTuple):
    """Size and dtype of a result; ``is_transposed``: it is the transposed view of a contiguous
    matrix. Sizes may be symbolic, and none depends on the values of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool = False

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return an unfilled tensor."""
        size = self.size[::-1] if self.is_transposed else self.size
        result = torch.empty(size, dtype=self.dtype, device=device)
        return result.t() if self.is_transposed else result


def shape_of(x: torch.Tensor, dtype: torch.dtype | None = None) -> ResultShape:
    """Return the shape of a result of the size of ``x``, in its dtype or in ``dtype``."""
    return ResultShape(tuple(x.shape), x.dtype if dtype is None else dtype)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which operations on ``dtype`` compute: float32, or float64 of float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Record(NamedTuple):
    """An operation. ``shapes(desc, *arguments, **keywords)`` are the shapes of its results, None
    for a result that the descriptor or the arguments leave out.

    Attributes:
        name: the operator's name in ``torch.ops.fp8core``.
        ops: the operation's name; of fusions, several.
        desc: the class of its descriptors.
        arguments: those of the call without the descriptor, with evaluated annotations.
        shapes: the function that was recorded.
        returns: what it returns: a shape, or a tuple of shapes.
        writes: the arguments that the call writes in place: lists of tensors, or ``out``, for a
            result. Another argument that is named ``*_out``, an amax or a count, is written too.
        is_optional: whether a backend may lack it.
        samples: of an operation for which no recipe asks: by name, descriptors for activations of
            a dtype, which stand for all in reports and for the conformance kit.
        schema: the operator's schema, where it is older than the record; else it is derived.
        order: the arguments by name in the order of the schema.
    """

    name: str
    ops: tuple[str, ...]
    desc: type[Any]
    arguments: tuple[inspect.Parameter, ...]
    shapes: Callable[..., Any]
    returns: Any
    writes: tuple[str, ...]
    is_optional: bool
    samples: Samples
    schema: str
    order: tuple[str, ...]


RECORDS: dict[str, Record] = {}
"""The records by the name of the operation."""


def operation(
    *ops: str,
    writes: tuple[str, ...] = (),
    is_optional: bool = False,
    samples: Samples = lambda dtype: {},
    schema: str = "",
    order: tuple[str, ...] = (),
) -> Callable[[_Shapes], _Shapes]:
    """Record the decorated function as an operation of its name, or of the names ``ops``."""

    def add(shapes: _Shapes) -> _Shapes:
        hints = get_type_hints(shapes)
        first, *rest = inspect.signature(shapes).parameters.values()
        arguments = tuple(argument.replace(annotation=hints[argument.name]) for argument in rest)
        record = Record(
            shapes.__name__,
            ops or (shapes.__name__,),
            hints[first.name],
            arguments,
            shapes,
            hints["return"],
            writes,
            is_optional,
            samples,
            schema,
            order or tuple(argument.name for argument in arguments),
        )
        RECORDS.update(dict.fromkeys(record.ops, record))
        return shapes

    return add
