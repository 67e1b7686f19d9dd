"""fp8core in MindSpeed's place for Transformer Engine's layers under Megatron.

MindSpeed fabricates ``transformer_engine`` out of empty classes, and has Megatron's layers of that
package replaced by its own. :func:`install` puts the alias there instead and leaves those patches
out, so that Megatron's own classes run on fp8core's layers; MindSpeed's other patches stay.
``--fp8-format`` and ``--fp8-recipe`` choose the recipe as they do under MindSpeed, HiFloat8
included, under each Megatron that MindSpeed patches. Call it first::

    from fp8core import mindspeed

    mindspeed.install()
    import mindspeed.megatron_adaptor
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fp8core.context.autocast import autocast
from fp8core.errors import UnsupportedError
from fp8core.integrations import transformer_engine
from fp8core.integrations.transformer_engine import recipes
from fp8core.recipe.base import Recipe
from fp8core.reporting import log_once
from fp8core.tensors.parameter import quantized_model_init

_EXTENSION = "megatron.core.extensions.transformer_engine"
CLASSES: Mapping[str, str] = {
    "MindSpeedTELayernorm": "TENorm",
    "MindSpeedTELayerNormColumnParallelLinear": "TELayerNormColumnParallelLinear",
    "MindSpeedTEGroupedLinear": "TEGroupedLinear",
    "TEColumnParallelLinear": "TEColumnParallelLinear",
    "TERowParallelLinear": "TERowParallelLinear",
}
"""MindSpeed's layers with Transformer Engine's interface, and Megatron's class for each."""

# Names that belong to these layers: the experts' two kinds, the recipe and its context, padding.
_BELONGING = (
    *("TELinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"),
    *("TEDelayedScaling", "Fp8Padding", "Fp8Unpadding", "te_checkpoint"),
)
_UTILITIES = "megatron.core.fp8_utils"
_CONTEXT = (
    *(f"{_UTILITIES}.get_fp8_context", f"{_UTILITIES}.get_fp8_recipe"),
    "megatron.core.enums.Fp8Recipe",
)
_ARGUMENTS = "mindspeed.args_utils"
_MANAGER = "mindspeed.patch_utils"
_ADAPTOR = "mindspeed.megatron_adaptor"


def is_left_out(target: str) -> bool:
    """Return whether MindSpeed's patch of ``target``, a dotted name, gives way to fp8core.

    >>> is_left_out("transformer_engine.pytorch.Linear")
    True
    >>> is_left_out("megatron.core.transformer.attention.Attention.forward")
    False
    """
    module, _, rest = target.partition(f"{_EXTENSION}.")
    if not module and rest:
        return rest.partition(".")[0] in (*CLASSES.values(), *_BELONGING)
    package, _, name = target.rpartition(".")
    if package.startswith("megatron.") and name in (*CLASSES.values(), *_BELONGING):
        return True  # a module that has imported the class
    return target.partition(".")[0] == "transformer_engine" or target in _CONTEXT


def install(version: str = transformer_engine.VERSION) -> None:
    """Install the alias, and have MindSpeed leave out its own layers of Transformer Engine.

    Raises:
        UnsupportedError: MindSpeed is not installed, or has patched Megatron already; or see
            :func:`fp8core.transformer_engine.install`.
    """
    if _ADAPTOR in sys.modules:
        raise UnsupportedError(
            f"{_ADAPTOR} is imported already, and has patched Megatron. Call "
            f"fp8core.mindspeed.install() before that import."
        )
    transformer_engine.install(version)
    try:
        manager = importlib.import_module(_MANAGER).MindSpeedPatchesManager
    except ModuleNotFoundError as error:
        transformer_engine.uninstall()
        raise UnsupportedError(
            f"MindSpeed cannot be imported ({error}). Without it, Megatron needs only "
            f"fp8core.transformer_engine.install()."
        ) from None
    if not getattr(manager.register_patch, "leaves_out", False):
        manager.register_patch = staticmethod(_filtered(manager.register_patch))


def _filtered(register: Callable[..., None]) -> Callable[..., None]:
    registered: list[str] = []  # the patch of fp8core's own that is registered once

    @functools.wraps(register)
    def register_patch(orig_func_name: str, *args: Any, **kwargs: Any) -> None:
        if is_left_out(orig_func_name):
            log_once(f"MindSpeed's patch of {orig_func_name} gives way to fp8core", logging.INFO)
            if orig_func_name in _CONTEXT and not registered:
                registered.append(orig_func_name)
                register(*_recipes_patch())
            return
        register(orig_func_name, *args, **kwargs)

    register_patch.leaves_out = True  # type: ignore[attr-defined]  # read by install
    return register_patch


