"""Inputs that do not fit raise a clear error and change nothing; NaN and inf spread no further."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import (
    Fp8CoreError,
    GroupedLinear,
    Linear,
    OperandError,
    UnsupportedError,
    autocast,
    ops,
    recipe,
)
from fp8core.modules.calls.base import LowPrecisionModule
from tests.device import DEVICE
from tests.pairs import pairs

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


RECIPES = {"none": None, **{name: recipe.by_name(name) for name in recipe.names()}}
DELAYED = recipe.DelayedScaling(amax_history_len=4)
K, N = 32, 16


def call(layer: LowPrecisionModule, x: Any, chosen: recipe.Recipe | None) -> torch.Tensor:
    with autocast(enabled=chosen is not None, recipe=chosen):
        return layer(x) if isinstance(layer, Linear) else layer(x, [x.shape[0], 0])


def build(kind: str, **arguments: Any) -> LowPrecisionModule:
    if kind == "linear":
        return Linear(K, N, **arguments)
    return GroupedLinear(2, K, N, **arguments)


WRONG = {
    "wrong k": (torch.randn(4, K + 1), r"has k=33, but the weight is \[16, 32\]"),
    "no dimension": (torch.tensor(1.0), "has no dimension"),
    "integers": (torch.zeros(4, K, dtype=torch.int64), "is torch.int64; expected bfloat16"),
    "booleans": (torch.zeros(4, K, dtype=torch.bool), "is torch.bool"),
    "complex": (torch.zeros(4, K, dtype=torch.complex64), "is torch.complex64"),
    "another dtype": (torch.randn(4, K).bfloat16(), "is torch.bfloat16, the weight torch.float32"),
    "another device": (
        torch.empty(4, K, device="meta"),
        f"input is on meta, the layer on {DEVICE}",
    ),
}


def test_an_input_that_does_not_fit_is_refused() -> None:
    for name, kind, case in pairs(
        ["none", "current", "delayed"],
        ["linear", "grouped"],
        [case for case in WRONG if case != "no dimension"],
    ):
        x, message = WRONG[case]
        with pytest.raises(OperandError, match=message):
            call(build(kind), x, RECIPES[name])


def test_an_input_without_dimension_is_refused() -> None:
    x, message = WRONG["no dimension"]
    with pytest.raises(OperandError, match=message):
        Linear(K, N)(x)


def test_a_refused_input_leaves_the_layer_as_it_was() -> None:
    for case in [case for case in WRONG if case != "no dimension"]:
        layer = build("linear")
        call(layer, torch.randn(4, K), DELAYED)
        before = {key: value.clone() for key, value in layer.state_dict().items()}
        with pytest.raises(OperandError):
            call(layer, WRONG[case][0], DELAYED)
        after = layer.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_refused_first_input_makes_no_state() -> None:
    layer = build("linear")
    with pytest.raises(OperandError):
        call(layer, torch.randn(4, K + 1), DELAYED)
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_a_message_names_the_layer() -> None:
    for kind in ["linear", "grouped"]:
        layer = build(kind, name="decoder.3.fc1")
        with pytest.raises(OperandError, match=r"'decoder.3.fc1' \(.*Linear\(32, 16\)\)"):
            call(layer, torch.randn(4, K + 1), None)


def test_a_message_about_dtypes_names_the_remedy() -> None:
    with pytest.raises(OperandError, match=r"torch\.autocast"):
        Linear(K, N)(torch.randn(4, K).bfloat16())


def test_low_precision_of_float64_is_refused_with_the_layer() -> None:
    for name in [name for name in RECIPES if name != "none"]:
        layer = Linear(K, N, params_dtype=torch.float64, name="in_float64")
        with pytest.raises(UnsupportedError, match=r"'in_float64'.*\n?.*float64"):
            call(layer, torch.randn(4, K, dtype=torch.float64), RECIPES[name])


def test_a_layer_that_was_refused_works_afterwards() -> None:
    layer = Linear(K, N)
    with pytest.raises(Fp8CoreError):
        call(layer, torch.randn(4, K).bfloat16(), DELAYED)
    call(layer, torch.randn(4, K), DELAYED).sum().backward()
    assert layer.scale_bwd[0] == 57344.0


def with_value(value: float) -> torch.Tensor:
    x = torch.randn(4, K)
    x[1, 2] = value
    return x


NAN_ENCODES = [name for name in RECIPES if name != "nvfp4"]


def test_a_nan_makes_its_row_nan_and_no_other() -> None:
    for name in NAN_ENCODES:
        y = call(Linear(K, N), with_value(math.nan), RECIPES[name])
        assert y.isnan().all(1).tolist() == [False, True, False, False], name
        assert not y[[0, 2, 3]].isnan().any(), name


def test_a_nan_does_not_change_the_scale_of_other_elements() -> None:
    for name in ["current", "rowwise", "block", "mxfp8"]:
        layer, x = Linear(K, N), with_value(math.nan)
        y, wanted = (call(layer, given, RECIPES[name]) for given in (x, x.nan_to_num(0.0)))
        others = [0, 2, 3]
        assert torch.equal(y[others], wanted[others]), name


def test_nan_becomes_the_largest_element_in_fp4() -> None:
    """e2m1 has no NaN; conversion gives +6, as PTX does (fp8core/formats/__init__.py)."""
    assert call(Linear(K, N), with_value(math.nan), RECIPES["nvfp4"]).isfinite().all()


def test_an_infinity_saturates() -> None:
    for name in ["current", "delayed", "rowwise", "block", "nvfp4"]:
        for value in (math.inf, -math.inf):
            assert call(Linear(K, N), with_value(value), RECIPES[name]).isfinite().all(), name


def test_an_infinity_stays_in_its_row_in_mxfp8() -> None:
    """The block's scale is the largest there is, 2^127, and 448 times that overflows."""
    y = call(Linear(K, N), with_value(math.inf), RECIPES["mxfp8"])
    assert y.isinf().any(1).tolist() == [False, True, False, False]
    assert not y.isnan().any()


def test_a_nan_in_grad_output_stays_in_its_row_of_grad_input() -> None:
    for name in [name for name in NAN_ENCODES if name != "none"]:
        x = torch.randn(4, K, requires_grad=True)
        y = call(Linear(K, N), x, RECIPES[name])
        dy = torch.randn(4, N)
        dy[1, 2] = math.nan
        y.backward(dy)
        assert x.grad.isnan().all(1).tolist() == [False, True, False, False], name


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "none"])
def test_a_step_with_a_bad_value_does_not_change_the_next(name: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        layer, good = Linear(K, N), torch.randn(4, K)
        torch.manual_seed(0)
        call(layer, good, RECIPES[name]).sum().backward()
        scales = [value.clone() for key, value in layer.state_dict().items() if "scale" in key]
        y = call(layer, torch.full((4, K), bad), RECIPES[name])
        y.backward(torch.full((4, N), bad))
        after = [value for key, value in layer.state_dict().items() if "scale" in key]
        assert all(torch.equal(old, new) for old, new in zip(scales, after, strict=True))
        assert call(layer, good, RECIPES[name]).isfinite().all()


def test_default_histories_are_not_frozen_by_one_infinity() -> None:
    layer = Linear(K, N)
    for x in (torch.ones(4, K), torch.full((4, K), math.inf), torch.full((4, K), 7.0)):
        call(layer, x, recipe.DelayedScaling())
    assert layer.scale_fwd[0] == 64.0


# --- only dense floating-point tensors are inputs, only floating-point dtypes parameters ---

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


def forward(layer: LowPrecisionModule, x: Any) -> torch.Tensor:
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
            forward(layer, x)
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
