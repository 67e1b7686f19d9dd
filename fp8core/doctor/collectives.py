"""The self-tests over several ranks, a process for each: of collectives, and of a backend's laws.

All ranks run on this machine. Each collective moves numbers that every rank can compute for all the
others, so that its result is compared exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from fp8core.collectives import Communicator, of_group
from fp8core.conformance.compare import Broken, Unjudged
from fp8core.conformance.ranks import COLLECTIVES, LAWS, RankLaw, RankSubject, subject_of
from fp8core.conformance.subject import find
from fp8core.dispatch import plugins, process
from fp8core.dispatch.process import Ending, Record
from fp8core.doctor.findings import absent
from fp8core.errors import Fp8CoreError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one collective or law ended: ``failure`` says on which rank it is broken, ``skipped`` why
    no rank could judge it; both None if it holds."""

    name: str
    failure: str | None
    skipped: str | None = None


def records(
    backend: str | None, rank: int, size: int, device: torch.device, folder: str
) -> Iterator[Record]:
    """Yield the results of rank ``rank`` of ``size``: of its group's collectives, then, with a
    ``backend``, of its laws; each is announced before it.

    The ranks meet through a file in ``folder``.
    """
    yield {"begin": "joining the group"}
    with joined(rank, size, device, folder) as (communicator, mine):
        ranks = RankSubject(communicator, mine)
        for name, law in COLLECTIVES.items():
            yield from _result(name, law, ranks)
        if backend is None:
            return
        yield {"begin": "binding the backend"}
        ranks = subject_of(find(backend, str(mine)), communicator)
        for name, law in LAWS.items():
            yield from _result(name, law, ranks)


def _result(name: str, law: RankLaw, ranks: RankSubject) -> Iterator[Record]:
    yield {"begin": name}
    failure = skipped = None
    try:
        law(ranks)
    except Broken as error:
        failure = str(error)
    except Unjudged as error:
        skipped = str(error)
    yield {"collective": name, "failure": failure, "skipped": skipped}


@contextmanager
def joined(
    rank: int, size: int, device: torch.device, folder: str
) -> Iterator[tuple[Communicator, torch.device]]:
    """Join the group of ``size`` ranks that meet in ``folder``; its communicator, and the rank's
    device."""
    plugins.load()  # a plug-in may bring the device's collectives
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
        device = torch.device(device.type, rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=Path(folder, "rendezvous").as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=process.START_S),
    )
    yield of_group(), device
    dist.destroy_process_group()


def device_for(requested: torch.device | None, processes: int) -> torch.device:
    """Return the device type of the ranks: ``requested``, else the accelerator if there is one for
    each rank, else the CPU.

    Raises:
        Fp8CoreError: this machine has too few devices of the type that was asked for.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    if requested is None:
        has_enough = accelerator is not None and count >= processes
        return torch.device(accelerator.type if accelerator and has_enough else "cpu")
    reason = absent(torch.device(requested.type))
    if reason is None and requested.type != "cpu" and count < processes:
        reason = f"torch finds {count} {requested.type} devices here"
    if requested.type == "meta":
        reason = "meta tensors hold no values"
    if reason is not None:
        raise Fp8CoreError(
            f"--processes {processes} on {requested.type} needs one device a process: {reason}. "
            f"`fp8core doctor cpu --processes {processes}` tests the collectives of the CPU."
        )
    return torch.device(requested.type)


def apart(
    processes: int, device: torch.device, deadline: float, backend: str | None = None
) -> list[Outcome]:
    """Test every collective between ``processes`` processes, each on a ``device`` of its own; with
    a ``backend``, its laws too.

    A rank that crashes, or makes no progress for ``deadline`` seconds, is a failure of what it had
    begun; what comes later counts as not run.
    """
    with TemporaryDirectory() as folder:
        shared = ["--size", str(processes), "--device", device.type, "--folder", folder]
        shared += [] if backend is None else ["--backend", backend]
        commands = [["ranks", "--rank", str(rank), *shared] for rank in range(processes)]
        ranks = process.run_together(commands, deadline)
    skipped = {
        record["collective"]: record["skipped"]
        for seen, _ in reversed(ranks)
        for record in seen
        if record.get("skipped")
    }
    names = (*COLLECTIVES, *(() if backend is None else LAWS))
    return [Outcome(name, _failures(name, ranks), skipped.get(name)) for name in names]


def _failures(name: str, outcomes: Sequence[tuple[list[Record], Ending | None]]) -> str | None:
    """Return the failures of all ranks in one collective or law, None if there are none."""
    failures = [_failure(rank, name, *outcome) for rank, outcome in enumerate(outcomes)]
    return "; ".join(text for text in failures if text is not None) or None


def _failure(rank: int, name: str, seen: list[Record], ending: Ending | None) -> str | None:
    """Return the failure of one rank in one collective, None if it received what was due."""
    for record in seen:
        if record.get("collective") == name:
            said = record["failure"]
            return None if said is None else f"rank {rank}: {said}"
    step = process.last_step(seen)["begin"]
    text = "it did not run" if ending is None else ending.text
    return f"rank {rank}: {text}" if step == name else f"rank {rank}: not run, after {step}: {text}"


def laws_text(backend: str, processes: int, device: torch.device, outcomes: list[Outcome]) -> str:
    """Return the report in words."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [f"{backend} between {processes} processes on {device.type}"]
    for outcome in outcomes:
        ending = f"FAIL {outcome.failure}" if outcome.failure else "ok"
        ending = (
            f"not judged: {outcome.skipped}" if outcome.skipped and not outcome.failure else ending
        )
        lines.append(f"   {outcome.name.replace('_', ' '):{width}}  {ending}")
    broken = sum(outcome.failure is not None for outcome in outcomes)
    judged = sum(outcome.failure is None and outcome.skipped is None for outcome in outcomes)
    lines.append(
        f"{judged} hold, {broken} are broken, {len(outcomes) - broken - judged} not judged"
    )
    return "\n".join(lines)
