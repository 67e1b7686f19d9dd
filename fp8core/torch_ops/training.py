"""Steps of optimizers as operators of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.torch_ops.definition import Tensors, bound, define, given

__all__ = ["adam_call"]

Call = Callable[..., Any]
Optional = torch.Tensor | None


# The numbers of a step: a tensor of one element for those that the device knows, None for the
# others, and all of them as numbers.


@define(
    "(str operation, Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] masters, Tensor?[] on_device, float[] numbers) -> ()",
    lambda text, grads, params, exp_avgs, exp_avg_sqs, masters, on_device, numbers: None,
)
def _adam(
    text: str,
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    on_device: Sequence[Optional],
    numbers: Sequence[float],
) -> None:
    keywords = dict(zip(_ADAM_NUMBERS, numbers, strict=True))
    keywords |= given(**dict(zip(_ADAM_TENSORS, on_device, strict=True)))
    keywords["bias_correction"] = bool(keywords["bias_correction"])
    lists = (grads, params, exp_avgs, exp_avg_sqs, masters)
    bound(text, params[0].device)(*lists, **keywords)


_ADAM_NUMBERS = (
    *("lr", "beta1", "beta2", "eps", "weight_decay", "step", "bias_correction", "inv_scale"),
)
_ADAM_TENSORS = ("lr", "step", "inv_scale", "found_inf")


_ADAM_DEFAULTS = {"bias_correction": True, "inv_scale": 1.0}


def adam_call(text: str) -> Call:
    """Return a step's call: lists of tensors, then numbers by keyword."""

    def run(*lists: Tensors, **keywords: Any) -> None:
        if not lists[0]:
            return
        on_device = [keywords.get(name) for name in _ADAM_TENSORS]
        on_device = [one if isinstance(one, torch.Tensor) else None for one in on_device]
        numbers = [keywords.get(name, _ADAM_DEFAULTS.get(name)) for name in _ADAM_NUMBERS]
        plain = [0.0 if isinstance(n, torch.Tensor) else float(n) for n in numbers]  # type: ignore[arg-type]  # only names with a default may be missing
        _adam(text, *map(list, lists), on_device, plain)

    return run