def _recipes_patch() -> tuple[str, Callable[..., Any]]:
    """Return Megatron's function that chooses the recipe, and the patch of it.

    MindSpeed imports Megatron before it registers patches of Megatron.
    """
    utilities = sys.modules.get(_UTILITIES)
    if utilities is not None and not hasattr(utilities, "get_fp8_recipe"):  # 0.12.1
        return f"{_UTILITIES}.get_fp8_context", get_fp8_context_wrapper
    return f"{_UTILITIES}.get_fp8_recipe", get_fp8_recipe_wrapper


def get_fp8_recipe_wrapper(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return Megatron's ``get_fp8_recipe``, ``original``, with the recipes that MindSpeed adds.

    MindSpeed's manager decorates a function with a patch whose name ends in ``_wrapper``.
    """

    @functools.wraps(original)
    def get_fp8_recipe(config: Any) -> Any:
        """Return the recipe of a ``TransformerConfig``.

        Raises:
            UnsupportedError: HiFloat8 in another recipe than ``tensorwise``; ``mxfp8-32x32``;
                experts that ``--no-use-gmm-fp8`` leaves in high precision.
        """
        recipe = _added_recipe(config)
        return original(config) if recipe is None else recipe

    return get_fp8_recipe


def get_fp8_context_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``get_fp8_context``, for a Megatron whose context chooses the recipe itself, with the
    recipes and refusals of :func:`get_fp8_recipe_wrapper`."""

    @functools.wraps(original)
    def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> Any:
        """Return the context of a layer, by a ``TransformerConfig``."""
        recipe = _added_recipe(config)
        if recipe is None:
            return original(config, layer_no, is_init)
        # Megatron decides whether the layer computes in low precision, by a recipe that it knows.
        tensorwise = copy.copy(config)
        tensorwise.fp8, tensorwise.fp8_recipe = "e4m3", "tensorwise"
        context = original(tensorwise, layer_no, is_init)
        if isinstance(context, contextlib.nullcontext):
            return context
        if is_init:
            return quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True)
        return autocast(recipe=recipe)

    return get_fp8_context


def _added_recipe(config: Any) -> Recipe | None:
    """Return the recipe that MindSpeed adds to Megatron's; None if ``config`` asks for another."""
    if not config.fp8:
        return None
    name = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
    if name == "mxfp8-32x32" or (name == "mxfp8" and True in _options(config, "mxfp8_32x32")):
        raise UnsupportedError(
            "--fp8-recipe mxfp8-32x32: blocks of 32 x 32 are not offered. Choose mxfp8, whose "
            "blocks are 1 x 32, or run MindSpeed's own layers."
        )
    if getattr(config, "num_moe_experts", None) and False in _options(config, "use_gmm_fp8"):
        raise UnsupportedError(
            "--no-use-gmm-fp8: experts in high precision beside layers in low precision are not "
            "offered. Leave the option out, or run MindSpeed's own layers."
        )
    if config.fp8 == "hif8":
        if name != "tensorwise":
            raise UnsupportedError(
                f"--fp8-format hif8 with --fp8-recipe {name}: HiFloat8 has one scale a tensor. "
                f"Choose --fp8-recipe tensorwise."
            )
        return recipes.Float8CurrentScaling(fp8_format="hif8")
    if name == "blockwise":  # as MindSpeed computes it, and as Ascend's products need it
        return recipes.Float8BlockScaling(
            use_f32_scales=True, x_wgrad_block_scaling_dim=2, fp8_format=config.fp8
        )
    return None


def _options(config: Any, name: str) -> list[object]:
    """Return the values of an option of MindSpeed, in ``config`` and on its command line."""
    arguments = getattr(sys.modules.get(_ARGUMENTS), "get_full_args", None)
    holders = (config, *([] if arguments is None else [arguments()]))
    return [getattr(holder, name) for holder in holders if hasattr(holder, name)]


def classes() -> dict[str, type]:
    """Return Megatron's class for each of :data:`CLASSES`, which runs on fp8core's layers.

    Raises:
        UnsupportedError: Megatron was imported without the alias, or cannot be.
    """
    try:
        extension = importlib.import_module(_EXTENSION)
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"megatron-core cannot be imported ({error}).") from None
    # Megatron 0.12 imports the package or fails, and keeps no note of it.
    if not (transformer_engine.is_installed() and getattr(extension, "HAVE_TE", True)):
        raise UnsupportedError(
            "Megatron does not run on fp8core. Call fp8core.mindspeed.install() before it is "
            "imported."
        )
    return {name: getattr(extension, target) for name, target in CLASSES.items()}
