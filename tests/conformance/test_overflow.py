"""The overflow law is about every activation whose result can exceed the range of its input."""

from __future__ import annotations

import torch

from fp8core.backend_api import ACTIVATIONS, GATED, ActivationDesc
from fp8core.chain.activation import activation_shape
from fp8core.conformance.laws import LAWS
from fp8core_backends.reference.backend import ReferenceBackend

F64 = torch.float64
LARGE = 1e30


def test_law_is_about_activations_that_grow_faster_than_their_input() -> None:
    for name in ACTIVATIONS:
        desc = ActivationDesc(name, F64, F64, activation_shape(name).params)
        x = torch.full((1, 2 if name in GATED else 1), LARGE, dtype=F64)
        y = ReferenceBackend().bind(desc, torch.device("cpu"))(x)
        law = LAWS["activation_overflows_to_infinity"]
        assert law.applies(desc) == bool(y.abs().max() > 2 * LARGE), name
