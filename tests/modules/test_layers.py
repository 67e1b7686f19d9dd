"""What the layers have in common: names, first values, results beside the output, copies, sizes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    autocast,
    ops,
    recipe,
)
from fp8core.backend_api import ACTIVATIONS
from tests.device import BACKEND, DEVICE, assert_same_sums
from tests.modules.layers import RECIPES, active, assert_same, step
from tests.pairs import pairs, turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

BF16, F64 = torch.bfloat16, torch.float64
SPLITS = [5, 0, 3]


class Groups(GroupedLinear):
    """Three groups, the second one without a row."""

    def forward(self, input: torch.Tensor, **arguments: Any) -> Any:  # type: ignore[override]  # no sizes
        rows = input.numel() // self.in_features
        return super().forward(input, [rows * size // 8 for size in SPLITS], **arguments)


LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda **own: Linear(32, 16, **own),
    "LayerNormLinear": lambda **own: LayerNormLinear(32, 16, **own),
    "LayerNormMLP": lambda **own: LayerNormMLP(32, 64, **own),
    "GroupedLinear": lambda **own: Groups(3, 32, 16, **own),
}
NORMED = ("LayerNormLinear", "LayerNormMLP")
NORMS = (LayerNorm, RMSNorm)
BIASES = {
    "Linear": ["bias"],
    "LayerNormLinear": ["bias"],
    "LayerNormMLP": ["fc2_bias"],
    "GroupedLinear": ["bias0", "bias1", "bias2"],
}
OPERATIONS = {
    operation.activation: operation
    for operation in vars(ops).values()
    if isinstance(operation, type) and hasattr(operation, "activation")
}
STATELESS = [name for name in RECIPES if name != "delayed"]


def made(kind: str, **options: Any) -> Any:
    torch.manual_seed(1)
    layer = LAYERS[kind](**options)
    with torch.no_grad():
        for own in layer.parameters():
            own.add_(torch.randn_like(own), alpha=0.1)
    return layer


# --- parameters ---

NORM = ["layer_norm_weight", "layer_norm_bias"]
NAMES: list[tuple[Callable[..., torch.nn.Module], dict[str, Any], list[str]]] = [
    (LAYERS["Linear"], {}, ["weight", "bias"]),
    (LAYERS["Linear"], {"bias": False}, ["weight"]),
    (LAYERS["LayerNormLinear"], {}, [*NORM, "weight", "bias"]),
    (LAYERS["LayerNormLinear"], {"normalization": "RMSNorm"}, [NORM[0], "weight", "bias"]),
    (LAYERS["LayerNormLinear"], {"bias": False}, [*NORM, "weight"]),
    (
        LAYERS["LayerNormLinear"],
        {"parameters_split": ["query", "key"], "normalization": "RMSNorm"},
        [NORM[0], "query_weight", "key_weight", "query_bias", "key_bias"],
    ),
    (LAYERS["LayerNormMLP"], {}, [*NORM, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]),
    (LAYERS["LayerNormMLP"], {"bias": False}, [*NORM, "fc1_weight", "fc2_weight"]),
    (
        LAYERS["LayerNormMLP"],
        {"normalization": "RMSNorm"},
        [NORM[0], "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
    ),
    (
        LAYERS["GroupedLinear"],
        {},
        ["weight0", "bias0", "weight1", "bias1", "weight2", "bias2"],
    ),
    (LAYERS["GroupedLinear"], {"bias": False}, ["weight0", "weight1", "weight2"]),
    (lambda: LayerNorm(8), {}, ["weight", "bias"]),
    (lambda: RMSNorm(8), {}, ["weight"]),
]


def test_parameters_have_transformer_engine_s_names_and_order() -> None:
    for make, options, names in NAMES:
        layer = make(**options)
        assert [name for name, _ in layer.named_parameters()] == names, (make, options)
        assert list(layer.state_dict()) == names, (make, options)
        if options.get("bias") is False and not isinstance(layer, LayerNormMLP):
            assert getattr(layer, "bias0" if "weight0" in names else "bias") is None


def test_parameters_have_their_sizes() -> None:
    for layer, shapes in [
        (Linear(6, 4), [(4, 6), (4,)]),
        (GroupedLinear(2, 6, 4), [(4, 6), (4,)] * 2),
        (LayerNormLinear(6, 4, normalization="RMSNorm"), [(6,), (4, 6), (4,)]),
        *(
            (
                LayerNormMLP(8, 24, activation=activation, bias=False, normalization="RMSNorm"),
                [(8,), (48 if activation.endswith("glu") else 24, 8), (8, 24)],
            )
            for activation in ACTIVATIONS
        ),
        *(
            (norm(hidden_size=6, device=DEVICE), [(6,)] * len([*norm(6).parameters()]))
            for norm in NORMS
        ),
        *((norm([2, 3]), [(2, 3)] * len([*norm(6).parameters()])) for norm in NORMS),
    ]:
        assert [tuple(own.shape) for own in layer.parameters()] == shapes, layer


def test_params_dtype_is_the_dtype_of_the_parameters() -> None:
    for kind in LAYERS:
        assert {own.dtype for own in made(kind, params_dtype=BF16).parameters()} == {BF16}, kind
        torch.set_default_dtype(F64)
        try:
            assert {own.dtype for own in LAYERS[kind]().parameters()} == {F64}, kind
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_default_initialization_is_transformer_engine_s() -> None:
    layer = Linear(256, 256)
    assert abs(layer.weight.std().item() - 0.023) < 0.001
    assert not layer.bias.any()


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear", "split"])
def test_init_method_fills_each_weight_and_no_bias(kind: str) -> None:
    seen = []

    def ones(weight: torch.Tensor) -> None:
        seen.append(tuple(weight.shape))
        torch.nn.init.ones_(weight)

    split = {"parameters_split": ("q", "k")} if kind == "split" else {}
    layer = LAYERS["Linear" if split else kind](init_method=ones, **split)
    weights = [own for own in layer.parameters() if own.dim() == 2]
    assert seen == [tuple(own.shape) for own in weights]
    assert all(bool(own.eq(1).all()) == (own.dim() == 2) for own in layer.parameters())


@pytest.mark.parametrize(("centered", "value"), [(False, 1.0), (True, 0.0)])
def test_gamma_starts_as_the_identity(centered: bool, value: float) -> None:
    gammas = [kind(32, zero_centered_gamma=centered).weight for kind in NORMS]
    gammas += [LAYERS[kind](zero_centered_gamma=centered).layer_norm_weight for kind in NORMED]
    for gamma in gammas:
        assert torch.equal(gamma, torch.full((32,), value))


# --- results beside the output ---


@pytest.mark.parametrize(
    ("kind", "name", "returns_norm"),
    pairs(LAYERS, RECIPES, [False, True], keep=lambda kind, name, norm: kind in NORMED or not norm),
)
def test_a_returned_bias_is_not_added_and_comes_before_the_norm(
    kind: str, name: str, returns_norm: bool
) -> None:
    options = {"return_layernorm_output": True} if returns_norm else {}
    layer, plain = made(kind, return_bias=True, **options), made(kind, **options)
    with torch.no_grad():
        for own in BIASES[kind]:
            plain.get_parameter(own).zero_()
    x = torch.randn(8, 32)
    torch.manual_seed(2)
    with active(name):
        y, bias, *norm = layer(x)
    biases = bias if isinstance(bias, list | tuple) else [bias]
    assert all(map(lambda a, b: a is layer.get_parameter(b), biases, BIASES[kind]))
    torch.manual_seed(2)
    with active(name), torch.no_grad():
        results = plain(x)
    assert_same_sums([y, *norm], results if returns_norm else [results])
    y.sum().backward()
    assert all(one.grad is None for one in biases)
    assert all(own.grad is not None for own in layer.parameters() if own.dim() == 2)
    sum(one.sum() for one in biases).backward()
    assert all(one.grad.eq(1).all() for one in biases)


def test_without_a_bias_none_is_returned() -> None:
    for kind in ("Linear", *NORMED):
        assert made(kind, bias=False, return_bias=True)(torch.randn(8, 32))[1] is None, kind


@pytest.mark.parametrize(("kind", "name"), pairs(NORMED, RECIPES))
def test_a_returned_norm_is_the_norms_and_changes_no_result(kind: str, name: str) -> None:
    options = {"params_dtype": BF16, "normalization": "RMSNorm"}
    layer = made(kind, return_layernorm_output=True, **options)
    norm = RMSNorm(32, params_dtype=BF16)
    norm.load_state_dict({"weight": layer.layer_norm_weight})
    x = torch.randn(32, 32).to(BF16)
    with active(name):
        _, normalized = layer(x)
    assert torch.equal(normalized, norm(x))
    if name != "delayed":  # which else quantizes the norm before it is rounded
        got = step(made(kind, return_layernorm_output=True, **options), x, name)
        assert_same(got, step(made(kind, **options), x, name))


def test_the_returned_norm_has_its_own_gradient() -> None:
    layer = made("LayerNormLinear", return_layernorm_output=True, params_dtype=BF16)
    x = torch.randn(4, 32).to(BF16).requires_grad_()
    _, normalized = layer(x)
    normalized.float().square().sum().backward()
    assert x.grad is not None
    assert layer.layer_norm_weight.grad is not None
    assert layer.weight.grad is None


# --- what they compute ---


def parts(layer: Any) -> torch.nn.Sequential:
    """Return the same operations as layers of their own, with the same parameters."""
    dtype, norm = layer.layer_norm_weight.dtype, LayerNorm(32, params_dtype=BF16)
    linears = ["fc1_", "fc2_"] if isinstance(layer, LayerNormMLP) else [""]
    sequence: list[torch.nn.Module] = [norm]
    for own, prefix in ((norm, "layer_norm_"), *((None, prefix) for prefix in linears)):
        state = {name: layer.get_parameter(f"{prefix}{name}") for name in ("weight", "bias")}
        if own is None:
            n, k = state["weight"].shape
            own = Linear(k, n, params_dtype=dtype)
            sequence.append(own)
        own.load_state_dict(state)
    if isinstance(layer, LayerNormMLP):
        sequence.insert(2, OPERATIONS[layer._activation.name]())
    return torch.nn.Sequential(*sequence)


PARTED = [
    *(("LayerNormLinear", "gelu", name) for name in STATELESS),
    *(("LayerNormMLP", activation, "current") for activation in ACTIVATIONS),
    *(("LayerNormMLP", "swiglu", name) for name in STATELESS if name != "current"),
]


# Stateless recipes round the norm's result before the cast, so that the layers hand over the same.
@pytest.mark.parametrize(("kind", "activation", "name"), PARTED)
def test_a_layer_equals_its_parts_bit_for_bit(kind: str, activation: str, name: str) -> None:
    options = {"activation": activation} if kind == "LayerNormMLP" else {}
    layer, x = made(kind, params_dtype=BF16, **options), torch.randn(32, 32).to(BF16)
    got, want = step(layer, x, name), step(parts(layer), x, name)
    if (kind, name) == ("LayerNormMLP", "nvfp4"):  # draws one seed a layer: two linears round
        got, want = got[:1], want[:1]  # gradients by other numbers
    assert_same(got, want)


def test_delayed_quantizes_the_unrounded_norm() -> None:
    for kind in NORMED:
        layer, x = made(kind, params_dtype=BF16), torch.randn(32, 32).to(BF16)
        with active("delayed"):
            layer(x)
        wide = LayerNorm(32, params_dtype=torch.float32)
        wide.load_state_dict({"weight": layer.layer_norm_weight, "bias": layer.layer_norm_bias})
        assert torch.equal(layer.amax_history_fwd[-1, 0], wide(x.float()).abs().max()), kind


def test_delayed_biases_get_the_sum_before_quantization() -> None:
    for kind in ("Linear", *NORMED):
        layer = made(kind, params_dtype=BF16)
        y, *_, bias = step(layer, torch.randn(32, 32).to(BF16), "delayed")
        torch.manual_seed(12)
        want = torch.randn(y.shape).to(BF16).sum(0, dtype=torch.float32).to(BF16)
        assert torch.equal(bias, want), kind


def test_every_activation_has_an_operation() -> None:
    assert set(OPERATIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *turns([LayerNormLinear], ["LayerNorm", "RMSNorm"]),
        *turns([LayerNormMLP], ACTIVATIONS),
        *((kind, "") for kind in NORMS),
    ],
)
def test_gradcheck(kind: Callable[..., Any], option: str) -> None:
    options: dict[str, Any] = {"eps": 1e-2, "params_dtype": F64}
    if kind in NORMS:
        layer = kind(4, **options)
    else:
        name = "activation" if kind is LayerNormMLP else "normalization"
        layer = kind(4, 3, **options, **{name: option})
    if isinstance(layer, LayerNormMLP):
        with torch.no_grad():
            layer.fc1_weight.mul_(20)  # far from the kinks
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_clamped_swiglu_takes_its_parameters() -> None:
    x, kind = torch.randn(4, 32), {"activation": "clamped_swiglu"}
    default = made("LayerNormMLP", **kind)(x)
    given = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
    assert torch.equal(made("LayerNormMLP", **kind, activation_params=given)(x), default)
    other = made("LayerNormMLP", **kind, activation_params={"glu_linear_offset": 0.0})(x)
    assert not torch.equal(other, default)


# --- rows, dtypes and devices ---


@pytest.mark.parametrize(("kind", "name"), pairs(LAYERS, RECIPES))
def test_leading_dimensions_are_rows_of_which_there_may_be_none(kind: str, name: str) -> None:
    layer, x = made(kind), torch.randn(2, 32, 32)
    with torch.no_grad(), active(name):
        flat = layer(x.flatten(0, 1))
        layer.reset_delayed_state()
        assert torch.equal(layer(x), flat.view(2, 32, -1))
    y, *grads = step(layer, x[:0], name)
    assert y.shape == (0, 32, flat.shape[-1])
    assert not any(grad is None or grad.any() for grad in grads)


def test_results_have_the_dtype_of_the_input() -> None:
    for kind, name, dtype in pairs(LAYERS, RECIPES, [BF16, torch.float16, torch.float32]):
        results = step(LAYERS[kind](params_dtype=dtype), torch.randn(8, 32).to(dtype), name)
        assert {one.dtype for one in results if one is not None} == {dtype}, (kind, name)


@pytest.mark.parametrize(("kind", "name"), turns(LAYERS, RECIPES))
def test_torch_autocast_gives_its_dtype_and_gradients_in_the_parameters(
    kind: str, name: str
) -> None:
    layer = LAYERS[kind]()
    with torch.autocast(DEVICE.type, BF16), active(name):
        y = layer(torch.randn(8, 32))
    y.sum().backward()
    assert y.dtype == BF16
    assert {own.grad.dtype for own in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize(("kind", "name"), turns(LAYERS, RECIPES))
def test_moving_to_another_dtype_computes_in_it(kind: str, name: str) -> None:
    layer = LAYERS[kind]()
    step(layer, torch.randn(8, 32), name)
    layer.bfloat16()
    assert step(layer, torch.randn(8, 32).bfloat16(), name)[0].dtype == BF16


def test_shape_is_known_on_meta() -> None:
    for kind, name in pairs(LAYERS, RECIPES):
        with active(name):
            y = LAYERS[kind](device="meta")(torch.empty(8, 32, device="meta"))
        shape = (8, 32 if kind == "LayerNormMLP" else 16)
        assert (y.shape, y.device.type) == (shape, "meta"), (kind, name)


# --- copies and texts ---


@pytest.mark.parametrize(("kind", "name"), pairs(LAYERS, RECIPES))
def test_copies_compute_the_same_with_their_own_parameters_and_state(kind: str, name: str) -> None:
    layer, x, file = made(kind), torch.randn(8, 32), io.BytesIO()
    step(layer, x, name)
    torch.save(layer, file)
    file.seek(0)
    twins = [copy.deepcopy(layer), torch.load(file, weights_only=False)]
    parameters = {own.data_ptr() for own in layer.parameters()}
    state = [buffer.clone() for buffer in layer.buffers()]
    results = [step(twin, x, name) for twin in twins]
    assert_same(layer.buffers(), state)
    for twin, got in zip(twins, results, strict=True):
        assert parameters.isdisjoint(own.data_ptr() for own in twin.parameters())
        assert_same(got, results[0])
    assert_same(results[0], step(layer, x, name))


def test_print_says_sizes_dtype_and_how_it_last_ran() -> None:
    text = "GroupedLinear(num_gemms=3, in_features=8, out_features=4, bias=False, dtype=float32)"
    assert repr(GroupedLinear(3, 8, 4, bias=False)) == text
    layer = Linear(8, 4, params_dtype=BF16, return_bias=True)
    assert repr(layer) == "Linear(in_features=8, out_features=4, bias=True, dtype=bfloat16)"
    x = torch.randn(2, 8).bfloat16()
    for context, said in (
        (active("mxfp8"), "dtype=bfloat16, last run: MXFP8BlockScaling on reference)"),
        (active(None), "last run: high precision on reference)"),
        (
            autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()),
            "last run: high precision on reference)",
        ),
    ):
        with context:
            layer(x)
        assert repr(layer).endswith(said)


def test_print_names_the_recipe_that_was_chosen_for_the_layer() -> None:
    for name, want in [
        ("a", f"MXFP8BlockScaling on {BACKEND}"),
        ("b", f"high precision on {BACKEND}"),
        ("c", f"NVFP4BlockScaling on {BACKEND}"),
    ]:
        inner = recipe.PerLayer(
            {"c": recipe.NVFP4BlockScaling()}, default=recipe.MXFP8BlockScaling()
        )
        layer = Linear(32, 32, name=name)
        with autocast(recipe=recipe.PerLayer({"b": None}, default=inner)):
            layer(torch.randn(32, 32))
        assert repr(layer).endswith(f"last run: {want})"), (name, want)


def test_a_frozen_weight_gets_no_gradient_and_changes_no_other() -> None:
    for kind, name in pairs(LAYERS, RECIPES):
        results = []
        for freezes in (False, True):
            layer = made(kind)
            frozen = next(own for own in layer.parameters() if own.dim() == 2)
            frozen.requires_grad_(not freezes)
            results.append(step(layer, torch.linspace(-1, 1, 256).view(8, 32), name))
            results[-1] += [buffer.clone() for buffer in layer.buffers()]
        want, got = results
        assert sum(one is None for one in got) == 1, (kind, name)
        expected = [one if mine is not None else None for mine, one in zip(got, want, strict=True)]
        assert_same(got, expected)


def test_two_layers_may_share_a_weight() -> None:
    first, second, alone = (Linear(16, 16, bias=False) for _ in range(3))
    second.weight = first.weight
    alone.load_state_dict({"weight": first.weight})
    x = torch.randn(4, 16)
    for layers in ((first, second), (alone, alone)):
        with active("current"):
            layers[1](layers[0](x)).sum().backward()
    assert torch.equal(alone.weight.grad, first.weight.grad)
