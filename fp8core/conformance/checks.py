"""The checks of one backend: each law for each descriptor that the backend supports."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8core.backend_api import OPS, OPTIONAL_OPS, OpDesc, QuantizeByAmaxDesc
from fp8core.conformance.catalogue import CatalogueEntry, catalogue
from fp8core.conformance.subject import Subject

BY_AMAX = "quantize by amax"
"""The name under which laws are about ``quantize`` of a QuantizeByAmaxDesc: it takes an argument
more, so that laws about ``quantize`` cannot call it."""

EVERY_OP = (*OPS, *OPTIONAL_OPS, BY_AMAX)
FUSED = tuple(op for op in EVERY_OP if op.endswith("_quantize"))
BACKEND = "backend"


@dataclass(frozen=True, slots=True)
class Law:
    """A test of the kit: the number of its law, its name, and the operations it is about.

    ``test(subject, desc)`` raises :class:`fp8core.conformance.compare.Broken`, or returns the worst
    error as a share of the allowed error, None if it allows none. Without ``ops`` the test is about
    the backend as a whole: ``test(subject)``. ``is_strict``: only strict mode runs it. ``is_core``:
    ``fp8core doctor`` runs it too, as it shows whether the operation computes what it should.
    """

    number: int
    name: str
    ops: tuple[str, ...]
    meaning: str
    test: Callable[..., float | None]
    applies: Callable[..., bool]
    is_strict: bool
    is_core: bool

    @property
    def full_name(self) -> str:
        """``law4_gemm_adds_the_bias``."""
        return f"law{self.number}_{self.name}"


LAWS: dict[str, Law] = {}
"""Every law's tests by name, in the order of definition; the package ``laws`` fills it."""


def law(
    number: int,
    *ops: str,
    applies: Callable[..., bool] = lambda desc: True,
    is_strict: bool = False,
    is_core: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., float | None]]:
    """Add a function to the kit's tests, for those descriptors of ``ops`` that ``applies`` accepts.

    The function's name becomes part of the check ids, the first line of its docstring is printed
    with a failure. A function may yield errors as shares of the allowed ones, of which the law's
    test returns the largest.
    """

    def add(function: Callable[..., Any]) -> Callable[..., float | None]:
        name = function.__name__
        assert name not in LAWS, name
        meaning = (function.__doc__ or "").strip().partition("\n")[0]
        test = _largest_of(function) if inspect.isgeneratorfunction(function) else function
        LAWS[name] = Law(number, name, ops, meaning, test, applies, is_strict, is_core)
        return test

    return add


def _largest_of(shares: Callable[..., Iterator[float]]) -> Callable[..., float]:
    @functools.wraps(shares)
    def test(*arguments: Any) -> float:
        return max(shares(*arguments), default=0.0)

    return test


class Check(NamedTuple):
    """A test of one descriptor; ``check.run()`` is the test."""

    law: Law
    op: str
    label: str
    run: Callable[[], float | None]

    @property
    def id(self) -> str:
        """``law4_gemm_adds_the_bias/mxfp8.fprop.bfloat16.bfloat16``."""
        return f"{self.law.full_name}/{self.label}"


def op_of(desc: OpDesc) -> str:
    """Return the name of the laws' operation that ``desc`` describes."""
    return BY_AMAX if isinstance(desc, QuantizeByAmaxDesc) else desc.op


class Support(NamedTuple):
    """How many of an operation's descriptors in the catalogue the backend supports.

    ``known`` counts all of them; ``reasons`` counts the backend's answers for the others.
    """

    op: str
    supported: int
    known: int
    reasons: dict[str, int]


def supported(subject: Subject) -> list[Support]:
    """Return the backend's support of every operation."""
    support = []
    for op in EVERY_OP:
        entries = [entry for entry in catalogue() if op_of(entry.desc) == op]
        reasons: dict[str, int] = {}
        for reason in (subject.refuses(entry.desc) for entry in entries):
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + 1
        support.append(Support(op, len(entries) - sum(reasons.values()), len(entries), reasons))
    return support


def checks(
    subject: Subject, laws: Collection[Law], entries: Sequence[CatalogueEntry] | None = None
) -> Iterator[Check]:
    """Yield a check of each of ``laws`` for each supported descriptor that the law is about.

    ``entries`` are the descriptors to check, the whole :func:`catalogue` by default. All checks of
    one descriptor follow one another, so that results shared by them can be dropped early.
    """
    declared = [
        entry
        for entry in (catalogue() if entries is None else entries)
        if subject.refuses(entry.desc) is None
    ]
    for each in laws:
        if not each.ops:
            yield Check(each, BACKEND, BACKEND, _bound(each, subject))
    of_op = {op: [each for each in laws if op in each.ops] for op in EVERY_OP}
    for label, desc in declared:
        op = op_of(desc)
        for each in of_op[op]:
            if each.applies(desc):
                yield Check(each, op, label, _bound(each, subject, desc))


def _bound(each: Law, subject: Subject, *desc: OpDesc) -> Callable[[], float | None]:
    return lambda: each.test(subject, *desc)
