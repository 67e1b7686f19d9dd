"""Only dense floating-point tensors are inputs, only floating-point dtypes parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, ops
from fp8core.modules.calls.base import LowPrecisionModule
from tests.device import DEVICE

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

LAYERS: dict[str, Callable[[], LowPrecisionModule]] = {
    "Linear": lambda: fp8core.Linear(32, 32),
    "LayerNormLinear": lambda: fp8core.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: fp8core.LayerNormMLP(32, 32),
    "GroupedLinear": lambda: fp8core.GroupedLinear(1, 32, 32),
    "LayerNorm": lambda: fp8core.LayerNorm(32),
    "RMSNorm": lambda: fp8core.RMSNorm(32),
    "Bias": lambda: ops.Bias(32),
    "Dropout": lambda: ops.Dropout(0.1),
    "GELU": ops.GELU,
    "Quantize": ops.Quantize,
    "Sequential": lambda: ops.Sequential(ops.GELU(), ops.Linear(32, 32)),
}


def input_of(kind: str) -> Any:
    x = torch.randn(4, 32)
    with warnings.catch_warnings():  # torch calls some of these layouts a prototype or deprecated
        warnings.simplefilter("ignore")
        makers: dict[str, Callable[[], Any]] = {
            "sparse_coo": x.to_sparse,
            "sparse_csr": x.to_sparse_csr,
            "mkldnn": x.to_mkldnn,
            "nested": lambda: torch.nested.nested_tensor([x, x]),
            "jagged": lambda: torch.nested.nested_tensor([x, x], layout=torch.jagged),
            "qint8": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            "complex64": lambda: x.to(torch.complex64),
            "float8_e4m3fn": lambda: x.to(torch.float8_e4m3fn),
            "None": lambda: None,
            "ndarray": x.numpy,
        }
        return makers[kind]()


MESSAGES = {
    "sparse_coo": r"input \[4, 32\] is in layout sparse_coo; expected a dense one, as to_dense",
    "sparse_csr": "layout sparse_csr",
    "mkldnn": "layout mkldnn",
    "nested": "input is a nested tensor; expected a dense one",
    "jagged": r"nested tensor.*values\(\) of a jagged",
    "qint8": "is torch.qint8; expected bfloat16",
    "complex64": "is torch.complex64",
    "float8_e4m3fn": "is torch.float8_e4m3fn",
    "None": "input is NoneType; expected a torch.Tensor",
    "ndarray": "input is ndarray",
}


def call(layer: LowPrecisionModule, x: Any) -> torch.Tensor:
    return layer(x, [4]) if isinstance(layer, fp8core.GroupedLinear) else layer(x)


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("name", LAYERS)
def test_another_kind_of_input_is_refused_by_name(name: str, recipe: str | None) -> None:
    for kind, message in MESSAGES.items():
        layer, x = LAYERS[name](), input_of(kind)
        before = list(layer.state_dict())
        with (
            fp8core.autocast(enabled=recipe is not None, recipe=recipe),
            pytest.raises(OperandError, match=message) as caught,
        ):
            call(layer, x)
        assert layer.label in str(caught.value)
        assert list(layer.state_dict()) == before


def test_another_kind_of_input_is_refused_under_torch_autocast_too() -> None:
    for kind in ["sparse_coo", "jagged", "float8_e4m3fn"]:
        with (
            torch.autocast(DEVICE.type, dtype=torch.bfloat16),
            pytest.raises(OperandError, match=kind[:6]),
        ):
            fp8core.Linear(32, 32)(input_of(kind))


def test_another_kind_of_extra_input_is_refused() -> None:
    layer = ops.Sequential(ops.AddExtraInput(), ops.Linear(32, 32))
    for kind, message in MESSAGES.items():
        with pytest.raises(OperandError, match=message.replace("input", "extra input 0")):
            layer(torch.randn(4, 32), input_of(kind))


def test_an_extra_input_on_another_device_is_refused() -> None:
    layer = ops.Sequential(ops.AddExtraInput(), ops.Linear(32, 32))
    with pytest.raises(OperandError, match=f"extra input 0 is on meta, the input on {DEVICE}"):
        layer(torch.randn(4, 32), torch.randn(4, 32, device="meta"))


DTYPES = [torch.int8, torch.bool, torch.qint8, torch.complex64, torch.float8_e4m3fn, "bfloat16"]
MADE: dict[str, Callable[[Any], LowPrecisionModule]] = {
    "Linear": lambda dtype: fp8core.Linear(32, 32, params_dtype=dtype),
    "LayerNormLinear": lambda dtype: fp8core.LayerNormLinear(32, 32, params_dtype=dtype),
    "LayerNormMLP": lambda dtype: fp8core.LayerNormMLP(32, 32, params_dtype=dtype),
    "GroupedLinear": lambda dtype: fp8core.GroupedLinear(1, 32, 32, params_dtype=dtype),
    "LayerNorm": lambda dtype: fp8core.LayerNorm(32, params_dtype=dtype),
    "RMSNorm": lambda dtype: fp8core.RMSNorm(32, dtype=dtype),
    "Bias": lambda dtype: ops.Bias(32, dtype=dtype),
}


def test_parameters_are_of_floating_point_dtypes() -> None:
    for name in MADE:
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            assert {own.dtype for own in MADE[name](dtype).parameters()} == {dtype}, name
        for other in DTYPES:
            with pytest.raises(
                OperandError, match=rf"params_dtype={other!r}: expected torch.bfloat16"
            ):
                MADE[name](other)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_without_a_recipe_a_sparse_weight_is_torchs() -> None:
    own: Any = fp8core.Linear(32, 32)
    weight = own.weight.detach().to_sparse_csr()
    own.weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.ones(32, 32, requires_grad=True)
    y = own(x)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight.to_dense(), own.bias))
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.to_dense().sum(0).expand(32, 32))
