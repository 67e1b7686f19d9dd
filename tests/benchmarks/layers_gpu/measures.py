"""What needs no turns: bytes held for backward, copies of weights, and errors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.benchmarks.layers_gpu.contestants import Contestant
from tests.benchmarks.layers_gpu.data import Data
from tests.benchmarks.measuring.contest import MIB
from tests.benchmarks.measuring.device import Device

__all__ = ["Held", "held_and_errors", "weight_copies_mib"]


class Held(NamedTuple):
    """What a forward leaves for backward, MiB without the output; and relative errors."""

    held_mib: float
    errors: dict[str, float]


def held_and_errors(
    contestant: Contestant, data: Data, exact: dict[str, torch.Tensor], device: Device
) -> Held:
    """Run a step; measure what it holds in its middle, and its results against ``exact``.

    An error is the Frobenius norm of the difference over that of the exact result.
    """
    x = data.x.detach().requires_grad_()
    for parameter in contestant.parameters.values():
        parameter.grad = None
    held, y = _held_bytes(contestant, x, device)
    y.backward(data.grad)
    results = {"y": y.detach(), "x": x.grad}
    results |= {name: parameter.grad for name, parameter in contestant.parameters.items()}
    for parameter in contestant.parameters.values():
        parameter.grad = None
    errors = {}
    for name, result in results.items():
        assert result is not None
        wanted = exact[name]
        errors[name] = ((result.float() - wanted).norm() / wanted.norm()).item()
    return Held(held / MIB, errors)


def weight_copies_mib(contestant: Contestant, data: Data, held_mib: float, device: Device) -> float:
    """Return the part of ``held_mib`` that does not grow with the rows of the input.

    It is that of a forward of half as many rows, twice, less the whole: copies of weights in the
    main, also states and workspaces of the layer.
    """
    x = data.x[: data.x.shape[0] // 2].detach().requires_grad_()
    contestant.forward(x).backward(data.grad[: x.shape[0]])  # first: what it makes once is made
    for parameter in contestant.parameters.values():
        parameter.grad = None
    x.grad = None
    half, y = _held_bytes(contestant, x, device)
    del y
    return 2 * half / MIB - held_mib


def _held_bytes(
    contestant: Contestant, x: torch.Tensor, device: Device
) -> tuple[int, torch.Tensor]:
    """Run forward; return the bytes it leaves besides its output, and the output."""
    device.clock.synchronize()
    before = device.allocated()
    y = contestant.forward(x)
    device.clock.synchronize()
    return device.allocated() - before - y.numel() * y.element_size(), y
