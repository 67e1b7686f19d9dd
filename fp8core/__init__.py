"""Train and run Transformers in low precision on any accelerator, behind one front end.

Importing it loads no backend and touches no device.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from fp8core import errors, formats, functional, names, ops, recipe
from fp8core.backend_api import hooks as hookspecs  # noqa: F401
from fp8core.context.autocast import autocast, fp8_autocast
from fp8core.context.recompute import checkpoint
from fp8core.conversion.convert import ConversionReport, convert, unconvert
from fp8core.conversion.inference import QuantizationReport, quantize_
from fp8core.dispatch.policy import use_backend
from fp8core.errors import (
    CollectiveError,
    Fp8CoreError,
    NonFiniteError,
    OperandError,
    PluginError,
    RecipeError,
    UnsupportedError,
)
from fp8core.functional import quantizers as quantizers
from fp8core.functional.quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fp8core.inspection import monitoring as monitoring
from fp8core.inspection.explain import (
    explain,
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from fp8core.inspection.monitoring import monitor
from fp8core.modules.attention import DotProductAttention
from fp8core.modules.layers.grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from fp8core.modules.layers.layernorm_linear import LayerNormLinear
from fp8core.modules.layers.layernorm_mlp import LayerNormMLP
from fp8core.modules.layers.linear import Linear
from fp8core.modules.layers.norm import LayerNorm, RMSNorm
from fp8core.modules.models.found_inf import clear_found_inf, found_inf, watch_grad_scaler
from fp8core.modules.models.frozen import frozen_weights
from fp8core.modules.models.graphs import make_graphed_callables
from fp8core.modules.models.prepare import prepare
from fp8core.modules.multihead_attention import MultiheadAttention
from fp8core.modules.sequences.inference import InferenceParams
from fp8core.modules.sequences.kv_cache import KVCacheManager
from fp8core.modules.sequences.rotary import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from fp8core.modules.sequences.rotary_angles import RotaryPositionEmbedding
from fp8core.modules.transformer_layer import TransformerLayer
from fp8core.ops.activation import deinterleave_glu_tensor, interleave_glu_tensor
from fp8core.recipe import (
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    get_default_recipe,
)
from fp8core.recipe import plan as plan
from fp8core.tensors.parameter import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    MasterWeights,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    fp8_model_init,
    quantized_model_init,
)
from fp8core.tensors.saving import (
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from fp8core.training import cpu_offload as cpu_offload
from fp8core.training import cross_entropy as cross_entropy
from fp8core.training import optimizers, router
from fp8core.training import permutation as permutation
from fp8core.training.cpu_offload import (
    ManualOffloadSynchronizer,
    get_cpu_offload_context,
    mark_not_offload,
)
from fp8core.training.cross_entropy import parallel_cross_entropy
from fp8core.training.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "ConversionReport",
    "CudaRNGStatesTracker",
    "DType",
    "DelayedScalingRequest",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Fp8CoreError",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "InferenceParams",
    "KVCacheManager",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "ManualOffloadSynchronizer",
    "MasterWeights",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "NonFiniteError",
    "OperandError",
    "PluginError",
    "QuantizationReport",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "RecipeError",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "UnsupportedError",
    "__version__",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "clear_found_inf",
    "convert",
    "deinterleave_glu_tensor",
    "errors",
    "explain",
    "formats",
    "found_inf",
    "fp8_autocast",
    "fp8_model_init",
    "frozen_weights",
    "functional",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "mark_not_offload",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "monitor",
    "onnx_export",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "prepare",
    "prepare_for_saving",
    "quantize_",
    "quantized_model_init",
    "recipe",
    "restore_from_func_ctx",
    "restore_from_saved",
    "router",
    "tune",
    "unconvert",
    "use_backend",
    "watch_grad_scaler",
]


def __dir__() -> list[str]:
    """Return the public names, and the modules that are loaded, also by their short names."""
    modules = [
        name
        for name, value in globals().items()
        if isinstance(value, ModuleType)
        and value.__name__ == f"{__name__}.{names.SHORT.get(name, name)}"
    ]
    return sorted({*__all__, *modules})


names.install()

if TYPE_CHECKING:
    from fp8core import distributed as distributed
    from fp8core.inspection.tuning import tune as tune
    from fp8core.integrations import huggingface as huggingface
    from fp8core.integrations import lightning as lightning
    from fp8core.integrations import megatron as megatron
    from fp8core.integrations import mindspeed as mindspeed
    from fp8core.integrations import torchtitan as torchtitan
    from fp8core.integrations import transformer_engine as transformer_engine
    from fp8core.integrations.transformer_engine.distributed import (
        CudaRNGStatesTracker as CudaRNGStatesTracker,
    )
    from fp8core.interchange import checkpoints as checkpoints
    from fp8core.interchange import export as export
    from fp8core.interchange.export import onnx_export as onnx_export
else:  # to a type checker, it would make every name an attribute

    def __getattr__(name: str) -> object:
        """Return the module of a short name, or a public name whose module is loaded late.

        Raises:
            AttributeError: there is none; names the alternative to a name of Transformer Engine,
                the place of a module that moved, or the nearest public name.
        """
        if name in names.SHORT or name == "distributed":
            return importlib.import_module(f"{__name__}.{name}")
        if name in names.LATE:
            return getattr(importlib.import_module(f"{__name__}.{names.LATE[name]}"), name)
        refusal = names.refusal(name) or names.moved(f"{__name__}.{name}")
        if refusal is not None:
            raise AttributeError(refusal)
        recipes = {n: f"recipe.{n}" for n in recipe.__all__}
        text = names.absent(__name__, name, recipes | {n: n for n in __dir__()})
        raise AttributeError(text, name=name)  # with obj=, Python would add a second suggestion
