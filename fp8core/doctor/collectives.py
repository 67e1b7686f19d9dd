"""The self-tests over several ranks, a process for each: of collectives, and of a backend's laws.

All ranks run on this machine. Each collective moves numbers that every rank can compute for all the
others, so that its result is compared exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist

from fp8core.collectives import Communicator, of_group
from fp8core.conformance.compare import Broken, Unjudged
from fp8core.conformance.ranks import LAWS, subject_of
from fp8core.conformance.subject import find
from fp8core.dispatch import plugins, process
from fp8core.dispatch.process import Ending, Record
from fp8core.doctor.findings import absent
from fp8core.errors import Fp8CoreError

ROWS, COLUMNS = 6, 40
_NUMBERS = 31  # sums of so few integers up to this are exact in every dtype
_CODES = 120  # byte patterns from 0 on, none of which is a NaN of float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one collective or law ended: ``failure`` says on which rank it is broken, ``skipped`` why
    no rank could judge it; both None if it holds."""

    name: str
    failure: str | None
    skipped: str | None = None


class _Case(NamedTuple):
    """A collective: ``run(communicator, x)`` and, from the tensors of all ranks, what is due."""

    name: str
    dtype: torch.dtype
    run: Callable[[Communicator, torch.Tensor], torch.Tensor]
    due: Callable[[Sequence[torch.Tensor], int], torch.Tensor]
    rows: Callable[[int, int], int] = lambda rank, size: ROWS * size


def _sizes(rank: int, size: int) -> list[int]:
    """Return how many rows ``rank`` sends to each rank: none to one of them."""
    return [(rank + other) % size for other in range(size)]


def _exchange(communicator: Communicator, x: torch.Tensor) -> torch.Tensor:
    rank, size = communicator.rank, communicator.size
    receive = [_sizes(other, size)[rank] for other in range(size)]
    return communicator.exchange(x, _sizes(rank, size), receive).wait()


def _exchanged(inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    parts = [torch.split(x, _sizes(r, len(inputs)))[rank] for r, x in enumerate(inputs)]
    return torch.cat(parts)


def _added(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.double() for x in inputs]).sum(0).to(inputs[0].dtype)


_CASES = (
    _Case(
        "gather of float8_e4m3fn",
        torch.float8_e4m3fn,
        lambda communicator, x: communicator.gather(x).wait(),
        lambda inputs, rank: torch.cat([x.view(torch.uint8) for x in inputs]),
    ),
    _Case(
        "gather of bfloat16",
        torch.bfloat16,
        lambda communicator, x: communicator.gather(x).wait(),
        lambda inputs, rank: torch.cat(list(inputs)),
    ),
    _Case(
        "scatter of sums in bfloat16",
        torch.bfloat16,
        lambda communicator, x: communicator.scatter(x).wait(),
        lambda inputs, rank: _added(inputs).chunk(len(inputs))[rank],
    ),
    _Case(
        "sum of float32",
        torch.float32,
        lambda communicator, x: communicator.sum(x).wait(),
        lambda inputs, rank: _added(inputs),
    ),
    _Case(
        "maximum of float32",
        torch.float32,
        lambda communicator, x: communicator.max(x).wait(),
        lambda inputs, rank: torch.stack(list(inputs)).amax(0),
    ),
    _Case(
        "exchange of float8_e4m3fn",
        torch.float8_e4m3fn,
        _exchange,
        lambda inputs, rank: _exchanged([x.view(torch.uint8) for x in inputs], rank),
        lambda rank, size: sum(_sizes(rank, size)),
    ),
)


def _input(case: _Case, rank: int, size: int) -> torch.Tensor:
    rows = case.rows(rank, size)
    numbers = torch.arange(rows * COLUMNS).reshape(rows, COLUMNS) * 7 + 11 * rank
    if case.dtype.itemsize == 1:
        return (numbers % _CODES).to(torch.uint8).view(case.dtype)
    return (numbers % _NUMBERS - _NUMBERS // 2).to(case.dtype)


NAMES = tuple(case.name for case in _CASES)
"""The tested collectives, in their order."""


def records(
    backend: str | None, rank: int, size: int, device: torch.device, folder: str
) -> Iterator[Record]:
    """Yield the results of rank ``rank`` of ``size``: of its group's collectives, then, with a
    ``backend``, of its laws; each is announced before it.

    The ranks meet through a file in ``folder``.
    """
    yield {"begin": "joining the group"}
    with joined(rank, size, device, folder) as (communicator, mine):
        for case in _CASES:
            yield {"begin": case.name}
            inputs = [_input(case, of, size) for of in range(size)]
            received = case.run(communicator, inputs[rank].to(mine)).cpu()
            yield {"collective": case.name, "failure": _compare(received, case.due(inputs, rank))}
        if backend is None:
            return
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


def _compare(received: torch.Tensor, due: torch.Tensor) -> str | None:
    if due.dtype is torch.uint8:
        received = received.view(torch.uint8)
    if received.shape != due.shape:
        return f"received {list(received.shape)} instead of {list(due.shape)}"
    wrong = int((received != due).sum())
    return f"{wrong} of {math.prod(due.shape)} elements are wrong" if wrong else None


def device_for(asked: torch.device | None, processes: int) -> torch.device:
    """Return the device type of the ranks: ``asked``, else the accelerator if there is one for each
    rank, else the CPU.

    Raises:
        Fp8CoreError: this machine has too few devices of the type that was asked for.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    if asked is None:
        has_enough = accelerator is not None and count >= processes
        return torch.device(accelerator.type if accelerator and has_enough else "cpu")
    reason = absent(torch.device(asked.type))
    if reason is None and asked.type != "cpu" and count < processes:
        reason = f"torch finds {count} {asked.type} devices here"
    if asked.type == "meta":
        reason = "meta tensors hold no values"
    if reason is not None:
        raise Fp8CoreError(
            f"--processes {processes} on {asked.type} needs one device a process: {reason}. "
            f"`fp8core doctor cpu --processes {processes}` tests the collectives of the CPU."
        )
    return torch.device(asked.type)


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
    names = (*NAMES, *(() if backend is None else LAWS))
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
