"""fp8core as the package ``transformer_engine``, so that frameworks which import it run unmodified.

::

    from fp8core import transformer_engine

    transformer_engine.install()  # before the framework is imported
    import accelerate

or, for a whole command and the processes that it starts::

    fp8core run --as-transformer-engine accelerate launch train.py

Nothing is installed on disk: one finder on ``sys.meta_path`` answers for the name. Every public
name of Transformer Engine that fp8core offers resolves, under all module paths that it has there;
any other raises an error that says what to use instead.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import fp8core
from fp8core import names, ops, recipe
from fp8core.chain.linear import user_product
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.integrations.transformer_engine import (
    distributed,
    finder,
    layers,
    recipes,
    weights,
)
from fp8core.reporting import log_once, logger
from fp8core.training import context_parallel, optimizers, permutation, router

__all__ = ["VERSION", "install", "is_installed", "uninstall"]

VERSION = finder.VERSION
"""The version of Transformer Engine that the package claims to be, unless told otherwise."""


def install(version: str = VERSION) -> None:
    """Have ``import transformer_engine`` give fp8core in this process, as ``version``.

    Call it before a framework is imported that looks for Transformer Engine. ``version`` is what
    ``transformer_engine.__version__`` and ``importlib.metadata`` say; frameworks decide by it which
    features they use. Does nothing if it is installed with the same version. Logs one line.

    Raises:
        UnsupportedError: another ``transformer_engine`` is installed or imported, or a framework
            has looked for it already; says which.
        RecipeError: ``version`` is no version number, or another one than that installed.
    """
    problem = finder.version_problem(version)
    if problem is not None:
        raise RecipeError(f"install(version={version!r}): {problem}")
    present = finder.installed()
    if present is not None:
        if present.version == version:
            return
        raise RecipeError(
            f"install(version={version!r}): fp8core stands for version {present.version} already. "
            f"Call uninstall() first."
        )
    obstacle = finder.obstacle()
    if obstacle is not None:
        raise UnsupportedError(obstacle)
    finder.put(version)
    logger.info("fp8core answers for transformer_engine %s in this process", version)
    if version != VERSION:
        log_once(
            f"as transformer_engine {version}: frameworks were run with {VERSION}; another version "
            f"may have them use features that fp8core does not have",
            logging.WARNING,
        )


def uninstall() -> None:
    """End :func:`install`: forget the finder and the modules that it gave.

    Objects that a framework took from these modules keep their classes. Does nothing if not
    installed.
    """
    present = finder.installed()
    if present is None:
        return
    sys.meta_path.remove(present)
    for name in [name for name in sys.modules if finder.is_within(name)]:
        del sys.modules[name]


def is_installed() -> bool:
    """Return whether ``import transformer_engine`` gives fp8core in this process."""
    return finder.installed() is not None


_ROOT = finder.ROOT
_TORCH = f"{_ROOT}.pytorch"

# Public names of fp8core that Transformer Engine does not have.
_NATIVE = {
    *("ConversionReport", "Fp8CoreError", "KVCacheManager", "MasterWeights", "NonFiniteError"),
    *("OperandError", "PluginError", "RecipeError", "UnsupportedError", "__version__"),
    *("clear_found_inf", "convert", "errors", "explain", "formats", "found_inf"),
    *("frozen_weights", "functional", "monitor", "ops", "optimizers", "prepare", "recipe"),
    *("router", "unconvert", "use_backend", "watch_grad_scaler"),
}


def _from(source: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _public(module: ModuleType, *prefixes: str) -> dict[str, Any]:
    return _from(module, *(name for name in module.__all__ if name.startswith(prefixes or "")))


_LAYERS = {
    **_from(layers, "DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear"),
    **_from(layers, "LayerNormMLP", "Linear", "MultiheadAttention", "RMSNorm", "TransformerLayer"),
}
_RECIPES = {
    **_from(recipe, "Format", "Recipe", "MMParams", "QParams"),
    **{kind.__name__: kind for kind in recipes.KINDS},
}
_DISTRIBUTED = {
    **_from(distributed, "CudaRNGStatesTracker", "checkpoint", "get_all_rng_states"),
    **_from(distributed, "activation_recompute_forward", "in_fp8_activation_recompute_phase"),
    **_from(distributed, "is_fp8_activation_recompute_enabled"),
}
_QUANTIZATION = {
    **_from(recipes, "FP8GlobalStateManager", "check_fp8_block_scaling_support"),
    **_from(recipes, "check_fp8_support", "check_mxfp8_support", "check_nvfp4_support"),
    **_from(fp8core, "autocast", "fp8_autocast", "fp8_model_init", "quantized_model_init"),
    **_public(fp8core, "is_", "get_default_recipe", "QuantizerRole", "QuantizerRequest"),
    "get_default_fp8_recipe": fp8core.get_default_recipe,
    **_RECIPES,
}
_TENSORS = {
    **_public(fp8core, "Float8", "MXFP8", "NVFP4", "Hybrid", "Identity", "Quantize", "prepare_for"),
    **_public(fp8core, "restore_from", "Quantizer"),
}
_FACTORIES = {
    **_from(recipes, "current_scaling_factory", "delayed_scaling_factory", "mxfp8_factory"),
    **_from(recipes, "float8_block_scaling_factory", "high_precision_factory", "nvfp4_factory"),
}
_BASES = ("BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext")
_BASIC = {name for name in ops.__all__ if name[0].isupper()} - {*_BASES, "Linear", "Sequential"}
_STORAGES = {name: kind for name, kind in _TENSORS.items() if name.endswith("Storage")}
_ROTARY = _from(
    fp8core,
    *("RotaryPositionEmbedding", "apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"),
)
_TOP = {
    **_from(fp8core, *(name for name in fp8core.__all__ if name not in _NATIVE)),
    **_LAYERS,
    **_from(distributed, "checkpoint", "CudaRNGStatesTracker"),
    **_from(recipes, "make_graphed_callables"),
}
_OFFLOAD = _from(
    fp8core, "ManualOffloadSynchronizer", "get_cpu_offload_context", "mark_not_offload"
)
_INFERENCE = _from(fp8core, "InferenceParams", "KVCacheManager")

_MODULES: Mapping[str, Mapping[str, Any]] = {
    _ROOT: {},
    finder.NATIVE: {
        **_from(fp8core, "DType"),
        **_from(layers, "FP8BwdTensors", "FP8FwdTensors"),
        **_from(context_parallel, "thd_get_partitioned_indices"),
    },
    f"{_ROOT}.common": {},
    f"{_ROOT}.common.recipe": _RECIPES,
    _TORCH: _TOP,
    # Each class by the module that it names.
    **{
        kind.__module__: {kind.__name__: kind}
        for kind in (*_LAYERS.values(), layers.TransformerEngineBaseModule)
    },
    **{
        f"{_TORCH}.{name}": names
        for name, names in {
            "attention": {
                **_from(layers, "DotProductAttention", "MultiheadAttention"),
                **_from(fp8core, "InferenceParams"),
                **_ROTARY,
            },
            "attention.dot_product_attention": _from(layers, "DotProductAttention"),
            "attention.dot_product_attention.context_parallel": {
                **_from(context_parallel, "generate_positional_ids_for_cp"),
                **_from(context_parallel, "pad_thd_sequences_for_cp"),
                **_from(distributed, "get_batch_on_this_cp_rank", "get_cu_seqlens_on_cp_rank"),
                **_from(distributed, "get_thd_partitioned_indices"),
            },
            "attention.inference": _INFERENCE,
            "attention.rope": _ROTARY,
            "constants": _from(fp8core, "DType"),
            "cpu_offload": _OFFLOAD,
            "custom_recipes": {},
            "custom_recipes.gemm": _from(user_product, "GEMMType", "MMParams"),
            "custom_recipes.quantization": _from(user_product, "GEMMType", "MMParams"),
            "custom_recipes.quantizer_factories": _FACTORIES,
            "cross_entropy": _from(fp8core, "parallel_cross_entropy"),
            "distributed": _DISTRIBUTED,
            "float8_tensor": _from(fp8core, "Float8Tensor"),
            "fp8": _QUANTIZATION,
            "graph": _from(recipes, "make_graphed_callables"),
            "module": {
                **_from(layers, "Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"),
                **_from(layers, "LayerNorm", "RMSNorm"),
                **_from(fp8core, "Fp8Padding", "Fp8Unpadding"),
            },
            "module.fp8_padding": _from(fp8core, "Fp8Padding"),
            "module.fp8_unpadding": _from(fp8core, "Fp8Unpadding"),
            "ops": _public(ops),
            "ops.basic": _from(ops, *_BASIC),
            "ops.linear": _from(ops, "Linear"),
            "ops.op": _from(ops, *_BASES),
            "ops.sequential": _from(ops, "Sequential"),
            "optimizers": _public(optimizers),
            "optimizers.fused_adam": _from(optimizers, "FusedAdam"),
            "optimizers.fused_sgd": _from(optimizers, "FusedSGD"),
            "optimizers.multi_tensor_apply": _public(optimizers, "multi_tensor_applier", "MultiT"),
            "permutation": _public(permutation, "moe_"),
            "quantization": _QUANTIZATION,
            "quantized_tensor": _TENSORS,
            "router": {
                **_from(router, "RoutingMapFormat", "fused_topk_with_score_function"),
                **_from(router, "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"),
            },
            "tensor": _TENSORS,
            "tensor.float8_blockwise_tensor": _public(fp8core, "Float8Block"),
            "tensor.float8_tensor": _public(fp8core, "Float8"),
            "tensor.hybrid_tensor": _public(fp8core, "Hybrid"),
            "tensor.identity_tensor": _from(fp8core, "IdentityQuantizer"),
            "tensor.mxfp8_tensor": _public(fp8core, "MXFP8"),
            "tensor.nvfp4_tensor": _public(fp8core, "NVFP4"),
            "tensor.quantized_tensor": _TENSORS,
            "tensor.storage": _STORAGES,
            "tensor.storage.float8_blockwise_tensor_storage": _STORAGES,
            "tensor.storage.float8_tensor_storage": _STORAGES,
            "tensor.storage.hybrid_tensor_storage": _STORAGES,
            "tensor.storage.mxfp8_tensor_storage": _STORAGES,
            "tensor.storage.nvfp4_tensor_storage": _STORAGES,
            "tensor.utils": {
                **_from(weights, "cast_master_weights_to_fp8", "post_all_gather_processing"),
                **_from(weights, "quantize_master_weights", "replace_raw_data"),
            },
        }.items()
    },
}
"""The names of each module, by its full name."""


_BY_FACTORIES = (
    "custom_recipes.quantizer_factories.{0} casts as it does, which use_backend('reference') "
    "computes in plain torch. To compute otherwise, derive from Quantizer and "
    "QuantizedTensorStorage, and give the quantizer a qgemm()."
)
_REMEDIES = {
    "custom_recipes.quantizer_factory_zoo": (
        "take the factory that you need into your code: HybridQuantizer, IdentityQuantizer and "
        "custom_recipes.quantizer_factories, of which it is made, are here."
    ),
    "custom_recipes.reference_current_scaling": _BY_FACTORIES.format("current_scaling_factory"),
    "custom_recipes.reference_nvfp4": _BY_FACTORIES.format("nvfp4_factory"),
}
"""What to use instead of the names of a module that fp8core does not have."""


def has_module(name: str) -> bool:
    """Return whether ``transformer_engine`` has the module ``name`` here."""
    return name in _MODULES


def children(name: str) -> list[str]:
    """Return the modules one level below the module ``name``."""
    return [module for module in _MODULES if module.rpartition(".")[0] == name]


def fill(module: ModuleType, version: str) -> None:
    """Give a new module of the package its names, and the error for all others."""
    names = _MODULES[module.__name__]
    module.__doc__ = f"fp8core under the name {module.__name__}."
    module.__file__ = __file__  # which Python's message names where an import fails
    vars(module).update(names)
    module.__all__ = sorted(names)  # type: ignore[attr-defined]  # as any module may have it
    if module.__name__ == _ROOT:
        module.__version__ = version  # type: ignore[attr-defined]  # likewise

    def refuse(name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name)
        raise AttributeError(refusal(f"{module.__name__}.{name}"))

    module.__getattr__ = refuse  # type: ignore[method-assign]  # torch's own modules do so too


def refusal(name: str) -> str:
    """Return the message that the package has no ``name``, a full name, and what to use instead."""
    inside = name.removeprefix(f"{_TORCH}.").removeprefix(f"{_ROOT}.common.")
    remedy = names.refusal(inside)
    if remedy is not None:
        return f"{name}: {remedy}"
    for module, remedy in _REMEDIES.items():
        if inside.startswith(module):
            return f"{name} is not offered: {remedy}"
    word = name.rpartition(".")[2]
    if name.startswith(finder.NATIVE):
        return (
            f"{name}: fp8core has of that module {', '.join(_MODULES[finder.NATIVE])}, and none of "
            f"its other functions: fp8core.functional and fp8core.Quantizer quantize and multiply."
        )
    elsewhere = [module for module, names in _MODULES.items() if word in names]
    if elsewhere:
        return f"{name} does not exist under fp8core; {word} is in {elsewhere[0]}."
    return (
        f"{name}: fp8core does not offer it under Transformer Engine's name. docs/te-surface.md "
        f"lists what it offers; leave the feature out, or run it with Transformer Engine."
    )
