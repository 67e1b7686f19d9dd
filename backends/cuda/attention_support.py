"""Which attention runs on CUDA, by which library, and why other attention does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from fp8core.backend_api import (
    ATTENTION_BIASES,
    ATTENTION_LAYOUTS,
    ATTENTION_SOFTMAXES,
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    OperandSpec,
)
from fp8core_backends.cuda import cudnn_frontend
from fp8core_backends.cuda.layout import scale_mode
from fp8core_backends.cuda.tiers import tier_of

TORCH = "cuDNN's attention, by torch"
FRONTEND = "cuDNN's attention, by its frontend"
FP8 = "cuDNN's FP8 attention, by its frontend"


class KernelNames(NamedTuple):
    """The kernel that runs a descriptor, and the others, each with why it does not."""

    chosen: str
    rejected: tuple[tuple[str, str], ...]


_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_HEAD_STEP = 8  # elements: 16 bytes
_FP8_HEAD_STEP = 16
_SEEN_IN_FP8: Mapping[tuple[int, int], Collection[str]] = {
    **dict.fromkeys(
        [(64, 64), (64, 128)],
        ("open", "causal", "causal, padding", "two-sided", "two-sided, padding"),
    ),
    (128, 128): ("causal", "causal, padding"),
    **dict.fromkeys([(16, 16), (32, 32)], ("causal",)),
}
"""The FP8 attention that gave right results on Hopper, by head sizes; what opens others.

cuDNN's check of support also accepts kinds whose kernels crash. In a probe on an H200 (cuDNN 9.19,
frontend 1.23, 2026-11-27) padding without a mask, heads of 128, did not end with an empty sequence,
and was right with none, in one case. On an H100 (2026-11-28, 11 pairs of lengths) heads of 64
with values of 128 passed all checks of the tests, and heads of 128 with padding. Without padding
statistics of heads of 128, causal too, were off by 0.0024 at 130 queries of 5 keys, where the tests
allow 0.0020, with results at 30 dB; windows failed in a check that was not told. Results and
gradients in bfloat16 and float16 cuDNN refuses there itself, as Blackwell's alone."""


def attention_backward_problem(desc: AttentionBackwardDesc, device: torch.device) -> str | None:
    """Say why cuDNN cannot compute the gradients of attention on the device, or None."""
    if type(desc.attention) is not AttentionDesc:
        return f"no gradients of {type(desc.attention).__name__}"
    is_part = isinstance(desc, AttentionPartBackwardDesc)
    if desc.grad_output is not None or desc.dp is not None:
        return (
            "no FP8 backward of attention, which is slower than that of bfloat16 on Hopper; "
            'fp8_dpa_backward="dequantized" runs'
        )
    if is_part and desc.low_precision:
        return "no gradients of a part of the keys from codes: it attends to all keys once more"
    if desc.bias_grad and desc.attention.bias is None:
        return "the gradient of a bias without a bias"
    problem = attention_problem(desc.attention, device)
    if problem is None and is_part:
        # cuDNN takes the weights from the statistics and the products of rows from the result, as
        # a part needs; torch's operator is not asked, whose single key has the weight 1.
        problem = _frontend_problem(desc.attention)
    return problem


def attention_problem(desc: AttentionDesc, device: torch.device) -> str | None:
    """Say why no kernel of cuDNN computes attention on the device, or None."""
    reason = form_problem(desc, device)
    if reason is not None:
        return reason
    reasons = kernels(desc)
    if None in reasons.values():
        return None
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


def form_problem(desc: AttentionDesc, device: torch.device) -> str | None:
    """Say what no attention on the device has, or None."""
    capability = torch.cuda.get_device_capability(device)
    problems = (
        (desc.dtype not in _DTYPES, f"no attention of {desc.dtype}; bfloat16 and float16 run"),
        (
            not tier_of(capability).is_hopper,
            f"attention is declared for compute capability 9.0, this is {capability[0]}."
            f"{capability[1]}",
        ),
        (desc.layout not in ATTENTION_LAYOUTS, f"no layout {desc.layout!r}"),
        (desc.softmax not in ATTENTION_SOFTMAXES, f"no softmax {desc.softmax!r}"),
        (
            desc.groups < 1 or desc.heads < 1 or desc.heads % max(desc.groups, 1) != 0,
            f"{desc.heads} heads are no multiple of {desc.groups} groups",
        ),
        (min(desc.window) < -1, f"no window {desc.window}"),
        (not 0 <= desc.dropout < 1, "dropout is at least 0 and below 1"),
        (desc.layout == "thd" and not desc.padding, "thd without padding: sequences have lengths"),
        (
            desc.arbitrary and (desc.padding or desc.window != (-1, -1)),
            "an arbitrary mask excludes padding and window: it says all of them itself",
        ),
        (desc.bias not in ATTENTION_BIASES, f"no bias {desc.bias!r}"),
    )
    return next((text for wrong, text in problems if wrong), None)


