"""Turns: in each, every contestant runs one short slice, in a shuffled order.

A chip at its power limit has the clock that the kernels before left it. Slices of milliseconds in
an order that changes from turn to turn give every contestant the same mix of predecessors.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tests.benchmarks.measuring.intervals import median_interval, ratios

__all__ = [
    "CUDA_CLOCK",
    "FEWEST_TURNS",
    "Calls",
    "Clock",
    "Event",
    "Stop",
    "calls_a_slice",
    "eager_us",
    "graph_us",
    "host_us",
    "orders",
    "round_us",
]

SLICE_MS = 4.0
HOST_SLICE_MS, FEWEST_HOST_CALLS, MOST_HOST_CALLS = 20.0, 2, 20
TURNS_A_BATCH = 3
"""Turns between two waits for the device: fewer launches than its queue takes."""
FEWEST_TURNS, MOST_TURNS = 10, 400
SEED = 0

Calls = dict[str, Callable[[], object]]


class Event(Protocol):
    def record(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


class Clock(NamedTuple):
    """What tells the time: an event's maker, and the wait for the device.

    ``agree(value)`` is the largest value of all processes that take the same turns, so that their
    slices have equally many calls and their turns end together; of one process its own.
    """

    event: Callable[[], Event]
    synchronize: Callable[[], None]
    now: Callable[[], float] = time.perf_counter
    agree: Callable[[float], float] = lambda value: value


CUDA_CLOCK = Clock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.synchronize)


@dataclass(frozen=True, slots=True)
class Stop:
    """When turns end: after ``seconds``, or as soon as they are enough.

    They are enough when the interval of each ratio of ``pairs`` is at most ``width`` of it wide.
    That asks for the spread of the ratios alone, never for their value, so stopping favors nobody.
    ``fewest`` turns come before either; :data:`FEWEST_TURNS` where it is None.
    """

    seconds: float
    pairs: tuple[tuple[str, str], ...] = ()
    width: float = 0.01
    fewest: int | None = None

    def is_reached(self, times: dict[str, list[float]], started: float, clock: Clock) -> bool:
        """Whether no further turn is needed; ``started`` by the clock."""
        turns = min(map(len, times.values()), default=MOST_TURNS)
        if turns < (FEWEST_TURNS if self.fewest is None else self.fewest):
            return False
        if turns >= MOST_TURNS:
            return True
        is_late = clock.now() - started >= self.seconds
        return bool(clock.agree(float(is_late or self._is_enough(times))))

    def _is_enough(self, times: dict[str, list[float]]) -> bool:
        pairs = [pair for pair in self.pairs if pair[0] in times and pair[1] in times]
        return bool(pairs) and all(
            median_interval(ratios(times[own], times[other])).relative_width <= self.width
            for own, other in pairs
        )


def orders(names: Sequence[str], seed: int = SEED) -> Iterator[list[str]]:
    """Return one shuffled order after the other; the same ones for the same seed."""
    source = random.Random(seed)
    while True:
        order = list(names)
        source.shuffle(order)
        yield order


def calls_a_slice(
    calls: Calls, clock: Clock = CUDA_CLOCK, slice_ms: float = SLICE_MS
) -> dict[str, int]:
    """Return how many calls of each fill a slice of device time: at least one."""
    counts = {}
    for name, call in calls.items():
        call()
        start, end = clock.event(), clock.event()
        start.record()
        for _ in range(2):
            call()
        end.record()
        clock.synchronize()
        milliseconds = clock.agree(max(start.elapsed_time(end) / 2, 1e-3))
        counts[name] = max(1, round(slice_ms / milliseconds))
    return counts


def graph_us(
    calls: Calls,
    stop: Stop,
    while_busy: Callable[[], object] = lambda: None,
    *,
    clock: Clock = CUDA_CLOCK,
) -> dict[str, list[float]]:
    """Return each turn's device time of a replay of each contestant, us.

    Events around the slices tell it; nothing waits for the device within a batch of turns. A batch
    begins with an untimed replay, so that the host is ahead of the device. ``while_busy`` runs in
    each batch when everything is enqueued.
    """
    counts = calls_a_slice(calls, clock)
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = orders(list(calls))
    started = clock.now()
    while calls and not stop.is_reached(times, started, clock):
        batch = [next(shuffled) for _ in range(TURNS_A_BATCH)]
        calls[batch[-1][-1]]()
        slices = [
            (name, counts[name], _run_slice(calls[name], counts[name], clock))
            for order in batch
            for name in order
        ]
        while_busy()
        _collect(slices, times, clock)
    return times


def eager_us(
    calls: Calls,
    stop: Stop,
    while_busy: Callable[[], object] = lambda: None,
    *,
    clock: Clock = CUDA_CLOCK,
) -> dict[str, list[float]]:
    """Return each turn's time of a step among others like it, us.

    Before a slice the host waits for the device and enqueues one untimed step: else a contestant
    whose host is slow would live on the lead that the one before it had left.
    """
    counts = calls_a_slice(calls, clock)
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = orders(list(calls))
    started = clock.now()
    while calls and not stop.is_reached(times, started, clock):
        slices = []
        for name in next(shuffled):
            clock.synchronize()
            calls[name]()
            slices.append((name, counts[name], _run_slice(calls[name], counts[name], clock)))
        while_busy()
        _collect(slices, times, clock)
    return times


def host_us(
    calls: Calls,
    stop: Stop,
    while_busy: Callable[[], object] = lambda: None,
    *,
    clock: Clock = CUDA_CLOCK,
) -> dict[str, list[float]]:
    """Return each turn's time to enqueue a step, us.

    A slice has at most twenty steps and begins on an idle device: the queue of launches does not
    fill up, so that the host never waits for the device. Each of two long steps begins so: one that
    reads a value of the device, as transformers does of its mask, would wait for the whole step
    before it. Untimed steps come first: what runs just
    after another library finds the processor's caches cold, which no training loop does.
    """
    counts = calls_a_slice(calls, clock, HOST_SLICE_MS)
    counts = {
        name: min(MOST_HOST_CALLS, max(FEWEST_HOST_CALLS, count)) for name, count in counts.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = orders(list(calls))
    started = clock.now()
    while calls and not stop.is_reached(times, started, clock):
        for name in next(shuffled):
            call, count = calls[name], counts[name]
            for _ in range(count // 2):
                call()
            spent = 0.0
            for at in range(count):
                if count <= FEWEST_HOST_CALLS or not at:
                    clock.synchronize()
                start = clock.now()
                call()
                spent += clock.now() - start
            times[name].append(spent / count * 1e6)
        while_busy()
        clock.synchronize()
    return times


def round_us(
    contestants: Mapping[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Return ``[median, least, most]`` over rounds of ``calls``, us a call on the host alone."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if at:  # the first round warms up
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {
        name: [round(of(own), 1) for of in (statistics.median, min, max)]
        for name, own in times.items()
    }


def _run_slice(call: Callable[[], object], count: int, clock: Clock) -> tuple[Event, Event]:
    start, end = clock.event(), clock.event()
    start.record()
    for _ in range(count):
        call()
    end.record()
    return start, end


def _collect(
    slices: Sequence[tuple[str, int, tuple[Event, Event]]],
    times: dict[str, list[float]],
    clock: Clock,
) -> None:
    clock.synchronize()
    for name, count, (start, end) in slices:
        times[name].append(start.elapsed_time(end) / count * 1e3)
