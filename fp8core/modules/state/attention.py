"""The delayed scaling of attention in Transformer Engine's form, of three GEMMs, and in fp8core's.

=======================  ============================  =========================================
Transformer Engine       slot of                       fp8core
=======================  ============================  =========================================
forward ``2``, QKV       output of the first GEMM      ``q``, ``k``, ``v``, one slot each
forward ``3``, O         input of the second           none: the result has the scale of ``v``
forward ``8``, S         output of the third           ``s``
backward ``0``, dQKV     gradient of the first output  none: these gradients are not quantized
backward ``3``, dO       of the second input           ``grad_output``
backward ``5``, dP       of the third input            ``dp``
=======================  ============================  =========================================

Source: Transformer Engine 2.20.2, pytorch/cpp_extensions/fused_attn.py, ``META_QKV`` to
``META_DP``; pytorch/constants.py numbers the slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8core.errors import OperandError
from fp8core.recipe.plan import AttentionPlan

_FORWARD = {"q": 2, "k": 2, "v": 2, "s": 8}
_BACKWARD = {"grad_output": 3, "dp": 5}
_QKV, _RESULT = 2, 3
_WAYS = {"fwd": (_FORWARD, AttentionPlan.slots.forward, 9)}
_WAYS["bwd"] = (_BACKWARD, AttentionPlan.slots.backward, 6)


def from_three_gemms(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return attention's buffers, without the metadata, from those of three GEMMs.

    Queries, keys and values take the scale that they have in common.

    Raises:
        OperandError: another number of slots.
    """
    buffers = {}
    for way, (places, names, count) in _WAYS.items():
        for name, fill in ((f"scale_{way}", 1.0), (f"amax_history_{way}", 0.0)):
            tensor = tensors[name]
            if tensor.shape[-1] != count:
                raise OperandError(
                    f"its {name} is {list(tensor.shape)}, expected {count} slots of attention"
                )
            buffer = tensor.new_full((*tensor.shape[:-1], len(names)), fill)
            for slot, at in places.items():
                buffer[..., names.index(slot)] = tensor[..., at]
            buffers[name] = buffer
    return buffers


def to_three_gemms(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of three GEMMs from attention's buffers.

    The common scale of queries, keys and values is the smallest, that of the largest amax; the
    result takes that of the values. Gradients of queries, keys and values start fresh.
    """
    tensors = {}
    for way, (places, names, count) in _WAYS.items():
        for name, fill in ((f"scale_{way}", 1.0), (f"amax_history_{way}", 0.0)):
            source = buffers[name]
            whole = source.new_full((*source.shape[:-1], count), fill)
            for slot, at in places.items():
                whole[..., at] = source[..., names.index(slot)]
            if way == "fwd":
                three = source[..., [names.index(slot) for slot in "qkv"]]
                is_scale = name.startswith("scale")
                whole[..., _QKV] = three.amin(-1) if is_scale else three.amax(-1)
                whole[..., _RESULT] = source[..., names.index("v")]
            tensors[name] = whole
    return tensors
