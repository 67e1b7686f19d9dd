"""Calls of operations: arguments for any descriptor, on the device under test.

The example of an operation lies with its laws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from fp8core.backend_api import NormDesc, OpDesc
from fp8core.conformance.compare import F64
from fp8core.conformance.subject import Size, Subject, on_cpu
from fp8core.torch_ops.private import pytree


class OpCall(NamedTuple):
    """The arguments of one call of an operation, which ``call.run(subject)`` runs.

    ``written`` holds the positions and the names of the arguments that the call may write.
    """

    desc: OpDesc
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    written: frozenset[str | int] = frozenset()

    def run(self, subject: Subject) -> Any:
        """Return the results of the backend under test."""
        return subject.run(self.desc, *self.arguments, **self.keywords)

    def judged(self, subject: Subject) -> Any:
        """Return the results of the judge, on the device under test."""
        return subject.here(subject.judged(self.desc, *self.arguments, **self.keywords))

    def protected(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments that the call must not write."""
        unwritten = [value for at, value in enumerate(self.arguments) if at not in self.written]
        return unwritten, {k: value for k, value in self.keywords.items() if k not in self.written}

    def again(self) -> OpCall:
        """Return the same call with copies of the arguments."""
        arguments, keywords = pytree.tree_map_only(
            torch.Tensor, lambda x: x.clone(), (self.arguments, self.keywords)
        )
        return self._replace(arguments=arguments, keywords=keywords)


class Case(NamedTuple):
    """The size and the values of a call's arguments.

    ``size`` is ``(rows, cols)`` of the tensors or ``(m, n, k)`` of the product; an empty one stands
    for each operation's default. Another ``seed`` gives other values.
    """

    seed: int = 0
    size: tuple[int, ...] = ()

    def seed_of(self, tensor: int) -> int:
        """Return the seed of the case's tensor number ``tensor``, which is below 100."""
        return tensor + 100 * self.seed


ORDINARY = Case()
POINTWISE = (9, 70)


Example: TypeAlias = Callable[[Subject, Any, Case], OpCall]
_Example = TypeVar("_Example", bound=Example)

_EXAMPLES: dict[type, Example] = {}


def example(*descs: type) -> Callable[[_Example], _Example]:
    """Have the decorated function make the calls of descriptors of these classes."""

    def add(function: _Example) -> _Example:
        _EXAMPLES.update(dict.fromkeys(descs, function))
        return function

    return add


def exact(subject: Subject, desc: OpDesc, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what the judge computes in float64, and the arguments in it, on the CPU."""
    wide: tuple[Any, ...] = pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, on_cpu(arguments)
    )
    return subject.judged(_wide(desc), *wide), wide


def _wide(desc: Any) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(desc):
        value = getattr(desc, field.name)
        if field.name in ("dtype", "out_dtype"):
            changes[field.name] = F64
        elif isinstance(value, NormDesc):
            changes[field.name] = _wide(value)
    return dataclasses.replace(desc, **changes)


def arguments(subject: Subject, desc: OpDesc, case: Case = ORDINARY) -> OpCall:
    """Return a call of ``desc``; the default has odd sizes, and zeros and -0 among the values."""
    return _EXAMPLES[type(desc)](subject, desc, case)


def calls_of(subject: Subject, desc: OpDesc, *sizes: Size) -> Iterator[OpCall]:
    """Yield a call in each of ``sizes``, or in each that ``subject`` gives for the operation."""
    for size in subject.sizes(desc.op, *sizes):
        yield arguments(subject, desc, Case(size=size))
