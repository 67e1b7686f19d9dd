"""Turns: in each, every contestant runs one short slice, in a shuffled order.

A chip at its power limit has the clock that the kernels before left it. Slices of milliseconds in
an order that changes from turn to turn give every contestant the same mix of predecessors.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

SLICE_MS = 4.0
HOST_SLICE_MS, MOST_HOST_CALLS, HOST_TURNS = 8.0, 10, 40
TURNS_A_BATCH = 3
"""Turns between two waits for the device: fewer launches than its queue takes."""
FEWEST_TURNS = 10
SEED = 0

Calls = dict[str, Callable[[], object]]


class Event(Protocol):
    def record(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


class Clock(NamedTuple):
    """What tells the time: an event's maker, and the wait for the device."""

    event: Callable[[], Event]
    synchronize: Callable[[], None]
    now: Callable[[], float] = time.perf_counter


CUDA = Clock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.synchronize)


class Summary(NamedTuple):
    """Of the turns' times of a call, us."""

    median: float
    quartiles: tuple[float, float]
    range: tuple[float, float]
    turns: int


def summarize(values: Sequence[float]) -> Summary:
    """Return the summary of at least one value."""
    low = high = values[0]
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    middle = statistics.median(values)
    return Summary(middle, (low, high), (min(values), max(values)), len(values))


def orders(names: Sequence[str], seed: int = SEED) -> Iterator[list[str]]:
    """Return one shuffled order after the other; the same ones for the same seed."""
    source = random.Random(seed)
    while True:
        order = list(names)
        source.shuffle(order)
        yield order


def calls_a_slice(calls: Calls, clock: Clock = CUDA, slice_ms: float = SLICE_MS) -> dict[str, int]:
    """Return how many calls of each fill a slice of device time: at least one."""
    found = {}
    for name, call in calls.items():
        call()
        start, end = clock.event(), clock.event()
        start.record()
        for _ in range(3):
            call()
        end.record()
        clock.synchronize()
        milliseconds = max(start.elapsed_time(end) / 3, 1e-3)
        found[name] = max(1, round(slice_ms / milliseconds))
    return found


def graph_us(
    calls: Calls,
    seconds: float,
    between: Callable[[], object] = lambda: None,
    *,
    clock: Clock = CUDA,
) -> dict[str, list[float]]:
    """Return each turn's device time of a replay of each contestant, us, for about ``seconds``.

    Events around the slices tell it; nothing waits for the device within a batch of turns. A batch
    begins with an untimed replay, so that the host is ahead of the device. ``between`` runs after
    each batch, when the device has nothing to do.
    """
    counts = calls_a_slice(calls, clock)
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = orders(list(calls))
    end_at = clock.now() + seconds
    while _goes_on(times, end_at, clock):
        batch = [next(shuffled) for _ in range(TURNS_A_BATCH)]
        calls[batch[-1][-1]]()
        slices = [
            (name, counts[name], _run_slice(calls[name], counts[name], clock))
            for order in batch
            for name in order
        ]
        _collect(slices, times, clock)
        between()
    return times


def eager_us(
    calls: Calls,
    seconds: float,
    between: Callable[[], object] = lambda: None,
    *,
    clock: Clock = CUDA,
) -> dict[str, list[float]]:
    """Return each turn's time of a step among others like it, us, for about ``seconds``.

    Before a slice the host waits for the device and enqueues one untimed step: else a contestant
    whose host is slow would live on the lead that the one before it had left.
    """
    counts = calls_a_slice(calls, clock)
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = orders(list(calls))
    end_at = clock.now() + seconds
    while _goes_on(times, end_at, clock):
        slices = []
        for name in next(shuffled):
            clock.synchronize()
            calls[name]()
            slices.append((name, counts[name], _run_slice(calls[name], counts[name], clock)))
        _collect(slices, times, clock)
        between()
    return times


def _goes_on(times: dict[str, list[float]], end_at: float, clock: Clock) -> bool:
    return bool(times) and (clock.now() < end_at or min(map(len, times.values())) < FEWEST_TURNS)


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


def host_us(
    calls: Calls, between: Callable[[], object] = lambda: None, *, clock: Clock = CUDA
) -> dict[str, list[float]]:
    """Return each turn's time to enqueue a step, us.

    A slice has at most ten steps and begins on an idle device: the queue of launches does not fill
    up, so that the host never waits for the device.
    """
    counts = calls_a_slice(calls, clock, HOST_SLICE_MS)
    counts = {name: min(MOST_HOST_CALLS, max(2, count)) for name, count in counts.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = orders(list(calls))
    for _ in range(HOST_TURNS):
        for name in next(shuffled):
            call, count = calls[name], counts[name]
            clock.synchronize()
            start = clock.now()
            for _ in range(count):
                call()
            times[name].append((clock.now() - start) / count * 1e6)
        clock.synchronize()
        between()
    return times
