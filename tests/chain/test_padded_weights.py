"""A weight that does not change is padded once, where it is cast or first read, and not again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8core
from fp8core import GroupedLinear, Linear, autocast, frozen_weights
from fp8core.backend_api import Alignment, GemmDesc
from fp8core.dispatch import table
from fp8core_backends.reference.backend import ReferenceBackend

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

K, N, ROWS = 40, 24, 16
"""K and N are no multiples of 16."""
COPIES = {torch.ops.aten.constant_pad_nd, torch.ops.aten.copy_, torch.ops.aten.clone}


@pytest.fixture
def whole_blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the reference's products take the sizes that a GPU's take."""
    own = ReferenceBackend.alignment

    def alignment(self: ReferenceBackend, desc: GemmDesc) -> Alignment:
        needed = own(self, desc)
        return needed._replace(n=16, k=max(16, needed.k)) if desc.low_precision else needed

    monkeypatch.setattr(ReferenceBackend, "alignment", alignment)
    table.forget()
    yield
    table.forget()


class Copied(TorchDispatchMode):
    """Counts the copies of tensors of a weight's size, padded ones too, but of no other dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in COPIES and tuple(args[0].shape) in ((N, K), (K, N)):
            self.count += 1
        return func(*args, **(kwargs or {}))


def outputs(layer: Any, x: torch.Tensor, *splits: Any, **keywords: Any) -> torch.Tensor:
    """Return the layer's output twice; no weight is copied for the second."""
    layer(x, *splits, **keywords)
    again = {**keywords, "is_first_microbatch": False} if keywords else {}
    with Copied() as copied:
        y: torch.Tensor = layer(x, *splits, **again)
    assert copied.count == 0
    return y


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_a_weight_in_frozen_weights_is_padded_once(kind: str, name: str) -> None:
    layer = Linear(K, N) if kind == "linear" else GroupedLinear(2, K, N)
    x, splits = torch.randn(ROWS, K), () if kind == "linear" else ([5, 11],)
    with torch.no_grad(), autocast(recipe=name):
        expected = layer(x, *splits)
        with frozen_weights(layer):
            assert torch.equal(outputs(layer, x, *splits), expected)


def test_a_weight_of_microbatches_is_padded_once() -> None:
    for name in ["mxfp8", "nvfp4"]:
        layer, x = Linear(K, N), torch.randn(ROWS, K)
        with torch.no_grad(), autocast(recipe=name):
            expected = layer(x)
            assert torch.equal(outputs(layer, x, is_first_microbatch=True), expected), name


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", ["current", "rowwise", "block", "delayed"])
@pytest.mark.parametrize("kind", ["plain", "stored"])
def test_a_stored_weight_that_is_frozen_is_padded_once(kind: str, name: str) -> None:
    x = torch.randn(ROWS, K)
    with fp8core.quantized_model_init(enabled=kind == "stored", recipe=name):
        layer = Linear(K, N)
    with torch.no_grad(), autocast(recipe=name):
        expected = layer(x)
        with frozen_weights(layer):
            assert torch.equal(outputs(layer, x), expected)
        assert torch.equal(outputs(layer, x, is_first_microbatch=True), expected)


@pytest.mark.usefixtures("whole_blocks_of_16")
def test_a_stored_weight_is_padded_again_after_a_write() -> None:
    x = torch.randn(ROWS, K)
    with fp8core.quantized_model_init(recipe="current"):
        layer = Linear(K, N)
    with torch.no_grad(), autocast(recipe="current"):
        before = layer(x, is_first_microbatch=True)
        layer.weight.copy_(torch.randn(N, K))
        after = layer(x)
        assert not torch.equal(before, after)
        for first in (False, True):
            assert torch.equal(layer(x, is_first_microbatch=first), after)


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", ["current", "rowwise", "block"])
@pytest.mark.parametrize("kind", ["plain", "stored"])
def test_gradients_of_a_checkpoint_are_those_without(kind: str, name: str) -> None:
    with fp8core.quantized_model_init(enabled=kind == "stored", recipe=name):
        layer = Linear(K, N)
    grads = []
    for is_checkpoint in (False, True):
        layer.zero_grad()
        x = torch.linspace(-1, 1, ROWS * K).view(ROWS, K).requires_grad_()
        with autocast(recipe=name), frozen_weights(layer):
            y = fp8core.checkpoint(layer, x) if is_checkpoint else layer(x)
            y.sum().backward()
        grads.append((x.grad, layer.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
