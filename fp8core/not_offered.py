"""Names of Transformer Engine that fp8core does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NOT_OFFERED", "refusal"]

_ASK = 'use fp8core.explain("gemm", recipe).refused, or `fp8core doctor` for the whole machine'
_BACKENDS = "backends quantize, recipes say how (fp8core.recipe); there are no quantizer objects"
_PADDING = "it is not needed, layers pad sizes that blocks do not divide"
_ROUTING = "permute tokens with torch, and give fp8core.GroupedLinear the rows of each expert"
_OFFLOAD = "use torch.autograd.graph.save_on_cpu, or fp8core.checkpoint to save less"
_OVERLAP = "tensor and sequence parallelism are not offered"
_GROUPS: Mapping[str, tuple[str, ...]] = {
    _ASK: (
        "is_bf16_available",
        "is_fp8_available",
        "is_fp8_block_scaling_available",
        "is_mxfp8_available",
        "is_nvfp4_available",
    ),
    _BACKENDS: (
        "Float8BlockQuantizer",
        "Float8CurrentScalingQuantizer",
        "Float8Quantizer",
        "MXFP8Quantizer",
        "NVFP4Quantizer",
        "Quantizer",
    ),
    _PADDING: ("Fp8Padding", "Fp8Unpadding"),
    _ROUTING: (
        "moe_permute",
        "moe_permute_and_pad_with_probs",
        "moe_permute_with_probs",
        "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs",
        "moe_unpermute",
    ),
    _OFFLOAD: ("ManualOffloadSynchronizer", "get_cpu_offload_context", "mark_not_offload"),
    _OVERLAP: (
        "CudaRNGStatesTracker",
        "UserBufferQuantizationMode",
        "destroy_ub",
        "initialize_ub",
    ),
    "use any optimizer of torch, with fp8core.MasterWeights for low-precision parameters": (
        "optimizers",
    ),
    "use torch.export.export on an inference model": ("onnx_export",),
    "use torch.nn.functional.cross_entropy": ("parallel_cross_entropy",),
}
NOT_OFFERED: Mapping[str, str] = {
    name: instead for instead, names in _GROUPS.items() for name in names
}
"""The alternative for each name of ``transformer_engine.pytorch``."""


def refusal(name: str) -> str | None:
    """Return the message that fp8core has no ``name``, with the alternative; None for other names.

    >>> refusal("Fp8Padding")
    'fp8core offers no Fp8Padding: it is not needed, layers pad sizes that blocks do not divide.'
    """
    instead = NOT_OFFERED.get(name)
    return None if instead is None else f"fp8core offers no {name}: {instead}."
