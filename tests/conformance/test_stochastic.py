"""Stochastic rounding is judged in distribution: any generator will do, any bias will not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.backend_api import QuantizeDesc
from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.compare import Broken
from fp8core.conformance.laws import quantize as stochastic
from fp8core.conformance.subject import Subject
from fp8core_backends.reference import rounding
from fp8core_backends.reference.backend import ReferenceBackend
from fp8core_backends.reference.quantize import quantize

DESC = next(entry.desc for entry in catalogue() if entry.label == "nvfp4.grad_output.bfloat16")

Noise = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
PLAIN = rounding._noise


class Noisy(ReferenceBackend):
    """Rounds by other noise than the reference."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounding, "_noise", self._noise)
            return quantize(desc, x, *groups, **given)


def subject(noise: Noise) -> Subject:
    return Subject("noisy", Noisy(noise), torch.device("cpu"), ReferenceBackend())


def test_another_generator_holds() -> None:
    other = subject(lambda x, rng, dim: PLAIN(x, rng * 7919 + 5, dim))
    worst = stochastic.stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(other, DESC)
    assert worst is not None
    assert 0 < worst < 0.7


@pytest.mark.parametrize(
    "noise",
    [
        lambda x, rng, dim: torch.full(x.shape, 0.5),
        lambda x, rng, dim: torch.ones(x.shape),
        lambda x, rng, dim: PLAIN(x, rng, dim) * 0.9,
        lambda x, rng, dim: PLAIN(x, rng, dim) ** 1.4,
    ],
    ids=["to the nearest", "towards zero", "a tenth too often up", "skewed"],
)
def test_biased_rounding_is_broken(noise: Noise) -> None:
    with pytest.raises(Broken, match="mean of the elements"):
        stochastic.stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(subject(noise), DESC)


@pytest.mark.parametrize("ignored", [0, 1], ids=["seed", "offset"])
def test_rounding_that_ignores_its_rng_is_broken(ignored: int) -> None:
    def noise(x: torch.Tensor, rng: torch.Tensor, dim: int) -> torch.Tensor:
        own = rng.clone()
        own[ignored] = 0
        return PLAIN(x, own, dim)

    with pytest.raises(Broken, match=r"gives the codes of \(7, 9\)"):
        stochastic.stochastic_rounding_follows_seed_and_offset(subject(noise), DESC)


def test_rounding_that_draws_from_torchs_generator_is_broken() -> None:
    drawing = subject(lambda x, rng, dim: torch.rand(x.shape))
    with pytest.raises(Broken):
        stochastic.stochastic_rounding_repeats_with_the_same_rng(drawing, DESC)