def kernels(desc: AttentionDesc) -> dict[str, str | None]:
    """Return the kernels for attention in the order of preference, each with why it does not run
    ``desc``, or None; one of them alone has None."""
    problems = {TORCH: _torch_problem, FRONTEND: _frontend_problem, FP8: _fp8_problem}
    reasons = {name: problem(desc) for name, problem in problems.items()}
    chosen = next((name for name, reason in reasons.items() if reason is None), None)
    return {
        name: f"{chosen} comes first" if reason is None and name != chosen else reason
        for name, reason in reasons.items()
    }


def _torch_problem(desc: AttentionDesc) -> str | None:
    """Say why torch's operator for cuDNN does not compute ``desc``, or None: it takes no mask, or a
    causal one with its diagonal at the top left corner, of sequences without padding."""
    features = (
        (desc.low_precision, "FP8"),
        (desc.layout == "thd", "thd"),
        (desc.padding, "padding"),
        (desc.window not in ((-1, -1), (-1, 0)), "window"),
        (desc.bottom_right, "diagonal at the bottom right corner"),
        (desc.arbitrary, "arbitrary mask"),
        (desc.bias is not None, "bias"),
        (desc.softcap != 0, "cap of logits"),
        (desc.softmax != "vanilla", "sink"),
        (desc.dropout > 0, "dropout"),
        (desc.max_logit, "largest logit"),
    )
    missing = [name for is_needed, name in features if is_needed]
    if missing:
        return f"no {', no '.join(missing)}"
    reason = _head_problem(desc, _HEAD_STEP)
    is_built = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]  # torch's
    return reason or (None if is_built else "this torch is built without cuDNN")


def _frontend_problem(desc: AttentionDesc) -> str | None:
    """Say why cuDNN's frontend does not compute ``desc`` in high precision, or None."""
    is_at_the_end = desc.bottom_right and desc.window[1] >= 0
    has_bias = desc.bias is not None or desc.arbitrary
    problems = (
        (desc.low_precision, "it quantizes nothing"),
        (desc.softcap != 0, "no cap of logits beside masks"),
        (desc.bias == "alibi", "its ALiBi has slopes of its own, and takes none"),
        (has_bias and desc.layout == "thd", "no bias for sequences in thd"),
        (
            is_at_the_end and (has_bias or desc.dropout > 0),
            "no bias and no dropout with a diagonal at the bottom right corner",
        ),
        (desc.max_logit and desc.softmax != "vanilla", "no largest logit beside a sink"),
    )
    reason = next((text for wrong, text in problems if wrong), None)
    return reason or _head_problem(desc, _HEAD_STEP) or cudnn_frontend.missing()


def _fp8_problem(desc: AttentionDesc) -> str | None:
    """Say why cuDNN's FP8 attention on Hopper does not compute ``desc``, or None."""
    specs = (desc.qkv, desc.s, desc.out)
    kind, sizes = _kind_in_fp8(desc), (desc.head_dim, desc.head_dim_v)
    problems = (
        (specs == (None, None, None), "nothing is quantized"),
        (
            desc.qkv is None or desc.s is None,
            "q, k and v are quantized, and the weights or the result alone are not",
        ),
        (desc.out is None, 'on Hopper it returns FP8 alone; fp8_dpa_output="fp8" asks for that'),
        (not all(map(_is_tensorwise_e4m3, specs)), "it takes tensorwise e4m3"),
        (desc.softcap != 0, "no cap of logits"),
        (desc.bias is not None or desc.arbitrary, "no bias and no arbitrary mask"),
        (
            desc.bottom_right and desc.window[1] >= 0,
            "no diagonal at the bottom right corner on Hopper",
        ),
        (desc.layout == "thd", "thd ends in an illegal instruction"),
        (desc.dropout > 0, "dropout ends in an illegal address"),
        (desc.softmax != "vanilla", "no plan for a sink"),
        (desc.max_logit, "the largest logits are wrong"),
        (
            kind not in _SEEN_IN_FP8.get(sizes, ()),
            f"{kind}, with head sizes {sizes}, was not seen to pass",
        ),
    )
    reason = next((text for wrong, text in problems if wrong), None)
    return reason or _head_problem(desc, _FP8_HEAD_STEP) or cudnn_frontend.missing()


def _kind_in_fp8(desc: AttentionDesc) -> str:
    """Return the mask of FP8 attention, by its name in :data:`_SEEN_IN_FP8`."""
    left, right = desc.window
    masks = {
        "open": desc.window == (-1, -1),
        "causal": desc.window == (-1, 0),
        "two-sided": left > 0 and right > 0 and not desc.bottom_right,
    }
    mask = next((name for name, is_it in masks.items() if is_it), f"window {desc.window}")
    return f"{mask}, padding" if desc.padding else mask


def _head_problem(desc: AttentionDesc, step: int) -> str | None:
    sizes = (desc.head_dim, desc.head_dim_v)
    if all(0 < size <= _LARGEST_HEAD and size % step == 0 for size in sizes):
        return None
    return f"head sizes {sizes}: it takes multiples of {step} up to {_LARGEST_HEAD}"


def _is_tensorwise_e4m3(spec: OperandSpec | None) -> bool:
    return (
        spec is not None
        and spec.format == "e4m3"
        and scale_mode(spec) == "tensor"
        and not spec.stochastic
        and spec.transform is None
    )
