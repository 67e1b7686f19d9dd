"""The optional operations of a backend as operators: fusions with quantization, and add_norm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from fp8core.backend_api import AddNormDesc, FusedDesc
from fp8core.backend_api.record import RECORDS, ResultShape
from fp8core.torch_ops import shapes
from fp8core.torch_ops.counted import run_counted
from fp8core.torch_ops.definition import bound, define, empty, given, settle_all
from fp8core.torch_ops.derived import present
from fp8core.torch_ops.encoding import decode
from fp8core.torch_ops.operators import flat
from fp8core.torch_ops.private import (
    is_legacy_batched,
    is_transform_active,
    legacy_vmap,
    without_interpreters,
    without_keys,
)
from fp8core.torch_ops.shapes import is_captured

__all__ = ["_add_norm", "_fused", "drop"]


def _fused_shapes(text: str, arguments: Sequence[torch.Tensor | None]) -> list[ResultShape]:
    _, desc, transposes = decode(text)
    assert isinstance(desc, FusedDesc)
    produced = RECORDS[desc.producer.op].shapes(desc.producer, *arguments)
    first, *rest = present(produced)
    sums = [ResultShape((first.size[1],), torch.float32)] if desc.sums else []
    return [*shapes.quantize_shapes(desc.quantize, first.size, 0, transposes), *rest, *sums]


@define(
    "(str operation, Tensor?[] arguments, Tensor? scale, Tensor? amax, Tensor? rng, "
    "Tensor? nonfinite=None) -> Tensor[]",
    lambda text, arguments, scale, amax, rng, nonfinite=None: empty(
        shapes.with_records(_fused_shapes(text, arguments), amax, nonfinite), arguments[0].device
    ),
)
def _fused(
    text: str,
    arguments: Sequence[torch.Tensor | None],
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    rng: torch.Tensor | None,
    nonfinite: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    _, desc, transposes = decode(text)
    assert isinstance(desc, FusedDesc)
    assert arguments[0] is not None
    device = arguments[0].device
    new = None if amax is None else amax.clone()
    keywords = given(scale=scale, amax_out=new, rng=rng)
    results, count = run_counted(bound(text, device), arguments, keywords, nonfinite, device)
    first, *rest = results
    quantized = flat(first, shapes.hands_both_as_one(desc.quantize, transposes))
    wanted = shapes.with_records(_fused_shapes(text, arguments), amax, nonfinite)
    return settle_all([*quantized, *rest, new, count], wanted)


def _add_norm_shapes(text: str, x: torch.Tensor) -> list[ResultShape]:
    desc = decode(text).desc
    assert isinstance(desc, AddNormDesc)
    return [
        ResultShape((x.shape[0], x.shape[1]), desc.norm.dtype),
        *present(RECORDS["norm"].shapes(desc.norm, x, x[0], None)),
    ]


@define(
    "(str operation, Tensor x, Tensor residual, Tensor weight, Tensor? bias) -> Tensor[]",
    lambda text, x, residual, weight, bias: empty(_add_norm_shapes(text, x), x.device),
)
def _add_norm(
    text: str,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    run = bound(text, x.device)
    results = run(x, residual, weight, *(() if bias is None else (bias,)))
    return settle_all(results, _add_norm_shapes(text, x))


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    """Run the body outside torch's transforms, so that all gradients of a batch get one mask."""
    # Not by its count of nestings: that is the thread's, and GPUs have a thread for backward.
    with without_keys(legacy_vmap), without_interpreters():
        yield


def _dropped(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    if x.is_meta:  # meta has no generator, and no values
        return x * 1
    seed, offset = (int(value) for value in rng)
    generator = torch.Generator(device=x.device)
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + offset + index) & (2**63 - 1))
    is_batched = is_legacy_batched(x)
    is_plain = not (is_batched or is_transform_active())
    with contextlib.nullcontext() if is_plain else _outside_transforms():
        noise = torch.rand(x.shape, generator=generator, device=x.device)
    kept_rate = 1 - p or 1  # nothing is kept where it is 0
    return x * ((noise >= p).to(x.dtype) / kept_rate)


@define(
    "(Tensor x, Tensor rng, int index, float p) -> Tensor",
    lambda x, rng, index, p: x.new_empty(x.shape),
)
def _drop(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    return _dropped(x, rng, index, p).contiguous()


def drop(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    """Zero elements of ``x`` with probability ``p`` and scale the rest by ``1 / (1 - p)``.

    ``rng`` int64 ``[2]`` is a seed and an offset; ``index`` tells apart the uses of one seed.
    """
    if is_captured(x):
        result: torch.Tensor = _drop(x, rng, index, p)
        return result
    return _dropped(x, rng, index, p)
