"""What no layer can beat: its products alone, and a copy, which take turns with the layers.

The limit of a step is the time of its products, each by the algorithm that fp8core's backend found
to be the fastest, of attention by torch in a Transformer layer, and the ideal bytes of everything
else at the rate of the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import GemmDesc, Operand, Quantized, QuantizeDesc
from fp8core.chain.linear.shape import LinearShape
from fp8core.recipe.plan import TensorPlan
from tests.benchmarks.layers_gpu.cases import HIGH, Case
from tests.benchmarks.layers_gpu.data import Data, plan_of
from tests.benchmarks.layers_gpu.transformer import attend
from tests.benchmarks.measuring.device import Device

__all__ = ["COPY", "COPY_BYTES", "copy_step", "limit_us", "products_name", "products_step"]

COPY = "copy"
COPY_BYTES = 1 << 30
"""Read and written by one copy: half of it is the tensor, several times what the L2 cache has."""
GEMMS = ("fprop", "dgrad", "wgrad")


def products_name(recipe_name: str) -> str:
    """Return what the products of a recipe are called among the contestants."""
    return f"products {recipe_name}"


def copy_step(device: Device) -> Callable[[], object]:
    """Return a copy that reads half of :data:`COPY_BYTES` and writes the other half."""
    source = torch.randint(
        0, 256, (COPY_BYTES // 2,), dtype=torch.uint8, device=device.torch_device
    )
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def products_step(case: Case, recipe_name: str, data: Data, device: Device) -> Callable[[], object]:
    """Return a call of all products of a step, attention among them, on random data."""
    plan, backend = plan_of(recipe_name), device.backend()
    calls: list[tuple[Callable[..., Any], Operand, Operand]] = []
    rows, grad_rows = data.x.flatten(0, -2), data.grad.flatten(0, -2)
    for name, k, n in case.linears:
        x = rows if k == rows.shape[1] else _like(rows, k)
        grad = grad_rows if n == grad_rows.shape[1] else _like(grad_rows, n) * 0.01
        tensors = {"input": x, "weight": data.parameters[name], "grad_output": grad}
        if recipe_name == HIGH:
            quantized = {name: _in_high_precision(value) for name, value in tensors.items()}
        else:
            quantized = {
                name: _quantize(value, plan.tensors[name], backend, device)
                for name, value in tensors.items()
            }
        shape = LinearShape(k, n, torch.bfloat16, None)
        for gemm, operands in zip(GEMMS, _operands(quantized), strict=True):
            desc = shape.gemm_desc(gemm, plan, torch.bfloat16)
            calls.append((_bind(backend, desc, device), *operands))
    if not case.layer.has_attention:
        return lambda: [run(a, b) for run, a, b in calls]
    attention = _attention_step(case, data)
    return lambda: [*(run(a, b) for run, a, b in calls), *attention()]


def _attention_step(case: Case, data: Data) -> Callable[[], Sequence[torch.Tensor]]:
    """Return attention by torch on random queries, keys and values, with their gradients."""
    size, head_dim = case.size, case.size.hidden // case.size.heads
    inputs = [
        torch.randn(*case.leading, heads, head_dim, device=data.x.device)
        .to(data.x.dtype)
        .requires_grad_()
        for heads in (size.heads, size.groups, size.groups)
    ]
    grad = data.grad.unflatten(-1, (size.heads, head_dim))

    def step() -> Sequence[torch.Tensor]:
        out = attend(*inputs, is_causal=case.layer.is_causal)
        return torch.autograd.grad(out, inputs, grad)

    return step


def _like(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    shape = (tensor.shape[0], columns)
    return torch.randn(shape, device=tensor.device).to(tensor.dtype)


def _bind(backend: Any, desc: GemmDesc, device: Device) -> Callable[..., Any]:
    reason = backend.unsupported(desc, device.torch_device)
    if reason is not None:
        raise RuntimeError(f"{desc}: {reason}")
    run: Callable[..., Any] = backend.bind(desc, device.torch_device)
    return run


def _in_high_precision(value: torch.Tensor) -> Quantized:
    return Quantized(Operand(value), Operand(value.t()))


def _quantize(value: torch.Tensor, plan: TensorPlan, backend: Any, device: Device) -> Quantized:
    desc = QuantizeDesc(torch.bfloat16, *plan)
    keywords = {}
    if plan.is_delayed:
        spec = plan.rowwise or plan.columnwise
        assert spec is not None
        scale = spec.target / value.abs().amax().float().reshape(1)
        keywords = {"scale": scale, "amax_out": None}
    quantized: Quantized = backend.bind(desc, device.torch_device)(value, **keywords)
    return quantized


def _operands(quantized: dict[str, Quantized]) -> Sequence[tuple[Operand, Operand]]:
    """Return the operands of fprop, dgrad and wgrad."""
    x, weight, grad = (quantized[name] for name in ("input", "weight", "grad_output"))
    pairs = (
        (x.rowwise, weight.rowwise),  # [m, k] x [n, k] -> [m, n]
        (grad.rowwise, weight.columnwise),  # [m, n] x [k, n] -> [m, k]
        (grad.columnwise, x.columnwise),  # [n, m] x [k, m] -> [n, k]
    )
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def limit_us(
    products_us: Sequence[float], copy_us: Sequence[float], ideal_bytes: int
) -> list[float]:
    """Return the limit of each turn, us: its products, and the bytes at its copy's rate."""
    return [
        products + ideal_bytes * copy / COPY_BYTES
        for products, copy in zip(products_us, copy_us, strict=True)
    ]
