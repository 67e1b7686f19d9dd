"""``fp8core conformance NAME --processes N``: what a backend moves between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory

import torch

from fp8core.conformance.compare import Broken, Unjudged
from fp8core.conformance.ranks import LAWS, subject_of
from fp8core.conformance.subject import find
from fp8core.dispatch import process
from fp8core.dispatch.process import Record
from fp8core.doctor import collectives


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one law ended: ``failure`` says on which rank it is broken, ``skipped`` why no rank could
    judge it; both None if it holds."""

    name: str
    failure: str | None
    skipped: str | None = None


def records(
    backend: str, rank: int, size: int, device: torch.device, folder: str
) -> Iterator[Record]:
    """Yield the results of rank ``rank`` of ``size``: of its group's collectives, then of the laws
    of ``backend``; each is announced before it."""
    yield {"begin": "joining the group"}
    with collectives.joined(rank, size, device, folder) as (communicator, mine):
        yield from collectives.tested(communicator, mine)
        yield {"begin": "binding the backend"}
        subject = subject_of(find(backend, str(mine)), communicator)
        for name, law in LAWS.items():
            yield {"begin": name}
            failure = skipped = None
            try:
                law(subject)
            except Broken as error:
                failure = str(error)
            except Unjudged as error:
                skipped = str(error)
            yield {"collective": name, "failure": failure, "skipped": skipped}


def apart(backend: str, processes: int, device: torch.device, deadline: float) -> list[Outcome]:
    """Run the laws of ``backend`` between ``processes`` processes, each on a ``device`` of its own.

    A rank that crashes, or makes no progress for ``deadline`` seconds, breaks the law that it had
    begun; later ones count as not run.
    """
    with TemporaryDirectory() as folder:
        shared = ["--size", str(processes), "--device", device.type, "--folder", folder]
        ranks = [["laws", backend, "--rank", str(rank), *shared] for rank in range(processes)]
        outcomes = process.run_together(ranks, deadline)
    results = []
    for name in (*collectives.NAMES, *LAWS):
        failures = [collectives.failure(rank, name, *one) for rank, one in enumerate(outcomes)]
        found = "; ".join(one for one in failures if one is not None)
        skipped = next(
            (
                record["skipped"]
                for seen, _ in outcomes
                for record in seen
                if record.get("collective") == name and record.get("skipped")
            ),
            None,
        )
        results.append(Outcome(name, found or None, skipped))
    return results


def text(backend: str, processes: int, device: torch.device, outcomes: list[Outcome]) -> str:
    """Return the report in words."""
    width = max(len(one.name) for one in outcomes)
    lines = [f"{backend} between {processes} processes on {device.type}"]
    for one in outcomes:
        ending = f"FAIL {one.failure}" if one.failure else "ok"
        ending = f"not judged: {one.skipped}" if one.skipped and not one.failure else ending
        lines.append(f"   {one.name.replace('_', ' '):{width}}  {ending}")
    broken = sum(one.failure is not None for one in outcomes)
    judged = sum(one.failure is None and one.skipped is None for one in outcomes)
    lines.append(
        f"{judged} hold, {broken} are broken, {len(outcomes) - broken - judged} not judged"
    )
    return "\n".join(lines)


def as_json(outcomes: list[Outcome]) -> list[dict[str, str | None]]:
    """Return the outcomes as values of JSON."""
    return [asdict(one) for one in outcomes]
