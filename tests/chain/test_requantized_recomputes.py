"""``requantize_weights=True`` in layers that a checkpoint runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fp8core
from fp8core import autocast
from tests.chain.requantizing import (
    CURRENT,
    assert_same,
    layer,
    recipes,
    values,
)

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_a_checkpoint_of_torch_gives_the_same(name: str) -> None:
    held, again = recipes(name)

    def grads(chosen: Any, checkpoints: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        own, found = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), []
        fp8core.convert(own, chosen)
        call = torch.utils.checkpoint.checkpoint
        for seed in range(3):
            x = values(seed)
            y = call(own, x, use_reentrant=False) if checkpoints else own(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        return [*found, *(one.grad for one in own.parameters()), *own.buffers()]

    want = grads(held, False)
    assert_same(grads(again, True), want)
    assert_same(grads(again, False), want)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_checkpoint_of_microbatches_uses_what_is_kept(name: str, use_reentrant: bool) -> None:
    def grads(chosen: Any) -> list[torch.Tensor]:
        own, x, is_first = layer(), values(), True

        def run(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = own(x, is_first_microbatch=is_first)
            return y

        outputs = []
        for is_first in (True, False):  # noqa: B007  run reads it
            with autocast(recipe=chosen):
                outputs.append(fp8core.checkpoint(run, x, use_reentrant=use_reentrant))
        for y in outputs:
            y.square().sum().backward()
        return [x.grad, own.weight.grad, *own.buffers()]  # type: ignore[list-item]  # both have one

    held, again = recipes(name)
    assert_same(grads(again), grads(held))


def test_a_recompute_outside_of_the_frozen_weights_of_its_forward_is_refused() -> None:
    """Forward saved the codes that the scope keeps, the recompute would save the weight."""
    own = layer()
    with fp8core.frozen_weights(own), autocast(recipe=CURRENT):
        y = fp8core.checkpoint(own, values(), use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="saved during"):
        y.sum().backward()
