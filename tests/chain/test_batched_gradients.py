"""Many gradients of one output in one backward: torch's older vmap, and the one of torch.func."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from fp8core import ops
from fp8core.torch_ops import fused
from tests.chain.test_differentiable import LAYERS, D, K, layer_of, plain
from tests.pairs import turns


@pytest.mark.parametrize(("kind", "shape"), turns(LAYERS, [(K,), (3, K), (2, 3, K)]), ids=str)
def test_a_batch_of_gradients_equals_a_loop(kind: str, shape: tuple[int, ...]) -> None:
    layer, x = layer_of(kind), torch.randn(shape, dtype=D, requires_grad=True)
    wanted = [x, *layer.parameters()]
    y = plain(layer, x)
    batch = torch.randn(3, *y.shape, dtype=D)

    def back(dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, wanted, dy, retain_graph=True)

    want = [torch.stack(own) for own in zip(*map(back, batch), strict=True)]
    old = torch.autograd.grad(y, wanted, batch, is_grads_batched=True, retain_graph=True)
    for got in (old, vmap(back)(batch)):
        torch.testing.assert_close(list(got), want)


def test_a_batch_of_gradients_has_the_mask_of_its_forward() -> None:
    layer, x = ops.Sequential(ops.Bias(8), ops.Dropout(0.5)), torch.randn(2, 8, requires_grad=True)
    y = layer(x)
    (got,) = torch.autograd.grad(
        y, x, torch.eye(16).reshape(16, 2, 8), is_grads_batched=True, retain_graph=True
    )
    want = [
        torch.autograd.grad(y, x, own.reshape(2, 8), retain_graph=True)[0] for own in torch.eye(16)
    ]
    assert torch.equal(got, torch.stack(want))


def test_a_thread_of_autograd_that_entered_no_vmap_draws_the_mask_of_a_batch() -> None:
    """It has the dispatch keys of the thread that called backward, but not its count of levels."""
    x, rng = torch.randn(3, 8), torch.tensor([1, 2])
    want = fused.drop(x[0], rng, 0, 0.5) != 0
    with torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse("VmapMode")):
        made = fused.drop(torch._add_batch_dim(x, 0, 1), rng, 0, 0.5)
        with pytest.raises(RuntimeError, match="random operations inside of vmap"):
            torch.rand(1)
    assert torch.equal(torch._remove_batch_dim(made, 1, 3, 0) != 0, want.expand(3, 8))
