"""The descriptors of what training needs around the layers, with a label for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

import torch

from fp8core.backend_api import (
    AdamDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DispatchDesc,
    OpDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
    SgdDesc,
)

__all__ = ["Labelled", "training_descs"]


class Labelled(NamedTuple):
    """A descriptor and the words for its variant; those of one operation differ."""

    variant: str
    desc: OpDesc


def training_descs(dtype: torch.dtype) -> Iterator[Labelled]:
    """Yield every variant for activations, gradients and parameters of ``dtype``."""
    yield Labelled("mask", RouteDesc(torch.bool, "mask"))
    yield Labelled("mask.int32", RouteDesc(torch.int32, "mask"))
    yield Labelled("experts", RouteDesc(torch.int32, "experts"))
    yield Labelled("experts.int64", RouteDesc(torch.int64, "experts"))
    yield Labelled("rows", RouteDesc(torch.int32, "rows"))
    yield Labelled("", DispatchDesc(dtype))
    yield Labelled("probable", DispatchDesc(dtype, skips_improbable=True))
    yield Labelled("", CombineDesc(dtype))
    yield Labelled("", CombineBackwardDesc(dtype))
    yield from _routers(dtype)
    yield from _cross_entropies(dtype)
    yield from _steps(dtype)


def _routers(dtype: torch.dtype) -> Iterator[Labelled]:
    routers = {
        "softmax": RouterDesc(dtype, 3, "softmax", scaling_factor=2.5),
        "softmax.pre": RouterDesc(dtype, 3, "softmax", pre_softmax=True),
        "softmax.groups": RouterDesc(dtype, 4, "softmax", num_groups=3, group_topk=2),
        "softmax.all": RouterDesc(dtype, 3, "softmax", of_all=True),
        "sigmoid": RouterDesc(dtype, 3, "sigmoid", scaling_factor=2.5),
        "sigmoid.one": RouterDesc(dtype, 1, "sigmoid"),
        "sigmoid.groups": RouterDesc(dtype, 4, "sigmoid", num_groups=3, group_topk=2),
        "sigmoid.all": RouterDesc(dtype, 3, "sigmoid", of_all=True),
        "sqrtsoftplus": RouterDesc(dtype, 3, "sqrtsoftplus"),
        "sqrtsoftplus.all": RouterDesc(dtype, 1, "sqrtsoftplus", of_all=True),
    }
    for variant, desc in routers.items():
        yield Labelled(variant, desc)
        values = {field.name: getattr(desc, field.name) for field in fields(desc)}
        yield Labelled(variant, RouterBackwardDesc(**values))


def _cross_entropies(dtype: torch.dtype) -> Iterator[Labelled]:
    for variant, smoothing in (("", 0.0), ("smoothed", 0.1)):
        yield Labelled(variant, CrossEntropyDesc(dtype, smoothing))
        yield Labelled(variant, CrossEntropyBackwardDesc(dtype, smoothing))


def _steps(dtype: torch.dtype) -> Iterator[Labelled]:
    """Yield steps of parameters of ``dtype`` with gradients likewise and in float32."""
    single = torch.float32
    for grad_dtype in dict.fromkeys((dtype, single)):
        of_grads = "" if grad_dtype == dtype else "float32_grads."
        yield Labelled(f"{of_grads}adamw", AdamDesc(dtype, grad_dtype))
        yield Labelled(f"{of_grads}adam", AdamDesc(dtype, grad_dtype, decoupled=False))
        yield Labelled(f"{of_grads}plain", SgdDesc(dtype, grad_dtype))
        if dtype == single:
            continue
        masters = AdamDesc(dtype, grad_dtype, master="float32")
        yield Labelled(f"{of_grads}masters", masters)
        yield Labelled(f"{of_grads}copies", SgdDesc(single, grad_dtype, dtype))
        if dtype == torch.bfloat16:
            short = AdamDesc(dtype, grad_dtype, master="remainder")
            yield Labelled(f"{of_grads}remainders", short)
            small = AdamDesc(dtype, grad_dtype, torch.bfloat16, "float32")
            yield Labelled(f"{of_grads}bfloat16_averages", small)
    yield Labelled("late_decay", SgdDesc(dtype, dtype, decay_after_momentum=True))
