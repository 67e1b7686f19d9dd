"""fp8core under the name ``transformer_engine``: names, errors, layers and recipes."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import pickle
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

import fp8core
from fp8core import reporting
from fp8core import transformer_engine as alias
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.integrations.transformer_engine import finder
from fp8core.modules.models import graphs
from tests.refusals import unrefused
from tests.te_surface import Name, stored

NAMES = stored()


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which no framework has looked for Transformer Engine."""
    monkeypatch.setattr(finder, "_frameworks_that_looked", lambda: iter(()))


# --- the package


def test_install_and_uninstall(clean: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fp8core"):
        alias.install()
        alias.install()
    try:
        assert alias.is_installed()
        assert importlib.import_module("transformer_engine").__version__ == alias.VERSION
        assert len(caplog.records) == 1
    finally:
        alias.uninstall()
    assert not alias.is_installed()
    assert not any(finder.is_within(name) for name in sys.modules)
    assert importlib.util.find_spec("transformer_engine") is None
    alias.uninstall()  # a second time changes nothing


def test_the_metadata_answers_both_spellings(te: Any) -> None:
    for name in ("transformer-engine", "transformer_engine"):
        assert importlib.metadata.version(name) == alias.VERSION
    assert importlib.metadata.metadata("transformer-engine")["Name"] == "transformer_engine"
    listed = [dist.metadata["Name"] for dist in importlib.metadata.distributions()]
    assert listed.count("transformer_engine") == 1
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-package-anywhere")


def test_another_version_is_claimed_with_a_warning(
    clean: None, caplog: pytest.LogCaptureFixture
) -> None:
    alias.install(version="2.9.1")
    try:
        assert importlib.import_module("transformer_engine").__version__ == "2.9.1"
        assert "frameworks were run with 2.14.0" in caplog.text
        with pytest.raises(RecipeError, match=r"stands for version 2\.9\.1 already"):
            alias.install()
    finally:
        alias.uninstall()


@pytest.mark.parametrize("version", ["", "two", "1.13.0"])
def test_a_version_that_cannot_be_claimed(version: str) -> None:
    with pytest.raises(RecipeError, match="expected a"):
        alias.install(version=version)
    assert not alias.is_installed()


def test_another_package_of_the_name_is_refused(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    with pytest.raises(UnsupportedError, match="another transformer_engine is imported already"):
        alias.install()
    monkeypatch.setitem(sys.modules, "mindspeed", ModuleType("mindspeed"))
    with pytest.raises(UnsupportedError, match="MindSpeed's empty classes"):
        alias.install()
    assert not alias.is_installed()


def test_an_installed_package_of_the_name_is_refused(
    clean: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match="another transformer_engine can be imported"):
        alias.install()


def test_a_framework_that_has_looked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_framework")
    module.HAVE_TE = False  # type: ignore[attr-defined]  # as Megatron notes it
    monkeypatch.setitem(sys.modules, "a_framework", module)
    with pytest.raises(UnsupportedError, match="has noted that there is no Transformer Engine"):
        alias.install()


# --- names


def module_of(name: Name) -> ModuleType:
    return importlib.import_module(f"transformer_engine.{name.module}")


def test_offered_names_resolve(te: Any) -> None:
    offered = [name for name in NAMES if name.is_offered]
    assert [n.here for n in offered if getattr(module_of(n), n.name, None) is None] == []


def test_another_name_raises_what_to_use(te: Any) -> None:
    refused = [n for n in NAMES if not n.is_offered]
    said = "fp8core offers no"
    reads = {
        n.here: (partial(getattr, module_of(n), n.name), AttributeError, said) for n in refused
    }
    imports = {
        f"import of {n.here}": (
            partial(exec, f"from {module_of(n).__name__} import {n.name}"),
            ImportError,
            said,
        )
        for n in refused
    }
    assert unrefused({**reads, **imports}) == {}


TIERS = {
    "common.recipe": (
        *("Format", "Recipe", "DelayedScaling", "Float8CurrentScaling"),
        *("MXFP8BlockScaling", "Float8BlockScaling"),
    ),
    "pytorch": (
        *("Linear", "LayerNorm", "TransformerLayer", "fp8_autocast", "autocast", "fp8_model_init"),
        *("RMSNorm", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "DotProductAttention"),
        *("Fp8Padding", "Fp8Unpadding", "quantized_model_init", "CudaRNGStatesTracker"),
    ),
    "pytorch.fp8": (
        *("check_fp8_support", "check_mxfp8_support", "FP8GlobalStateManager", "fp8_autocast"),
        "fp8_model_init",
    ),
    "pytorch.distributed": (
        *("checkpoint", "activation_recompute_forward", "CudaRNGStatesTracker"),
        *("get_all_rng_states", "is_fp8_activation_recompute_enabled"),
    ),
    "pytorch.module.base": ("TransformerEngineBaseModule",),
    "pytorch.tensor": ("QuantizedTensor", "Float8Tensor"),
    "pytorch.ops": ("FusibleOperation", "Sequential"),
    "pytorch.router": ("fused_topk_with_score_function", "fused_moe_aux_loss"),
    "pytorch.cross_entropy": ("parallel_cross_entropy",),
    "pytorch.attention.rope": ("apply_rotary_pos_emb",),
    "pytorch.permutation": ("moe_permute", "moe_unpermute"),
    "pytorch.optimizers": ("FusedAdam", "multi_tensor_applier"),
    "pytorch.module.linear": ("Linear",),
    "pytorch.module.rmsnorm": ("RMSNorm",),
    "pytorch.quantization": ("autocast", "FP8GlobalStateManager"),
    "pytorch.tensor.mxfp8_tensor": ("MXFP8Tensor",),
}
"""What Accelerate, Lightning, DeepSpeed's test, Automodel and Megatron import."""


def test_what_frameworks_import_is_there(te: Any) -> None:
    modules = {name: importlib.import_module(f"transformer_engine.{name}") for name in TIERS}
    assert [
        (module, name)
        for module, names in TIERS.items()
        for name in names
        if not hasattr(modules[module], name)
    ] == []


def test_modules_are_attributes_of_their_packages(te: Any) -> None:
    assert te.pytorch.attention.rope is importlib.import_module(
        "transformer_engine.pytorch.attention.rope"
    )
    assert te.common.recipe.Format.HYBRID == "hybrid"
    for name in alias.children("transformer_engine.pytorch"):
        assert getattr(te.pytorch, name.rpartition(".")[2]).__name__ == name


def test_a_module_that_is_not_there_says_so(te: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="fp8core does not offer it"):
        importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    with pytest.raises(AttributeError, match=r"Linear is in transformer_engine\.pytorch"):
        _ = te.pytorch.fp8.Linear


def test_the_module_of_c_functions_has_its_enumerations_and_few_functions(te: Any) -> None:
    tex = importlib.import_module("transformer_engine_torch")
    assert tex.DType.kFloat8E4M3 == fp8core.DType.kFloat8E4M3
    assert (tex.FP8FwdTensors.GEMM2_WEIGHT, tex.FP8BwdTensors.GRAD_INPUT2) == (4, 3)
    with pytest.raises(AttributeError, match=r"none of its other functions: fp8core\.functional"):
        _ = tex.generic_gemm
    with pytest.raises(ImportError, match="none of its other functions"):
        from transformer_engine_torch import generic_gemm  # noqa: F401


def test_names_of_fp8core_alone_are_not_there(te: Any) -> None:
    for name in ("convert", "explain", "use_backend", "monitor"):
        assert hasattr(fp8core, name)
        assert not hasattr(te.pytorch, name)


# --- layers


LAYERS = {
    "Linear": ((32, 48), {}),
    "LayerNormLinear": ((32, 48), {}),
    "LayerNormMLP": ((32, 48), {}),
    "GroupedLinear": ((2, 32, 48), {}),
    "LayerNorm": ((32,), {}),
    "RMSNorm": ((32,), {}),
    "DotProductAttention": ((2, 16), {}),
    "MultiheadAttention": ((32, 2), {}),
    "TransformerLayer": ((32, 64, 2), {}),
}


def test_layers_are_those_of_fp8core(te: Any) -> None:
    for name, (arguments, _) in LAYERS.items():
        kind, native = getattr(te.pytorch, name), getattr(fp8core, name)
        assert isinstance(kind(*arguments), native)
        assert kind.__module__.startswith("transformer_engine.pytorch.")
        package = importlib.import_module(kind.__module__.rpartition(".")[0])
        assert getattr(package, name, kind) is kind
        wanted = list(inspect.signature(native.__init__).parameters)
        assert list(inspect.signature(kind.__init__).parameters) == wanted, name


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_layer_without_bias_has_an_empty_one(te: Any, name: str) -> None:
    layer = getattr(te.pytorch, name)(
        *LAYERS[name][0], bias=False, return_bias=True, dtype=torch.bfloat16
    )
    for bias in ("fc1_bias", "fc2_bias") if name == "LayerNormMLP" else ("bias",):
        empty = getattr(layer, bias)
        assert (empty.numel(), empty.dtype) == (0, torch.bfloat16)
        assert bias not in dict(layer.named_parameters())
        assert bias not in layer.state_dict()
    _, returned = layer(torch.randn(4, 32, dtype=torch.bfloat16))
    assert returned.numel() == 0


def test_a_bias_given_later_is_used(te: Any) -> None:
    """Megatron replaces biases after the constructor."""
    layer = te.pytorch.Linear(16, 16, params_dtype=torch.float32)
    layer.bias = torch.nn.Parameter(torch.full((16,), 3.0))
    x = torch.randn(2, 16)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_two_names_of_one_dtype(te: Any) -> None:
    assert te.pytorch.Linear(16, 16, dtype=torch.float16).weight.dtype == torch.float16
    assert te.pytorch.LayerNorm(16, dtype=torch.float16).weight.dtype == torch.float16
    with pytest.raises(RecipeError, match="Give one of them"):
        te.pytorch.Linear(16, 16, dtype=torch.float16, params_dtype=torch.float32)


def test_options_of_communication_pass_on_one_rank(te: Any) -> None:
    layer = te.pytorch.LayerNormLinear(
        16,
        32,
        sequence_parallel=True,
        parallel_mode="column",
        tp_size=1,
        ub_overlap_ag=True,
        ub_name="qkv",
        symmetric_ar_type="multimem_all_reduce",
    )
    assert (layer.tp_size, layer.parallel_mode, layer.ub_name) == (1, "column", "qkv")
    norm = te.pytorch.RMSNorm(16, sequence_parallel=True)
    assert norm.weight.sequence_parallel is True
    assert te.pytorch.DotProductAttention(2, 16, sequence_parallel=True)(
        *[torch.randn(8, 1, 2, 16) for _ in range(3)]
    ).shape == (8, 1, 32)


def test_arguments_are_attributes(te: Any) -> None:
    layer = te.pytorch.LayerNormLinear(16, 32, eps=1e-6, normalization="RMSNorm")
    assert (layer.eps, layer.normalization, layer.return_layernorm_output) == (
        1e-6,
        "RMSNorm",
        False,
    )
    assert te.pytorch.LayerNormMLP(16, 32, activation="swiglu").activation == "swiglu"


def test_megatron_s_attributes(te: Any) -> None:
    layer = te.pytorch.GroupedLinear(2, 32, 48)
    assert isinstance(layer, te.pytorch.module.base.TransformerEngineBaseModule)
    assert (layer.fp8, layer.fp8_calibration, layer.fp8_meta["fp8_checkpoint"]) == (False,) * 3
    assert layer.save_original_input is False
    layer.init_fp8_metadata(num_gemms=2)
    with te.pytorch.fp8_autocast(fp8_recipe=te.common.recipe.MXFP8BlockScaling()):
        assert layer.fp8
        assert layer.fp8_meta["recipe"].mxfp8()


INNER = {
    "self_attention": "MultiheadAttention",
    "self_attention.layernorm_qkv": "LayerNormLinear",
    "self_attention.core_attention": "DotProductAttention",
    "self_attention.proj": "Linear",
    "layernorm_mlp": "LayerNormMLP",
}


def test_layers_inside_of_layers_have_their_classes_metadata_and_states(te: Any) -> None:
    layer = te.pytorch.TransformerLayer(
        64, 128, 4, self_attn_mask_type="causal", hidden_dropout=0.0
    )
    inside = {name: module for name, module in layer.named_modules() if name in INNER}
    assert {name: type(module) for name, module in inside.items()} == {
        name: getattr(te.pytorch, kind) for name, kind in INNER.items()
    }
    states = {key for key in layer.state_dict() if key.endswith("._extra_state")}
    assert states == {f"{name}._extra_state" for name in INNER if name != "self_attention"}
    with fp8core.autocast(recipe=fp8core.recipe.DelayedScaling()):
        layer(torch.randn(16, 2, 64)).sum().backward()
    for name in INNER:
        if name not in ("self_attention", "self_attention.core_attention"):
            assert inside[name].fp8_meta["scaling_fwd"].scale.numel() >= 3


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_layers_run_in_the_chains_of_fp8core(te: Any, bias: bool) -> None:
    """With the bits and the buffers of its layer; a hook inside has its layer run by itself."""
    options = {"self_attn_mask_type": "causal", "bias": bias, "attention_dropout": 0.0}
    layer = te.pytorch.TransformerLayer(64, 128, 4, hidden_dropout=0.0, **options)
    other = fp8core.TransformerLayer(64, 128, 4, hidden_dropout=0.0, **options)
    other.load_state_dict(layer.state_dict())
    x, calls = torch.randn(16, 2, 64), []
    with fp8core.autocast(recipe=fp8core.recipe.Float8CurrentScaling()):
        want = other(x)
        with pytest.MonkeyPatch.context() as patch:
            for kind in set(INNER.values()) - {"MultiheadAttention"}:
                patch.setattr(
                    getattr(te.pytorch, kind), "forward", lambda *_, **__: calls.append("by itself")
                )
            assert torch.equal(layer(x), want)
        assert not calls
        for module in (layer.self_attention.proj, layer.layernorm_mlp):
            module.register_forward_hook(lambda *_: calls.append("seen"))
        torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)
    assert calls == ["seen"] * 2


def test_the_metadata_of_a_layer_is_its_delayed_state(te: Any) -> None:
    layer = te.pytorch.LayerNormMLP(32, 48)
    with pytest.raises(KeyError, match=r"scaling_fwd .* are there after a run"):
        _ = layer.fp8_meta["scaling_fwd"]
    recipe = te.common.recipe.DelayedScaling(amax_history_len=4)
    for _ in range(2):
        with te.pytorch.autocast(recipe=recipe):
            layer(torch.randn(16, 32)).sum().backward()
    assert layer.fp8_meta["recipe"] == recipe
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    assert forward.scale is layer.scale_fwd
    assert backward.amax_history is layer.amax_history_bwd
    assert torch.equal(forward.scale_inv, 1 / layer.scale_fwd)
    forward.scale[1] = 0.5
    forward.scale_inv[0] = 0.25
    backward.scale = torch.full((4,), 8.0)
    assert layer.scale_fwd[:2].tolist() == [4.0, 0.5]
    assert layer.scale_bwd.tolist() == [8.0] * 4
    forward.scale_inv.mul_(2.0)
    assert layer.scale_fwd[:2].tolist() == [2.0, 0.25]
    forward.scale_inv = torch.full((6,), 0.5)
    assert layer.scale_fwd.tolist() == [2.0] * 6
    y = {}
    for name in ("as it is", "written"):
        with torch.no_grad(), te.pytorch.autocast(recipe=recipe):
            y[name] = layer(torch.linspace(-1, 1, 64).reshape(2, 32))
        forward.scale.fill_(0.125)
    assert not torch.equal(y["as it is"], y["written"])  # what is written is what computes
    with pytest.raises(AttributeError, match="no 'amax'"):
        _ = forward.amax


@pytest.fixture
def scaling(te: Any) -> Any:
    """The forward's delayed state of a Linear."""
    layer = te.pytorch.Linear(32, 32)
    fp8core.prepare(layer, te.common.recipe.DelayedScaling(amax_history_len=4))
    return layer.fp8_meta["scaling_fwd"]


WRITES = {
    "a part": lambda x: x[:].fill_(4),
    "data": lambda x: x.data.fill_(4),
    "a view that is kept": lambda x: x.view(-1).detach().add_(3),
    "a part of a tuple": lambda x: [part.mul_(4) for part in x.split(1)],
    "out": lambda x: torch.mul(torch.ones(3), 4, out=x),
    "init": lambda x: torch.nn.init.constant_(x, 4.0),
    "a list": lambda x: torch._foreach_mul_([x], 4.0),
    "inference": lambda x: torch.inference_mode()(x.fill_)(4),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_to_the_reciprocal_scales_reaches_the_scales(write: Any, scaling: Any) -> None:
    write(scaling.scale_inv)
    assert scaling.scale.tolist() == [0.25] * 3


def test_reciprocal_scales_are_read_and_written_in_inference_mode(scaling: Any) -> None:
    with torch.inference_mode():
        assert scaling.scale_inv.tolist() == [1.0] * 3
        scaling.scale_inv.fill_(4)
    assert scaling.scale.tolist() == [0.25] * 3


def test_copies_of_a_delayed_state_are_others(scaling: Any) -> None:
    copies = [copy.deepcopy(scaling), pickle.loads(pickle.dumps(scaling))]
    inverses = [copy.deepcopy(scaling.scale_inv), pickle.loads(pickle.dumps(scaling.scale_inv))]
    assert copy.copy(scaling).scale is scaling.scale
    scaling.scale.fill_(0.25)
    assert [*copies[0].scale.tolist(), *copies[1].scale_inv.tolist()] == [1.0] * 6
    assert [x.tolist() for x in inverses] == [[1.0] * 3] * 2
    assert {type(x) for x in inverses} == {torch.Tensor}


def test_a_state_of_another_shape_is_refused(scaling: Any) -> None:
    for wrong in (torch.ones(3), torch.ones(2, 3)):
        with pytest.raises(OperandError, match=r"amax_history is \[.*\]; expected \[4, 3\]"):
            scaling.amax_history = wrong
    assert not scaling.amax_history.any()


def test_the_recipe_in_the_metadata_is_that_of_the_last_run(te: Any) -> None:
    layer, current = te.pytorch.Linear(32, 32), te.common.recipe.Float8CurrentScaling()
    assert layer.fp8_meta["recipe"] == fp8core.get_default_recipe()
    recipe = te.common.recipe.MXFP8BlockScaling()
    with te.pytorch.autocast(recipe=recipe):
        layer(torch.ones(32, 32))
    assert layer.fp8_meta["recipe"] == recipe
    with te.pytorch.autocast(recipe=current):
        assert layer.fp8_meta["recipe"] == current
        layer(torch.ones(32, 32))
    with te.pytorch.autocast(recipe=recipe):
        layer(torch.ones(32, 32))
    layer(torch.ones(32, 32))
    assert layer.fp8_meta["recipe"] == recipe  # of the last run under one


def test_what_is_written_to_the_metadata_has_no_effect(
    te: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is said of the recipes and groups that Megatron writes; other values are refused."""
    layer, recipe = te.pytorch.Linear(32, 32), te.common.recipe.DelayedScaling()
    with te.pytorch.autocast(recipe=recipe):
        layer(torch.ones(32, 32))
    for write in (
        lambda meta: meta.__setitem__("recipe", 3),
        lambda meta: meta.__setitem__("recipe", None),
        lambda meta: meta.update(recipe=te.common.recipe.DelayedScaling),
        lambda meta: meta.update({"fp8_group": 0}),
        lambda meta: meta.__setitem__("scaling_fwd", torch.ones(3)),
        lambda meta: meta.__setitem__("scaling_both", meta["scaling_fwd"]),
    ):
        meta = layer.fp8_meta
        with pytest.raises(OperandError, match=r"cannot be .*autocast\(recipe=.*scaling_fwd"):
            write(meta)
        assert meta["recipe"] is recipe
    monkeypatch.setattr(reporting, "_logged", set())
    with caplog.at_level(logging.WARNING):
        layer.fp8_meta["recipe"] = recipe
        layer.fp8_meta["fp8_group"] = None
        layer.fp8_meta["fp8_checkpoint"] = False
        assert not caplog.records
        layer.fp8_meta["recipe"] = te.common.recipe.MXFP8BlockScaling()
    assert "fp8_meta['recipe'] is read alone, and was written without effect" in caplog.text
    assert layer.fp8_meta["recipe"] is recipe
    layer.fp8_meta["scaling_fwd"].scale.fill_(2)
    layer.amax_history_fwd.fill_(3)
    second = te.pytorch.LayerNormLinear(32, 32)
    with te.pytorch.autocast(recipe=recipe):
        second(torch.ones(32, 32))
    for key in second.fp8_meta:  # as Megatron splits a norm from its linear
        second.fp8_meta[key] = layer.fp8_meta[key]
    assert torch.equal(second.scale_fwd, torch.full_like(layer.scale_fwd, 2))
    assert torch.equal(second.amax_history_fwd, layer.amax_history_fwd)
    assert second.fp8_meta["scaling_fwd"].scale is second.scale_fwd
    for again in (copy.copy(meta), pickle.loads(pickle.dumps({**meta, "fp8_group": None}))):
        again["recipe"] = 3  # of a copy, which is the caller's
    assert layer.fp8_meta["recipe"] is recipe


def test_quantizers_of_a_layer_name_what_to_use(te: Any) -> None:
    layer = te.pytorch.Linear(32, 32)
    with pytest.raises(AttributeError, match=r"not offered.*scaling_fwd.*qfactory"):
        _ = layer.quantizers


def test_graphs_take_the_earlier_names_and_positions(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        graphs, "make_graphed_callables", lambda *args, **kwargs: calls.append((args, kwargs))
    )
    layer, sample, recipe = te.pytorch.Linear(32, 32), (torch.ones(2, 32),), object()
    make = te.pytorch.make_graphed_callables
    make(layer, sample, 3, False, None, True, False, recipe, None, True)
    make(
        layer,
        sample,
        fp8_enabled=True,
        fp8_calibrating=False,
        fp8_recipe=recipe,
        fp8_weight_caching=True,
    )
    asked = {
        "enabled": True,
        "calibrating": False,
        "recipe": recipe,
        "cache_quantized_params": True,
    }
    assert calls == [((layer, sample, 3, False, None), asked)] * 2
    make(layer, sample, enabled=False, pool=(1, 2))
    assert calls[-1][1] == {"enabled": False, "pool": (1, 2)}
    with pytest.raises(RecipeError, match=r"recipe=\.\.\.\): give one of them"):
        make(layer, sample, fp8_recipe=recipe, recipe=recipe)
    make(layer, sample, _order=[1, -1], _reuse_graph_input_output_buffers=True)
    assert calls[-1][1] == {"_order": [1, -1], "_reuse_graph_input_output_buffers": True}


def test_extra_state_is_saved_empty_and_loads_from_any_checkpoint(te: Any) -> None:
    layer, other = te.pytorch.Linear(16, 16), te.pytorch.Linear(16, 16)
    state = layer.state_dict()
    assert state["_extra_state"].numel() == 0
    assert state["_extra_state"].dtype == torch.uint8
    other.load_state_dict(state)
    assert torch.equal(other.weight, layer.weight)
    other.load_state_dict(torch.nn.Linear(16, 16).state_dict())  # strict, without the key
    torch.nn.Sequential(other).load_state_dict({f"0.{key}": state[key] for key in state})


def test_delayed_scales_travel_in_the_state_dict(te: Any) -> None:
    layer, other = te.pytorch.Linear(16, 16), te.pytorch.Linear(16, 16)
    recipe = te.common.recipe.DelayedScaling(amax_history_len=4)
    for _ in range(2):
        with te.pytorch.fp8_autocast(fp8_recipe=recipe):
            layer(torch.randn(16, 16)).sum().backward()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.scale_fwd, layer.scale_fwd)
    assert not torch.equal(layer.scale_fwd, torch.ones_like(layer.scale_fwd))


# --- optimizers of another's parameters


Replaced = tuple[torch.nn.Sequential, list[torch.nn.Parameter]]


@pytest.fixture
def replaced(te: Any, monkeypatch: pytest.MonkeyPatch) -> Replaced:
    """A model whose linears a framework replaced, and the parameters that it had before."""
    monkeypatch.setattr(reporting, "_logged", set())
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 16))
    before = list(model.parameters())
    model[1] = te.pytorch.Linear(16, 16)
    return model, before


def warnings_of_steps(
    model: torch.nn.Module, steppers: list[torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> list[str]:
    with caplog.at_level(logging.WARNING, "fp8core"):
        for _ in range(2):
            model(torch.randn(8, 32)).sum().backward()
            for optimizer in steppers:
                optimizer.step()
                optimizer.zero_grad()
    return [record.getMessage() for record in caplog.records]


def test_layers_that_no_optimizer_holds_are_named_at_the_first_step(
    replaced: Replaced, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = replaced
    (line,) = warnings_of_steps(model, [torch.optim.SGD(before, lr=0.1)], caplog)
    assert line.startswith("Linear(16, 16): no optimizer of this process holds the parameters")
    assert "SGD holds others" in line
    assert "fp8core.lightning.Fp8CorePrecision" in line


def test_layers_that_some_optimizer_holds_or_none_replaced_are_not_named(
    replaced: Replaced, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = replaced
    later = torch.optim.SGD(model[1].parameters(), lr=0.1)
    assert warnings_of_steps(model, [torch.optim.SGD(before, lr=0.1)], caplog) == []
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    del later
    for master in masters:  # an optimizer of copies, which a framework gives their gradients
        master.grad = torch.zeros_like(master)
    assert warnings_of_steps(model, [torch.optim.SGD(masters, lr=0.1)], caplog) == []
    model[1].requires_grad_(False).zero_grad()
    assert warnings_of_steps(model, [torch.optim.SGD(before, lr=0.1)], caplog) == []


# --- recipes


def test_arguments_without_effect_pass_with_one_warning(
    te: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kind = te.common.recipe.Float8CurrentScaling
    with caplog.at_level(logging.WARNING, "fp8core"):
        assert kind(config=object(), device="cpu") == kind()
        kind(config=object(), device="cpu")
    assert caplog.text.count("Float8CurrentScaling: config, device change nothing") == 1


def test_an_unknown_argument_is_an_error(te: Any) -> None:
    with pytest.raises(RecipeError, match="has no argument 'amax_history_length'"):
        te.common.recipe.DelayedScaling(amax_history_length=16)
    with pytest.raises(RecipeError, match="scales are updated in every step"):
        te.common.recipe.DelayedScaling(interval=4)
    assert te.common.recipe.DelayedScaling(interval=1) == te.common.recipe.DelayedScaling()


def test_an_override_of_nothing_passes(te: Any) -> None:
    named = te.common.recipe
    for kind in (named.DelayedScaling, named.Float8CurrentScaling, named.NVFP4BlockScaling):
        assert kind(override_linear_precision=(False, False, False)) == kind()
        with pytest.raises(RecipeError, match="override_linear_precision"):
            kind(override_linear_precision=(True, 1))


def test_a_recipe_without_products_to_override_refuses(te: Any) -> None:
    with pytest.raises(RecipeError, match="only DelayedScaling"):
        te.common.recipe.MXFP8BlockScaling(override_linear_precision=(False, False, True))


def test_an_overridden_wgrad_is_that_of_high_precision(te: Any) -> None:
    """And the others are those of delayed scaling."""
    x, grads = torch.randn(16, 32), {}
    weight, dy = torch.randn(48, 32), torch.randn(16, 48)
    for override in ((False,) * 3, (False, False, True)):
        layer = te.pytorch.Linear(32, 48, bias=False)
        with torch.no_grad():
            layer.weight.copy_(weight)
        recipe = te.common.recipe.DelayedScaling(override_linear_precision=override)
        for _ in range(2):
            leaf, layer.weight.grad = x.clone().requires_grad_(), None
            with te.pytorch.fp8_autocast(fp8_recipe=recipe):
                y = layer(leaf)
            y.backward(dy)
        grads[override[2]] = (y, leaf.grad, layer.weight.grad)
    assert torch.equal(grads[True][0], grads[False][0])
    assert torch.equal(grads[True][1], grads[False][1])  # type: ignore[arg-type]  # a gradient
    torch.testing.assert_close(grads[True][2], dy.T @ x)
    assert not torch.allclose(grads[False][2], dy.T @ x, rtol=1e-3, atol=1e-3)


def test_an_override_that_transformer_engine_ignores_is_warned_of_once_by_name(
    te: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_logged", set())
    kind = te.common.recipe.DelayedScaling
    with caplog.at_level(logging.WARNING, "fp8core"):
        kind(override_linear_precision=(False, False, False))
        assert not caplog.records
        kind(override_linear_precision=(False, True, True))
        kind(override_linear_precision=(True, False, False))
    (record,) = caplog.records
    assert "override_linear_precision" in record.getMessage()
    assert "dgrad, wgrad compute in high precision" in record.getMessage()


def test_recipes_are_values(te: Any) -> None:
    recipe = te.common.recipe
    a = recipe.DelayedScaling(margin=1, override_linear_precision=(False, False, True))
    assert a == recipe.DelayedScaling(margin=1, override_linear_precision=[False, False, True])
    assert a != recipe.DelayedScaling(margin=1)
    assert hash(a) == hash(recipe.DelayedScaling(1, override_linear_precision=(False, False, True)))
    assert a.delayed()
    with pytest.raises(RecipeError, match=r"dataclasses\.replace"):
        a.margin = 2
    assert copy.deepcopy(a) == pickle.loads(pickle.dumps(a)) == a
    before, restored = a.__getstate__(), a.__new__(type(a))
    restored.__setstate__([*before[:-2], before[-1]])  # as an earlier version had it
    assert before[-2] == "balanced"
    assert restored == a


# --- global state and recompute


def test_the_global_state_is_that_of_autocast(te: Any) -> None:
    manager = te.pytorch.fp8.FP8GlobalStateManager
    recipe = te.common.recipe.MXFP8BlockScaling()
    assert not manager.is_fp8_enabled()
    with te.pytorch.fp8_autocast(fp8_recipe=recipe):
        assert manager.is_fp8_enabled()
        assert manager.get_fp8_recipe() == recipe
        with te.pytorch.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe):
            assert manager.is_fp8_calibration()
            assert not manager.is_fp8_enabled()
    with te.pytorch.fp8_model_init(recipe=recipe):
        assert manager.with_fp8_parameters()
    assert not manager.with_fp8_parameters()
    manager.reset()
    with pytest.raises(AttributeError, match="keeps no global state"):
        _ = manager.global_amax_buffer


def test_support_is_a_pair(te: Any) -> None:
    for check in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        assert getattr(te.pytorch.fp8, f"check_{check}_support")() == (True, "")


class _Recomputed(torch.autograd.Function):
    """A framework's own recompute, as Megatron writes it."""

    @staticmethod
    def forward(ctx: Any, te: Any, recipe: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.te, ctx.recipe, ctx.function = te, recipe, function
        ctx.save_for_backward(x)
        phase = te.pytorch.distributed.activation_recompute_forward
        with torch.no_grad(), phase(activation_recompute=True, recompute_phase=False):
            output: torch.Tensor = function(x)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        te = ctx.te
        phase = te.pytorch.distributed.activation_recompute_forward
        with (
            torch.enable_grad(),
            te.pytorch.fp8_autocast(fp8_recipe=ctx.recipe),
            phase(activation_recompute=True, recompute_phase=True),
        ):
            output = ctx.function(x)
        torch.autograd.backward(output, grads)
        return None, None, None, x.grad


@pytest.mark.parametrize("name", ["DelayedScaling", "MXFP8BlockScaling"])
def test_a_recompute_of_a_framework_repeats_the_forward(te: Any, name: str) -> None:
    recipe = getattr(te.common.recipe, name)()
    weights = [torch.randn(32, 32) for _ in range(2)]
    batches = [torch.randn(32, 32) for _ in range(6)]

    def train(is_recomputed: bool) -> list[torch.Tensor]:
        layers = [te.pytorch.Linear(32, 32, bias=False) for _ in weights]
        for layer, weight in zip(layers, weights, strict=True):
            with torch.no_grad():
                layer.weight.copy_(weight)
        results = []
        for step in range(3):
            outputs = []
            for x in batches[2 * step : 2 * step + 2]:
                with te.pytorch.fp8_autocast(fp8_recipe=recipe):
                    y = x.clone().requires_grad_()
                    for layer in layers:
                        y = _Recomputed.apply(te, recipe, layer, y) if is_recomputed else layer(y)
                outputs.append(y)
            for y in outputs:
                y.sum().backward()
            results += [y.detach() for y in outputs]
        results += [layer.weight.grad for layer in layers]
        if recipe.delayed():
            results += [layer.amax_history_fwd for layer in layers]
            results += [layer.amax_history_bwd for layer in layers]
        return results

    plain, recomputed = train(False), train(True)
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)


def test_a_recompute_without_its_forward_is_an_error(te: Any) -> None:
    layer = te.pytorch.Linear(16, 16)
    phase = te.pytorch.distributed.activation_recompute_forward
    with phase(True, True), pytest.raises(OperandError, match="its forward did not run within"):
        layer(torch.randn(16, 16))
    assert not te.pytorch.distributed.is_fp8_activation_recompute_enabled()


def test_what_runs_in_a_checkpoint_knows_whether_it_is_repeated(te: Any) -> None:
    """Where low precision is on, also by an autocast inside of the checkpoint."""
    state = te.pytorch.distributed
    layer, seen = te.pytorch.Linear(16, 16), []

    def note() -> None:
        seen.append(
            (state.is_fp8_activation_recompute_enabled(), state.in_fp8_activation_recompute_phase())
        )

    def run(x: torch.Tensor) -> torch.Tensor:
        note()
        with te.pytorch.autocast(recipe=te.common.recipe.Float8CurrentScaling()):
            note()
            return layer(x)

    te.pytorch.checkpoint(run, torch.randn(16, 16, requires_grad=True)).sum().backward()
    assert seen == [(False, False), (True, False), (False, True), (True, True)]
    note()
    with te.pytorch.autocast(recipe=te.common.recipe.Float8CurrentScaling()):
        note()
    assert seen[4:] == [(False, False)] * 2


def test_the_base_of_layers_is_made_without_arguments(te: Any) -> None:
    base = importlib.import_module("transformer_engine.pytorch.module.base")

    class Scaled(base.TransformerEngineBaseModule):  # type: ignore[misc, name-defined]  # of a module by its name
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    layer = Scaled()
    assert torch.equal(layer(torch.ones(4)), torch.full((4,), 2.0))
    assert (layer.fp8, layer.fp8_calibration, layer.tp_size) == (False, False, 1)
    assert layer.fp8_meta["fp8_checkpoint"] is False
    fresh = Scaled()
    fresh.load_state_dict(layer.state_dict())


def test_a_tracker_continues_its_states(te: Any) -> None:
    tracker = te.pytorch.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    torch.manual_seed(7)
    wanted = torch.rand(4)
    torch.manual_seed(1)
    outside = torch.rand(2)
    torch.manual_seed(1)
    with tracker.fork():
        drawn = torch.rand(2)
    assert torch.equal(torch.rand(2), outside)
    with tracker.fork():
        drawn = torch.cat([drawn, torch.rand(2)])
    assert torch.equal(drawn, wanted)
    with pytest.raises(OperandError, match="seed 7 is in use"):
        tracker.add("other", 7)
    with pytest.raises(OperandError, match="the states are: model-parallel-rng"):
        tracker.fork("other").__enter__()
    assert "model-parallel-rng" in te.pytorch.distributed.get_all_rng_states()
    tracker.reset()
    assert tracker.get_states() == {}


def test_a_checkpoint_begins_again_with_the_tracker_s_states(te: Any) -> None:
    tracker = te.pytorch.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(64, requires_grad=True)
    y = te.pytorch.checkpoint(
        dropped, x, get_rng_state_tracker=lambda: tracker, distribute_saved_activations=True
    )
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())  # 2 where an element was kept, 0 where dropped
    after = tracker.get_states()["model-parallel-rng"].cpu
    fresh = te.pytorch.CudaRNGStatesTracker()
    fresh.add("again", 3)
    with fresh.fork("again"):
        torch.nn.functional.dropout(torch.ones(64), 0.5)
    assert torch.equal(after, fresh.get_states()["again"].cpu)  # advanced once


def test_a_custom_recipe_of_storages_is_written_under_their_names(te: Any) -> None:
    gemm = importlib.import_module("transformer_engine.pytorch.custom_recipes.gemm")
    base = importlib.import_module("transformer_engine.pytorch.quantized_tensor")
    quantization = importlib.import_module("transformer_engine.pytorch.custom_recipes.quantization")
    common = importlib.import_module("transformer_engine.common.recipe")
    assert gemm.MMParams is quantization.MMParams
    calls = []

    class Halves(base.QuantizedTensorStorage):  # type: ignore[misc, name-defined]  # of a module by its name
        def __init__(self, value: torch.Tensor, quantizer: Any) -> None:
            self.data, self.scale = value.half(), torch.ones(1)
            self.data_t, self.scale_t = self.data.t(), self.scale
            self._quantizer = quantizer

    class HalfQuantizer(base.Quantizer):  # type: ignore[misc, name-defined]  # likewise
        custom = True

        def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
            return Halves(tensor, self)

        def qgemm(self, *arguments: Any, gemm_type: Any, **unused: Any) -> torch.Tensor:
            qx, qw, params, dtype, _, _, bias = arguments
            calls.append((gemm_type, params))
            y = qx.float() @ qw.float().t()
            return (y if bias is None else y + bias).to(dtype)

    layer, x = te.pytorch.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    chosen = common.CustomRecipe(qfactory=lambda role: HalfQuantizer(rowwise=True, columnwise=True))
    with te.pytorch.autocast(recipe=chosen):
        y = layer(x)
    y.sum().backward()
    assert calls == [
        (gemm.GEMMType.FPROP, gemm.MMParams(torch.float32, False)),
        (gemm.GEMMType.DGRAD, gemm.MMParams(torch.float32, True)),
        (gemm.GEMMType.WGRAD, gemm.MMParams(torch.float32, True)),
    ]
    wanted = x.half().float() @ layer.weight.half().float().t() + layer.bias
    assert torch.equal(y, wanted)


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        ("current_scaling_factory", "Float8CurrentScaling"),
        ("float8_block_scaling_factory", "Float8BlockScaling"),
        ("mxfp8_factory", "MXFP8BlockScaling"),
        ("nvfp4_factory", "NVFP4BlockScaling"),
        ("delayed_scaling_factory", "DelayedScaling"),
        ("high_precision_factory", None),
    ],
)
def test_factories_compute_as_the_named_recipes(te: Any, factory: str, named: str | None) -> None:
    factories = importlib.import_module("transformer_engine.pytorch.custom_recipes")
    factories = importlib.import_module(f"{factories.__name__}.quantizer_factories")
    common = importlib.import_module("transformer_engine.common.recipe")
    make = getattr(factories, factory)
    linear, x = te.pytorch.Linear(128, 128), torch.randn(128, 128)
    chosen = (common.CustomRecipe(qfactory=make), getattr(common, named or "", lambda: None)())
    results = []
    for each in chosen:
        layer = copy.deepcopy(linear)
        torch.manual_seed(0)
        with te.pytorch.autocast(enabled=each is not None, recipe=each):
            y = layer(x)
        y.backward(x)
        results.append((y.detach(), layer.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert isinstance(make(None), fp8core.Quantizer | fp8core.DelayedScalingRequest)
    role = fp8core.QuantizerRole("linear", "weight", "layer")
    if named == "NVFP4BlockScaling":
        assert make(role).with_2d_quantization
        assert make(fp8core.QuantizerRole("linear", "grad_output")).stochastic_rounding
    if isinstance(make(role), fp8core.Quantizer):
        mxfp8 = factories.mxfp8_factory(role)
        mixed = te.pytorch.HybridQuantizer(rowwise_quantizer=make(role), columnwise_quantizer=mxfp8)
        assert mixed.plan.columnwise == mxfp8.plan.columnwise


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("constants", "DType"),
        ("ops.basic", "BasicLinear Bias GroupedLinear MakeExtraOutput Quantize SwiGLU"),
        ("ops.linear", "Linear"),
        ("ops.op", "BasicOperation FusedOperation FusibleOperation OperationContext"),
        ("ops.sequential", "Sequential"),
        ("optimizers.fused_adam", "FusedAdam"),
        ("optimizers.fused_sgd", "FusedSGD"),
        ("optimizers.multi_tensor_apply", "MultiTensorApply multi_tensor_applier"),
        ("tensor.hybrid_tensor", "HybridQuantizer HybridQuantizedTensor"),
        ("tensor.identity_tensor", "IdentityQuantizer"),
        ("tensor.storage.hybrid_tensor_storage", "HybridQuantizedTensorStorage"),
    ],
)
def test_names_are_under_the_modules_that_define_them(te: Any, module: str, names: str) -> None:
    defining = importlib.import_module(f"transformer_engine.pytorch.{module}")
    room = {"ops": fp8core.ops, "optimizers": fp8core.optimizers}.get(module.split(".")[0], fp8core)
    for name in names.split():
        assert getattr(defining, name) is getattr(room, name)


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("quantizer_factory_zoo", "HybridQuantizer, IdentityQuantizer and custom_recipes"),
        ("reference_current_scaling", "quantizer_factories.current_scaling_factory"),
        ("reference_nvfp4", "quantizer_factories.nvfp4_factory"),
    ],
)
def test_recipes_that_are_not_offered_say_what_is(te: Any, module: str, remedy: str) -> None:
    with pytest.raises(ImportError, match=f"{module} is not offered: .*{remedy}"):
        importlib.import_module(f"transformer_engine.pytorch.custom_recipes.{module}")
    package = importlib.import_module("transformer_engine.pytorch.custom_recipes")
    with pytest.raises(AttributeError, match=f"{module} is not offered: .*{remedy}"):
        getattr(package, module)


def test_storages_are_under_their_modules(te: Any) -> None:
    storage = importlib.import_module("transformer_engine.pytorch.tensor.storage")
    for name, kind in {
        "float8_tensor_storage": "Float8TensorStorage",
        "float8_blockwise_tensor_storage": "Float8BlockwiseQTensorStorage",
        "mxfp8_tensor_storage": "MXFP8TensorStorage",
        "nvfp4_tensor_storage": "NVFP4TensorStorage",
    }.items():
        module = importlib.import_module(f"{storage.__name__}.{name}")
        assert getattr(module, kind) is getattr(fp8core, kind)
    made = storage.Float8TensorStorage(
        data=torch.zeros(4, 8, dtype=torch.uint8), fp8_scale_inv=torch.ones(1), fp8_dtype=7
    )
    assert isinstance(made, storage.QuantizedTensorStorage)
