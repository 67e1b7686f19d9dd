"""Which attention runs on CUDA, by which library, and why other attention does not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.backend_api import (
    ATTENTION_BIASES,
    ATTENTION_LAYOUTS,
    ATTENTION_SOFTMAXES,
    AttentionBackwardDesc,
    AttentionDesc,
)
from fp8core_backends.cuda import cudnn_frontend

__all__ = [
    "FRONTEND",
    "TORCH",
    "KernelNames",
    "attention_backward_problem",
    "attention_problem",
    "kernels",
]

TORCH = "cuDNN's attention, by torch"
FRONTEND = "cuDNN's attention, by its frontend"


class KernelNames(NamedTuple):
    """The kernel that runs a descriptor, and the others, each with why it does not."""

    chosen: str
    others: tuple[tuple[str, str], ...]


_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_HEAD_STEP = 8  # elements: 16 bytes


def attention_backward_problem(desc: AttentionBackwardDesc, device: torch.device) -> str | None:
    """Say why cuDNN cannot compute the gradients of attention on the device, or None."""
    if type(desc.attention) is not AttentionDesc:
        return f"no gradients of {type(desc.attention).__name__}"
    if _is_quantized(desc.attention) or desc.grad_output is not None or desc.dp is not None:
        return (
            "no FP8 backward of attention, which is slower than that of bfloat16 on Hopper: "
            'fp8_dpa_backward="dequantized"'
        )
    if desc.bias_grad and desc.attention.bias is None:
        return "the gradient of a bias without a bias"
    return attention_problem(desc.attention, device)


def attention_problem(desc: AttentionDesc, device: torch.device) -> str | None:
    """Say why no kernel of cuDNN computes attention on the device, or None."""
    capability = torch.cuda.get_device_capability(device)
    problems = (
        (desc.dtype not in _DTYPES, f"no attention of {desc.dtype}; bfloat16 and float16 run"),
        (
            capability != (9, 0),
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
    reason = next((text for wrong, text in problems if wrong), None)
    if reason is not None:
        return reason
    reasons = kernels(desc)
    if None in reasons.values():
        return None
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


def kernels(desc: AttentionDesc) -> dict[str, str | None]:
    """Return the kernels for attention in the order of preference, each with why it does not run
    ``desc``, or None; one of them alone has None."""
    problems = {TORCH: _torch_problem, FRONTEND: _frontend_problem}
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
        (_is_quantized(desc), "FP8"),
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
    missing = [name for is_asked, name in features if is_asked]
    if missing:
        return f"no {', no '.join(missing)}"
    reason = _head_problem(desc)
    is_built = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]  # torch's
    return reason or (None if is_built else "this torch is built without cuDNN")


def _frontend_problem(desc: AttentionDesc) -> str | None:
    """Say why cuDNN's frontend does not compute ``desc`` in high precision, or None."""
    is_at_the_end = desc.bottom_right and desc.window[1] >= 0
    has_bias = desc.bias is not None or desc.arbitrary
    problems = (
        (_is_quantized(desc), "no FP8"),
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
    return reason or _head_problem(desc) or cudnn_frontend.missing()


def _is_quantized(desc: AttentionDesc) -> bool:
    return any(spec is not None for spec in (desc.qkv, desc.s, desc.out))


def _head_problem(desc: AttentionDesc) -> str | None:
    sizes = (desc.head_dim, desc.head_dim_v)
    if all(0 < one <= _LARGEST_HEAD and one % _HEAD_STEP == 0 for one in sizes):
        return None
    return f"head sizes {sizes}: it takes multiples of {_HEAD_STEP} up to {_LARGEST_HEAD}"
