"""Delayed scaling in a converted model whose forward, or an autocast in it, raised."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import fp8core
from tests.conversion.models import CHOSEN, E4M3_MAX, converted, rows, same, state


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_forward_that_raises_in_an_autocast_is_forgotten(
    error: BaseException, is_used_before: bool
) -> None:
    own, smooth = converted(), converted()
    with fp8core.autocast(recipe=CHOSEN):
        if is_used_before:
            own(rows())
        own.error = error
        with pytest.raises(type(error)):
            own(rows(100.0))
        own.error = None
        own(rows(2.0))
    with fp8core.autocast(recipe=CHOSEN):
        for factor in (1.0, 2.0)[not is_used_before :]:
            smooth(rows(factor))
    assert same(state(own), state(smooth))


def test_an_autocast_that_raises_in_a_step_leaves_the_step_s_amaxes() -> None:
    class Retrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
            y: torch.Tensor = self.a(x)
            for factor in factors:
                with contextlib.suppress(KeyError), fp8core.autocast(recipe=CHOSEN):
                    self.a(x * factor)
                    raise KeyError
            return y

    own = Retrying()
    fp8core.convert(own, CHOSEN)
    own(rows(), (100.0, 1000.0))
    assert own.a.scale_fwd[0] == E4M3_MAX / rows().abs().max()
    assert torch.count_nonzero(own.a.amax_history_fwd[:, 0]) == 1


def test_a_step_that_raises_forgets_nothing_of_an_autocast_that_ended_in_it() -> None:
    class Twofold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a(x * 100)
            with fp8core.autocast(recipe=CHOSEN):
                self.a(x)
            raise KeyError

    own = Twofold()
    fp8core.convert(own, CHOSEN)
    with pytest.raises(KeyError):
        own(rows())
    assert own.a.amax_history_fwd[:, 0].tolist() == [0, 0, 0, rows().abs().max()]


def interrupted() -> nn.Module:
    own = converted()
    own(rows())
    own.error = KeyboardInterrupt()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):  # torch calls no hook for it
            own(rows(100.0))
    own.error = None
    return own


def test_a_checkpoint_after_an_interrupt_knows_nothing_of_it() -> None:
    own, smooth = interrupted(), converted()
    smooth(rows())
    assert same(own.state_dict(), smooth.state_dict())


def test_another_model_s_step_forgets_an_interrupted_one() -> None:
    own, other = interrupted(), converted()
    other(rows())
    assert not own.shared.amax_history_fwd[0].any()


def test_a_checkpoint_in_a_step_leaves_the_step_as_it_is() -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = converted()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner.shared(x)
            assert self.state_dict()["inner.shared.amax_history_fwd"][0].any()
            return y

    own = Saving()
    fp8core.unconvert(own.inner)
    fp8core.convert(own, CHOSEN)
    own(rows())
    assert own.inner.shared.scale_fwd[0] == E4M3_MAX / rows().abs().max()


def test_a_layer_called_alone_after_an_interrupt_is_a_step_by_itself() -> None:
    own, smooth = interrupted(), converted()
    smooth(rows())
    for model in (own, smooth):
        model.shared(rows(3.0))
    assert own.shared.scale_fwd[0] != 1.0
    assert same(state(own), state(smooth))
