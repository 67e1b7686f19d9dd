"""The contract between fp8core and a backend: plain tensors, small frozen descriptors, few verbs.

Every matrix product in the library has one form, with the contraction last and float32
accumulation::

    d[m, n] = a[m, k] @ b[n, k].T

and every operand ``[rows, k]`` is quantized along the dimension that the product contracts. An
operand is *rowwise* if it is quantized from ``x [rows, k]`` itself, *columnwise* if from ``x.T``:
columnwise(x) has the shape of ``x.T``. Shape is the contract; the backend that quantizes chooses
the strides, and a product takes operands of any strides, because they may come from another
backend.

Inputs of every operation may have any strides and sizes, also zero, are on the device that the
operation was bound for, and are not written unless the descriptor says so. Results are new
tensors, which share no memory with an input and do not depend on uninitialized memory.

A backend is described by a :class:`BackendSpec`, registered by a plug-in's
``fp8core_register_backends`` hook, and implements :class:`Backend`. A backend sees no module,
recipe, autograd graph, process group or global state.

The minimum is in three files: ``spec`` (what a backend class implements, and how it is registered),
``descriptors`` (quantize, dequantize and the product; groups) and ``operand_spec`` (how an operand
is quantized, and the tensors that it consists of). A backend that denies everything else is
complete. The other files have one subject each: ``amax``, ``attention`` and ``layers`` (norms,
activations, gradients of biases, their fusions) for more operations of layers; ``training`` for
what training needs around them; ``optional`` for speed.
"""

from __future__ import annotations

from functools import partial

from fp8core.backend_api.amax import (
    AmaxDesc,
    Amaxes,
    QuantizeByAmaxDesc,
    ScaleUpdateDesc,
    amax_extent,
    amax_of_groups,
    amax_sizes,
    has_amax,
    shares_amax,
    split_amax,
)
from fp8core.backend_api.attention import (
    ATTENTION_BIASES,
    ATTENTION_LAYOUTS,
    ATTENTION_SOFTMAXES,
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    CachedAttentionDesc,
    PackedRotaryDesc,
    PagedAttentionDesc,
    RotaryDesc,
    SingleQueryDesc,
)
from fp8core.backend_api.descriptors import (
    GROUP_STEP,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    QuantizeDesc,
    padded_offsets,
    split_groups,
)
from fp8core.backend_api.hooks import hookimpl
from fp8core.backend_api.layers import (
    ACTIVATIONS,
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    ColumnSumsDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
)
from fp8core.backend_api.operand_spec import (
    INVERSES,
    TRANSFORMS,
    Operand,
    OperandSpec,
    Quantized,
    hadamard16,
    hadamard16_unsigned,
    scale_inverses,
)
from fp8core.backend_api.optional import (
    Chunks,
    ComputedRows,
    MovesBeside,
    QuantizedChunks,
    Ranks,
    Recorder,
    Recording,
    RecordsCalls,
    Repeat,
    Sending,
    Transfers,
)
from fp8core.backend_api.spec import (
    API_VERSION,
    OPS,
    OPTIONAL_OPS,
    Alignment,
    Backend,
    BackendSpec,
    DeclaresNumerics,
    Finding,
    Numerics,
    OpDesc,
    bind_method,
    variant_of,
)
from fp8core.backend_api.training import (
    MASTER_KINDS,
    ROUTE_KINDS,
    SCORE_FUNCTIONS,
    AdamDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DispatchDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
)
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.formats import FormatSpec

__all__ = [
    "ACTIVATIONS",
    "API_VERSION",
    "ATTENTION_BIASES",
    "ATTENTION_LAYOUTS",
    "ATTENTION_SOFTMAXES",
    "GATED",
    "GROUP_STEP",
    "INVERSES",
    "MASTER_KINDS",
    "OPS",
    "OPTIONAL_OPS",
    "ROUTE_KINDS",
    "SCORE_FUNCTIONS",
    "TRANSFORMS",
    "ActivationBackwardDesc",
    "ActivationDesc",
    "AdamDesc",
    "AddNormDesc",
    "Alignment",
    "AmaxDesc",
    "Amaxes",
    "AttentionBackwardDesc",
    "AttentionDesc",
    "AttentionPartBackwardDesc",
    "Backend",
    "BackendSpec",
    "CachedAttentionDesc",
    "Chunks",
    "ColumnSumsDesc",
    "CombineBackwardDesc",
    "CombineDesc",
    "ComputedRows",
    "CrossEntropyBackwardDesc",
    "CrossEntropyDesc",
    "DeclaresNumerics",
    "DequantizeDesc",
    "DispatchDesc",
    "Finding",
    "FormatSpec",
    "FusedDesc",
    "GemmDesc",
    "GroupedGemmDesc",
    "MovesBeside",
    "NormBackwardDesc",
    "NormDesc",
    "Numerics",
    "OpDesc",
    "Operand",
    "OperandError",
    "OperandSpec",
    "PackedRotaryDesc",
    "PagedAttentionDesc",
    "QuantizeByAmaxDesc",
    "QuantizeDesc",
    "Quantized",
    "QuantizedChunks",
    "Ranks",
    "RecipeError",
    "Recorder",
    "Recording",
    "RecordsCalls",
    "Repeat",
    "RotaryDesc",
    "RouteDesc",
    "RouterBackwardDesc",
    "RouterDesc",
    "ScaleUpdateDesc",
    "Sending",
    "SingleQueryDesc",
    "Transfers",
    "UnsupportedError",
    "amax_extent",
    "amax_of_groups",
    "amax_sizes",
    "bind_method",
    "hadamard16",
    "hadamard16_unsigned",
    "has_amax",
    "hookimpl",
    "padded_offsets",
    "scale_inverses",
    "shares_amax",
    "split_amax",
    "split_groups",
    "variant_of",
]
__dir__ = partial(sorted, __all__)
