"""Backward of attention in high precision from the codes of queries, keys and values.

Codes are exact in bfloat16 and float16, where the values that they stand for are not. So cuDNN
attends to the codes, with the scale of logits a number on the device, and the result and the
gradients of logits are ``1 / scale_inv_v`` times those of the values::

    logit_scale = scale * scale_inv_q * scale_inv_k
    grad_q = grad_q of the codes * scale_inv_v / scale_inv_q
    grad_k = grad_k of the codes * scale_inv_v / scale_inv_k
    grad_v = grad_v of the codes
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fp8core.backend_api import AttentionBackwardDesc, Operand
from fp8core_backends.cuda.attention_backward import Gradients, GraphAttentionBackward
from fp8core_backends.cuda.attention_forward import GraphAttention
from fp8core_backends.cuda.attention_operands import check_number, check_operands, check_rows
from fp8core_backends.cuda.attention_support import KernelNames


class CodesAttentionBackward:
    """The gradients of attention to e4m3 codes without bias and sink; see AttentionBackwardDesc.

    Backward computes the result once more. cuDNN takes the gradients of logits from the result, and
    that of forward was rounded to e4m3: with it these gradients are further off than by all
    roundings of bfloat16.
    """

    __slots__ = ("_attend", "_backward", "_desc", "kernel", "other_kernels")

    def __init__(
        self, desc: AttentionBackwardDesc, device: torch.device, names: KernelNames
    ) -> None:
        self._desc = desc.attention
        of_codes = dataclasses.replace(desc.attention, qkv=None, s=None, out=None)
        self._attend = GraphAttention(of_codes, device, names)
        self._backward = GraphAttentionBackward(AttentionBackwardDesc(of_codes), device, names)
        self.kernel, self.other_kernels = names

    def __call__(
        self,
        grad_out: torch.Tensor,
        q: Operand,
        k: Operand,
        v: Operand,
        out: torch.Tensor,
        stats: torch.Tensor,
        **keywords: Any,
    ) -> Gradients:
        """Return the gradients; see the backend API."""
        desc, device = self._desc, self._backward.device
        check_operands(desc, q.data, k.data, v.data, device)
        check_rows(desc, q.data, grad_out, out, stats)
        # Of one dimension: the product of a tensor and a number without any rounds the number.
        of_q, of_k, of_v = (
            check_number(desc, f"scale_inv of {name}", x.scale_inv, device).view(1)
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
        queries, keys, values = (x.data.view(torch.float8_e4m3fn).to(desc.dtype) for x in (q, k, v))
        keywords["logit_scale"] = of_q * desc.scale * of_k
        rows, log_sums, _ = self._attend(queries, keys, values, **keywords)
        grad_q, grad_k, grad_v, *_ = self._backward(
            grad_out, queries, keys, values, rows, log_sums, **keywords
        )
        return grad_q.mul_(of_v / of_q), grad_k.mul_(of_v / of_k), grad_v, None, None
