"""Names of Transformer Engine that fp8core does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COMMUNICATION", "NOT_OFFERED", "refusal"]

_ROUTER = "count the experts of a routing map with torch"
_OVERLAP = "collectives run on the process group itself; no buffers are shared in advance"
_FUSIONS = "a fusion replaces both directions: register_forward_backward_fusion"
_PLAIN = "IdentityQuantizer returns a plain tensor"
_LINEAR_ATTENTION = "linear attention is not offered; use a library that has its kernels"
_COMMUNICATION_GROUPS: Mapping[str, tuple[str, ...]] = {
    "layers take any tracker whose fork(name) is a context, as Megatron's": (
        "CudaRNGStatesTracker",
    ),
    _OVERLAP: (
        "UserBufferQuantizationMode",
        "destroy_ub",
        "initialize_ub",
    ),
    "set_context_parallel_group balances by two chunks of each sequence a rank": (
        "CPLoadBalancingStrategy",
    ),
    "it needs cuSOLVERMp across ranks; torch.optim.Muon has Newton-Schulz on one": (
        "CusolverMpCtx",
        "newton_schulz",
        "newton_schulz_tp",
    ),
}
_GROUPS: Mapping[str, tuple[str, ...]] = {
    **_COMMUNICATION_GROUPS,
    _PLAIN: (
        "IdentityTensor",
        "IdentityTensorStorage",
    ),
    _ROUTER: ("router.QBHistogramMode",),
    _LINEAR_ATTENTION: (
        "GatedDeltaNet2Attention",
        "GatedDeltaNetAttention",
        "GatedDeltaProductAttention",
    ),
    "use LayerNormLinear for the up-projection and apply_rotary_pos_emb for its result": (
        "FusedMLAQUpProjFunction",
        "FusedMLAQUpProjRopeQuant",
    ),
    _FUSIONS: (
        "ops.register_backward_fusion",
        "ops.register_forward_fusion",
    ),
    "use fp8core.export.to_onnx on an inference model": ("onnx_export",),
}
NOT_OFFERED: Mapping[str, str] = {
    name: instead for instead, names in _GROUPS.items() for name in names
}
"""The alternative for each name of ``transformer_engine.pytorch``; those of its modules, and of its
recipes, with the module in front: ``ops.AllGather``."""

COMMUNICATION = frozenset(name for names in _COMMUNICATION_GROUPS.values() for name in names)
"""Those of them that belong to several ranks which exchange tensors."""


def refusal(name: str) -> str | None:
    """Return the message that fp8core has no ``name``, with the alternative; None for other names.

    >>> refusal("onnx_export")
    'fp8core offers no onnx_export: use fp8core.export.to_onnx on an inference model.'
    """
    instead = NOT_OFFERED.get(name)
    return None if instead is None else f"fp8core offers no {name}: {instead}."
