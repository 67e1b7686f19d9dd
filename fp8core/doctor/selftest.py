"""A small test of each operation of a backend, which shows a faulty installation.

It runs the conformance kit's core laws for what the recipes need; the whole kit proves more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fp8core.backend_api import BackendSpec
from fp8core.conformance.catalogue import CatalogueEntry
from fp8core.conformance.checks import checks
from fp8core.conformance.compare import Broken, Unjudged
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import JUDGE, Subject
from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt, is_a
from fp8core.inspection.descriptors import Need

__all__ = ["Check", "check"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of the test of one operation.

    Attributes:
        op: the operation's name.
        cases: the number of descriptors that were run.
        worst: the largest error as a share of its bound; 0 is equal bit for bit, above 1 fails;
            None if no share is defined: a NaN, another shape, or no result.
        judged_by: what the law with that error, or the first one that is broken, demands.
        failure: why the test failed; None if it passed.
    """

    op: str
    cases: int
    worst: float | None
    judged_by: str
    failure: str | None = None


def check(
    spec: BackendSpec,
    op: str,
    device: torch.device,
    needs: Mapping[str, Sequence[Need] | Failure],
) -> Check | None:
    """Test ``op`` of the backend of ``spec`` on ``device``, None if it supports no use of it.

    ``needs`` are the uses of all operations by recipe, or how a recipe fails, which the matrix
    tells. Of each recipe the first and the last use are tested.
    """
    registry = plugins.load()
    chosen: dict[Need, None] = {}
    for uses in needs.values():
        supported = [
            need
            for need in (() if isinstance(uses, Failure) else uses)
            if need.desc.op == op and registry.unsupported(spec, need.desc, device) is None
        ]
        chosen |= dict.fromkeys((*supported[:1], *supported[-1:]))
    if not chosen:
        return None
    if JUDGE not in registry.backends:
        return Check(op, 0, None, "", f"the judge, backend {JUDGE!r}, is not installed")
    judge = registry.instance(registry.backends[JUDGE])
    return _held(op, Subject(spec.name, registry.instance(spec), device, judge, spec), [*chosen])


def _held(op: str, subject: Subject, needs: Sequence[Need]) -> Check:
    """Hold ``subject`` to the core laws for all of ``needs``, until one is broken."""
    laws = [law for law in LAWS.values() if law.is_core]
    entries = [CatalogueEntry(f"{need.step} {need.desc}".strip(), need.desc) for need in needs]
    worst, judged_by, judged = 0.0, "nothing: the judge knows none of its uses", set[str]()
    for each in checks(subject, laws, entries):
        share = attempt(each.run)
        if isinstance(share, Failure) and is_a(share.error, Unjudged):
            continue
        if isinstance(share, Failure):
            amount, text = _broken(share)
            return Check(op, len(judged), amount, each.law.meaning, f"{each.label}: {text}")
        if not judged or (share or 0.0) > worst:
            worst, judged_by = share or 0.0, each.law.meaning
        judged.add(each.label)
    return Check(op, len(judged), worst, judged_by)


def _broken(failure: Failure) -> tuple[float | None, str]:
    """Return the error as a share of its bound, where one is defined, and what is wrong."""
    error = failure.error
    if not isinstance(error, Broken):
        return None, str(failure)
    is_share = error.worst is not None and math.isfinite(error.worst)
    return error.worst if is_share else None, str(error)
