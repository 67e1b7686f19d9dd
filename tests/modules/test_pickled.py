"""Models and quantizers that an earlier version pickled: they load, and compute."""

from __future__ import annotations

import lzma
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from tests.device import DEVICE

FILE = Path(__file__).parents[1] / "golden" / "pickled_models.xz"
PICKLED: dict[str, bytes] = pickle.loads(lzma.decompress(FILE.read_bytes()))

ROWS = torch.linspace(-1, 1, 32 * 16).reshape(32, 16)
TOKENS = ROWS.reshape(16, 2, 16)
WIDE = torch.linspace(-1, 1, 32 * 32).reshape(32, 32)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "attention": (TOKENS.reshape(16, 2, 2, 8),) * 3,
    "converted": (ROWS,),
    "delayed": (ROWS,),
    "grouped_linear": (ROWS, [16, 16]),
    "layernorm": (ROWS,),
    "layernorm_linear": (ROWS,),
    "layernorm_mlp": (ROWS,),
    "linear": (ROWS,),
    "linear_parts": (ROWS,),
    "multihead_attention": (TOKENS,),
    "rmsnorm": (ROWS,),
    "sequential": (ROWS, ROWS, torch.tensor([16, 16])),
    "transformer_layer": (TOKENS,),
    **{name: (WIDE,) for name in PICKLED if name.startswith("quantized_")},
}


@pytest.mark.parametrize("name", PICKLED)
def test_a_pickle_of_an_earlier_version_loads(name: str) -> None:
    value = pickle.loads(PICKLED[name])
    again = pickle.loads(pickle.dumps(value))
    assert type(again) is type(value)
    if isinstance(value, torch.nn.Module):
        assert list(again.state_dict()) == list(value.state_dict())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_layer_of_an_earlier_version_takes_a_step(name: str) -> None:
    layer = pickle.loads(PICKLED[name]).to(DEVICE)
    _, is_stored, recipe_name = name.partition("quantized_")
    chosen = recipe.by_name(recipe_name) if is_stored else recipe.DelayedScaling(amax_history_len=2)
    with fp8core.autocast(recipe=chosen):
        result = layer(*ARGUMENTS[name])
    result = result[0] if isinstance(result, tuple) else result
    assert result.isfinite().all()
    if any(True for _ in layer.parameters()):
        result.float().sum().backward()
    lacking = [key for key, parameter in layer.named_parameters() if parameter.grad is None]
    assert lacking == []


def test_activations_of_an_earlier_version_compute() -> None:
    for activation in pickle.loads(PICKLED["activations"]):
        scales = (ROWS[:, 0],) * activation.num_extra_inputs
        assert activation(ROWS, *scales).isfinite().all()
