"""A contest: who takes part on a device, who does not run and why, and the turns that they take."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.benchmarks.measuring.device import Chip, Device, versions, without_collections
from tests.benchmarks.measuring.turns import Calls, Stop, eager_us, graph_us, host_us

__all__ = ["MIB", "Contest", "Unavailable", "step_of"]

T = TypeVar("T")
MIB = 2**20
TURNS = {"graph": graph_us, "eager": eager_us, "host": host_us}


class Unavailable(Exception):
    """A contestant does not compute what is measured, is not installed, or refuses it: says why."""


def _reason(error: Exception) -> str:
    """Return the type and the first line of an error, shortened."""
    if isinstance(error, Unavailable):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def step_of(
    forward: Callable[[Any], Any], x: Any, grad: Any, parameters: Sequence[Any]
) -> Callable[[], None]:
    """Return forward of ``x`` and backward of ``grad``, whose gradients replace the last ones."""

    def step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        forward(x).backward(grad)

    return step


@dataclass(slots=True)
class Contest:
    """Contestants on a device; ``refused`` says by name why one of them does not run."""

    device: Device
    refused: dict[str, str] = field(default_factory=dict)
    chip: Chip = field(default_factory=Chip)

    def enter(self, name: str, make: Callable[[], T]) -> T | None:
        """Return what ``make`` returns once the device has done its part; None if it fails.

        Whatever stops one contestant, the others take their turns.
        """
        try:
            entrant = make()
            self.device.clock.synchronize()  # an error of a kernel belongs to its contestant
        except Exception as error:  # noqa: BLE001  a peer raises what it likes; its line says so
            self._refuse(name, error)
            return None
        return entrant

    def _refuse(self, name: str, error: Exception) -> None:
        self.refused[name] = _reason(error)
        print(f"  {name} does not run: {self.refused[name]}", flush=True)

    def guarded(self, name: str, call: Callable[[], object]) -> Callable[[], None]:
        """Return ``call`` for turns: once it has raised, ``name`` is refused and nothing runs."""

        def run() -> None:
            if name in self.refused:
                return
            try:
                call()
            except Exception as error:  # noqa: BLE001  as in enter
                self._refuse(name, error)

        return run

    def capture(self, calls: Sequence[Callable[[], object]], count: int) -> Callable[[], object]:
        """Return the replay of a graph of ``count`` calls, of each of ``calls`` in turn.

        Raises:
            Unavailable: they cannot be captured.
        """

        def run() -> None:
            for number in range(count):
                calls[number % len(calls)]()

        replay = self.device.capture(run)
        if replay is None:
            raise Unavailable("cannot be captured in a graph")
        return replay

    def take(self, measure: str, calls: Calls, stop: Stop) -> dict[str, list[float]]:
        """Return each turn's time of each contestant, us: of replays for the measure ``graph``."""
        with without_collections():
            us = TURNS[measure](calls, stop, self.chip.sample, clock=self.device.clock)
        print(f"  {measure}: {max(map(len, us.values()), default=0)} turns", flush=True)
        return {name: [round(time, 3) for time in times] for name, times in us.items()}

    def peak_mib(self, step: Callable[[], object], before: int) -> float:
        """Return the most memory of a step over ``before`` bytes."""
        device = self.device
        device.clock.synchronize()
        device.forget_peak()
        step()
        device.clock.synchronize()
        return (device.peak() - before) / MIB

    def allocated(self) -> int:
        """Return the bytes that are left when garbage is collected."""
        gc.collect()
        return self.device.allocated()

    def conditions(self, *packages: str) -> dict[str, Any]:
        """Return the fields of a record that say how it was taken."""
        return {"chip": self.chip.summary(), "versions": versions(*packages)}
