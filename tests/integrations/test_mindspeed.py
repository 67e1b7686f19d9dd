"""MindSpeed's patches of Transformer Engine's layers give way to fp8core.

MindSpeed needs an NPU to be imported; its manager of patches has a stand-in here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fp8core
from fp8core import mindspeed, transformer_engine
from fp8core.errors import UnsupportedError
from fp8core.integrations.transformer_engine import finder
from fp8core.recipe import Float8BlockScaling, Float8CurrentScaling


class Manager:
    """Registers patches as MindSpeed's manager does, by a static method."""

    registered: dict[str, Any]

    @staticmethod
    def register_patch(
        orig_func_name: str,
        new_func: Any = None,
        force_patch: bool = False,
        create_dummy: bool = False,
    ) -> None:
        Manager.registered[orig_func_name] = new_func


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Manager]]:
    monkeypatch.setattr(finder, "_frameworks_that_looked", lambda: iter(()))
    package, patches = ModuleType("mindspeed"), ModuleType("mindspeed.patch_utils")
    patches.MindSpeedPatchesManager = Manager  # type: ignore[attr-defined]  # a module's name
    monkeypatch.setitem(sys.modules, "mindspeed", package)
    monkeypatch.setitem(sys.modules, "mindspeed.patch_utils", patches)
    # The same method again: monkeypatch puts it back behind the test.
    monkeypatch.setattr(Manager, "register_patch", staticmethod(Manager.register_patch))
    Manager.registered = {}
    yield Manager
    transformer_engine.uninstall()


FABRICATED = (
    *("LayerNormLinear", "DotProductAttention", "Linear", "GroupedLinear"),
    *("distributed.CudaRNGStatesTracker", "tensor.QuantizedTensor"),
)


def test_fabricated_names_are_those_of_fp8core(manager: type[Manager]) -> None:
    mindspeed.install()
    import transformer_engine.pytorch as te

    before = te.Linear, te.tensor.QuantizedTensor
    for name in FABRICATED:
        target = f"transformer_engine.pytorch.{name}"
        manager.register_patch(target, torch.nn.Module, create_dummy=True)
    assert manager.registered == {}
    assert (te.Linear, te.tensor.QuantizedTensor) == before
    assert te.Linear is not torch.nn.Module


@pytest.mark.parametrize("name", mindspeed.CLASSES.values())
def test_megatron_s_layers_are_left_to_fp8core(manager: type[Manager], name: str) -> None:
    mindspeed.install()
    for module in ("megatron.core.extensions.transformer_engine", "megatron.core.models.backends"):
        manager.register_patch(f"{module}.{name}", object())
    assert manager.registered == {}


def test_other_patches_are_registered(manager: type[Manager]) -> None:
    mindspeed.install()
    mindspeed.install()  # a second time changes nothing
    others = ["torch.compile", "megatron.core.transformer.moe.moe_layer.MoELayer.forward"]
    for name in others:
        manager.register_patch(name, print, force_patch=True)
    assert list(manager.registered) == others


def test_the_context_is_megatron_s_with_mindspeed_s_recipes(manager: type[Manager]) -> None:
    mindspeed.install()
    for name in ("megatron.core.fp8_utils.get_fp8_context", "megatron.core.enums.Fp8Recipe"):
        manager.register_patch(name, object())
    wrapper = mindspeed.get_fp8_recipe_wrapper
    assert manager.registered == {"megatron.core.fp8_utils.get_fp8_recipe": wrapper}


