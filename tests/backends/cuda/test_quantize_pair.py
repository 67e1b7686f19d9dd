"""A layer's input and weight quantized in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import QuantizeDesc
from tests.backends.cuda.cuda_cases import (
    DEVICE,
    backend,
    differs,
    spec,
    values,
)

pytestmark = pytest.mark.needs_accelerator("cuda")


def test_a_pair_of_strided_tensors() -> None:
    own = spec("current")
    desc = QuantizeDesc(torch.bfloat16, own, own)
    run = backend("cuda").bind(desc, DEVICE)
    x, w = (values("wide", (130, 264), torch.bfloat16) for _ in range(2))
    made = run.bind_pair(run)(x.t(), w[1:, 8:])
    for ours, theirs in zip(made, (run(x.t()), run(w[1:, 8:])), strict=True):
        assert differs(ours.rowwise, theirs.rowwise) is None
        assert differs(ours.columnwise, theirs.columnwise) is None


@pytest.mark.parametrize(
    "other",
    [
        QuantizeDesc(torch.float32, spec("current"), spec("current")),
        QuantizeDesc(torch.bfloat16, spec("delayed"), spec("delayed")),
        QuantizeDesc(torch.bfloat16, spec("current", "e5m2"), spec("current", "e5m2")),
        QuantizeDesc(torch.bfloat16, spec("square"), spec("square")),
        QuantizeDesc(torch.bfloat16, spec("current"), None),
    ],
    ids=str,
)
def test_what_differs_is_no_pair(other: QuantizeDesc) -> None:
    own = QuantizeDesc(torch.bfloat16, spec("current"), spec("current"))
    one, two = (backend("cuda").bind(desc, DEVICE) for desc in (own, other))
    assert one.bind_pair(two) is None
    assert two.bind_pair(one) is None


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_a_layer_has_the_bits_of_casts_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for is_apart in (False, True):
        torch.manual_seed(0)
        layer = fp8core.Linear(256, 384, params_dtype=torch.bfloat16, device=DEVICE)
        if is_apart:
            monkeypatch.setattr(
                fp8core.tensors.weights.CachingWeightQuantizer, "pair", lambda *arguments: None
            )
        x = torch.randn(64, 256, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        made = []
        for microbatch in (True, False, None, None):
            x.grad = None
            with fp8core.autocast(recipe=recipe.by_name(name)):
                y = layer(x, is_first_microbatch=microbatch)
            y.backward(torch.ones_like(y))
            made += [y.detach(), x.grad.clone(), layer.weight.grad.clone()]
        found.append([*made, *layer.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
