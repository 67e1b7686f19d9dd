"""Ways to compute backward of FP8 attention in bfloat16: errors against float64, and times.

    python -m tests.benchmarks.fp8_attention_backward_gpu [--length 4096 --heads 32 --head-dim 128]

* dequantized: q, k and v dequantized to bfloat16, result and statistics of the FP8 forward.
* recomputed: the same tensors, result and statistics of a forward in bfloat16 of them.
* codes: the library's way, see ``backends/cuda/attention_codes.py``.
* codes, FP8 result: the same codes, result and statistics of the FP8 forward.

Causal, two sequences, logits of standard deviation 1 and 10. Errors are norms relative to the
gradients of the same codes in float64, of two heads; times are medians of 20 calls, in ms.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, Operand, OperandSpec
from fp8core_backends.cuda.attention_backward import GraphAttentionBackward
from fp8core_backends.cuda.attention_codes import CodesAttentionBackward
from fp8core_backends.cuda.attention_forward import GraphAttention
from fp8core_backends.cuda.attention_support import FP8, FRONTEND, KernelNames
from tests.benchmarks.measuring.device import versions

DEVICE = torch.device("cuda", 0)
E4M3 = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
BATCH, EXACT_HEADS = 2, 2
WARM_UP, CALLS = 5, 20

Tensors = tuple[torch.Tensor, ...]


class Backward:
    """The ways, for one gradient and the codes of q, k and v, ``[b, s, heads, d]``."""

    def __init__(self, desc: AttentionDesc, grad: torch.Tensor, operands: list[Operand]) -> None:
        self._grad, self._operands, self._scale = grad, operands, desc.scale
        names = KernelNames(FRONTEND, ())
        in_fp8 = dataclasses.replace(desc, qkv=E4M3, s=E4M3, out=E4M3)
        self._attend = GraphAttention(desc, DEVICE, names)
        self._backward = GraphAttentionBackward(AttentionBackwardDesc(desc), DEVICE, names)
        self._from_codes = CodesAttentionBackward(AttentionBackwardDesc(in_fp8), DEVICE, names)
        scale = torch.full((1,), 448.0, device=DEVICE)
        attend = GraphAttention(in_fp8, DEVICE, KernelNames(FP8, ()))
        result, self._stats, _ = attend(*operands, s_scale=scale)
        self._out = values(operands[2]._replace(data=result))

    def dequantized(self) -> Tensors:
        given = [values(one) for one in self._operands]
        return self._backward(self._grad, *given, self._out, self._stats)[:3]

    def recomputed(self) -> Tensors:
        given = [values(one) for one in self._operands]
        out, stats, _ = self._attend(*given)
        return self._backward(self._grad, *given, out, stats)[:3]

    def codes(self) -> Tensors:
        return self._from_codes(self._grad, *self._operands, self._out, self._stats)[:3]

    def codes_fp8_result(self) -> Tensors:
        of_q, of_k, of_v = (one.scale_inv for one in self._operands)
        given = [one.data.view(torch.float8_e4m3fn).bfloat16() for one in self._operands]
        logit_scale = of_q * self._scale * of_k
        grad_q, grad_k, grad_v, *_ = self._backward(
            *(self._grad, *given, self._out.div(of_v).bfloat16(), self._stats),
            logit_scale=logit_scale,
        )
        return grad_q.mul_(of_v / of_q), grad_k.mul_(of_v / of_k), grad_v


def quantized(x: torch.Tensor) -> Operand:
    """Return ``x`` in e4m3, its amax at 448."""
    scale = 448 / x.abs().amax().float()
    codes = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Operand(codes.view(torch.uint8), (1 / scale).reshape(1))


def values(operand: Operand) -> torch.Tensor:
    return (operand.data.view(torch.float8_e4m3fn).float() * operand.scale_inv).bfloat16()


def exact(operands: list[Operand], grad: torch.Tensor, scale: float) -> Tensors:
    """Return the gradients of the first heads of sequence 0 in float64, ``[heads, s, d]``."""
    q, k, v = (
        of_heads(one.data.view(torch.float8_e4m3fn)) * one.scale_inv.double() for one in operands
    )
    grads = of_heads(grad)
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=DEVICE).triu(1)
    weights = (q @ k.mT * scale).masked_fill(hidden, -math.inf).softmax(-1)
    flow = grads @ v.mT
    logits = weights * (flow - (weights * flow).sum(-1, keepdim=True)) * scale
    return logits @ k, logits.mT @ q, weights.mT @ grads


def of_heads(x: torch.Tensor) -> torch.Tensor:
    return x[0, :, :EXACT_HEADS].double().transpose(0, 1)


def time_of(run: Callable[[], object]) -> float:
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    given = parser.parse_args()
    heads, size = given.heads, given.head_dim
    scale = size**-0.5
    desc = AttentionDesc(
        *(torch.bfloat16, "bshd", heads, heads, size, size, scale),
        window=(-1, 0),
    )
    print(versions("nvidia-cudnn-frontend"), "cudnn", torch.backends.cudnn.version())
    print("| deviation | way | dq | dk | dv | ms |\n|---|---|---|---|---|---|")
    for deviation in (1.0, 10.0):
        torch.manual_seed(0)
        dims = (BATCH, given.length, heads, size)
        q, k, v, grad = (torch.randn(dims, device=DEVICE) for _ in range(4))
        operands = [quantized(x.bfloat16()) for x in (q * deviation**0.5, k * deviation**0.5, v)]
        backward = Backward(desc, grad.bfloat16(), operands)
        wanted = exact(operands, grad.bfloat16(), scale)
        for way in (
            *(backward.dequantized, backward.recomputed, backward.codes),
            backward.codes_fp8_result,
        ):
            errors = [
                float((of_heads(got) - want).norm() / want.norm())
                for got, want in zip(way(), wanted, strict=True)
            ]
            shown = " | ".join(f"{error:.4f}" for error in errors)
            print(f"| {deviation:g} | {way.__name__} | {shown} | {time_of(way):.3f} |", flush=True)


if __name__ == "__main__":
    main()