def test_the_context_of_a_megatron_that_chooses_there_is_decorated(
    manager: type[Manager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron 0.12.1 has no function for the recipe alone."""
    monkeypatch.setitem(sys.modules, "megatron.core.fp8_utils", ModuleType("fp8_utils"))
    mindspeed.install()
    manager.register_patch("megatron.core.fp8_utils.get_fp8_context", object())
    wrapper = mindspeed.get_fp8_context_wrapper
    assert manager.registered == {"megatron.core.fp8_utils.get_fp8_context": wrapper}


def test_the_package_comes_back_where_it_is_taken_out(manager: type[Manager]) -> None:
    """MindSpeed takes it out of ``sys.modules``, and leaves the modules below it."""
    mindspeed.install()
    import transformer_engine.pytorch

    linear = transformer_engine.pytorch.Linear
    del sys.modules["transformer_engine"]
    import transformer_engine as again

    assert again.pytorch.Linear is linear
    assert again.common.recipe.Float8CurrentScaling is not None


def recipe_of(fp8: str, name: object, **options: object) -> Any:
    return mindspeed.get_fp8_recipe_wrapper(lambda config: "Megatron's")(
        SimpleNamespace(fp8=fp8, fp8_recipe=name, **options)
    )


class Config(SimpleNamespace):
    """What a context of Megatron 0.12.1 reads of its config; layer 0 is in high precision."""

    def context(self, layer: int, is_init: bool = False) -> Any:
        def megatron_s(config: Any, layer_no: int, is_init: bool) -> Any:
            assert config.fp8_recipe in ("delayed", "tensorwise", "mxfp8")
            assert config.fp8 in ("e4m3", "hybrid")
            return contextlib.nullcontext() if layer_no == 0 else "Megatron's"

        return mindspeed.get_fp8_context_wrapper(megatron_s)(self, layer, is_init)


def test_a_context_has_mindspeed_s_recipe_in_the_layers_that_megatron_chooses() -> None:
    config = Config(fp8="hif8", fp8_recipe="tensorwise")
    assert isinstance(config.context(0), contextlib.nullcontext)
    with config.context(1):
        recipe = fp8core.context.autocast.active().quantize
    assert isinstance(recipe, Float8CurrentScaling)
    assert recipe.fp8_format == "hif8"
    assert (config.fp8, config.fp8_recipe) == ("hif8", "tensorwise")
    blocks = Config(fp8="e4m3", fp8_recipe="blockwise")
    with blocks.context(1, is_init=True):
        layer = fp8core.Linear(128, 128)
    assert isinstance(layer.weight, fp8core.QuantizedTensor)
    assert Config(fp8="e4m3", fp8_recipe="mxfp8").context(1) == "Megatron's"


@pytest.mark.parametrize("is_of_config", [True, False], ids=["config", "command line"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("mxfp8_32x32", True, "mxfp8-32x32: blocks of 32 x 32"),
        ("use_gmm_fp8", False, "--no-use-gmm-fp8: experts in high precision"),
    ],
)
def test_an_option_that_changes_results_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_of_config: bool, option: str, value: bool, message: str
) -> None:
    arguments = ModuleType("args_utils")
    given = {option: value}
    if not is_of_config:
        arguments.get_full_args = lambda: SimpleNamespace(**given)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mindspeed.args_utils", arguments)
    with pytest.raises(UnsupportedError, match=message):
        recipe_of("e4m3", "mxfp8", num_moe_experts=4, **(given if is_of_config else {}))


def test_an_option_of_experts_is_nothing_to_a_model_without() -> None:
    assert recipe_of("e4m3", "mxfp8", num_moe_experts=None, use_gmm_fp8=False) == "Megatron's"


class Named(str, Enum):
    """A recipe as Megatron's enumeration has it."""

    tensorwise = "tensorwise"


@pytest.mark.parametrize("name", ["tensorwise", Named.tensorwise], ids=["text", "enumeration"])
def test_hif8_is_current_scaling(name: str) -> None:
    recipe = recipe_of("hif8", name)
    assert isinstance(recipe, Float8CurrentScaling)
    assert recipe.fp8_format == "hif8"


def test_blocks_are_those_of_ascend_s_products() -> None:
    recipe = recipe_of("hybrid", "blockwise")
    assert isinstance(recipe, Float8BlockScaling)
    assert (recipe.use_f32_scales, recipe.x_wgrad_block_scaling_dim) == (True, 2)
    assert recipe.fp8_format == "hybrid"


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "mxfp8"])
def test_another_recipe_is_megatron_s(name: str) -> None:
    assert recipe_of("e4m3", name) == "Megatron's"


@pytest.mark.parametrize(("fp8", "name"), [("hif8", "delayed"), ("e4m3", "mxfp8-32x32")])
def test_a_recipe_that_is_not_offered_is_named(fp8: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"--fp8-recipe {name}.*[Cc]hoose"):
        recipe_of(fp8, name)


def test_it_comes_before_the_adaptor(
    manager: type[Manager], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mindspeed.megatron_adaptor"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(UnsupportedError, match="has patched Megatron"):
        mindspeed.install()
    assert not transformer_engine.is_installed()


def test_without_mindspeed_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "_frameworks_that_looked", lambda: iter(()))
    with pytest.raises(UnsupportedError, match="MindSpeed cannot be imported"):
        mindspeed.install()
    assert not transformer_engine.is_installed()


@pytest.mark.parametrize(
    ("has_te", "message"), [(None, "cannot be imported"), (False, "does not run on fp8core")]
)
def test_classes_need_the_alias(
    monkeypatch: pytest.MonkeyPatch, has_te: bool | None, message: str
) -> None:
    extension = ModuleType("a_megatron")
    extension.HAVE_TE = has_te  # type: ignore[attr-defined]  # as Megatron notes it
    monkeypatch.setattr(mindspeed, "_EXTENSION", "a_megatron")
    if has_te is not None:
        monkeypatch.setitem(sys.modules, "a_megatron", extension)
    with pytest.raises(UnsupportedError, match=message):
        mindspeed.classes()
