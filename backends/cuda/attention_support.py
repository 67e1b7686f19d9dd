"""Which attention runs on CUDA, by which library, and why other attention does not."""

from __future__ import annotations

import torch

from fp8core.backend_api import ATTENTION_LAYOUTS, ATTENTION_SOFTMAXES, AttentionDesc
from fp8core_backends.cuda import cudnn_frontend

__all__ = ["attention_problem", "is_plain"]

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_HEAD_STEP = 8  # elements: 16 bytes
_BIASES = (None, "pre_scale", "post_scale")


def is_plain(desc: AttentionDesc) -> bool:
    """Whether torch's operator for cuDNN's attention computes it: no mask, or a causal one with its
    diagonal at the top left corner, of sequences without padding."""
    plain = AttentionDesc(
        *(desc.dtype, desc.layout, desc.heads, desc.groups),
        *(desc.head_dim, desc.head_dim_v, desc.scale),
    )
    causal = AttentionDesc(
        *(desc.dtype, desc.layout, desc.heads, desc.groups),
        *(desc.head_dim, desc.head_dim_v, desc.scale),
        window=(-1, 0),
    )
    return desc in (plain, causal) and desc.layout != "thd"


def attention_problem(
    desc: AttentionDesc, device: torch.device, *, bias_grad: bool = False
) -> str | None:
    """Say why cuDNN cannot compute attention or its gradients on the device, or None."""
    capability = torch.cuda.get_device_capability(device)
    sizes = (desc.head_dim, desc.head_dim_v)
    is_at_the_end = desc.bottom_right and desc.window[1] >= 0
    has_bias = desc.bias is not None or desc.arbitrary
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
        (
            any(not 0 < one <= _LARGEST_HEAD or one % _HEAD_STEP for one in sizes),
            f"head sizes {sizes}: cuDNN takes multiples of {_HEAD_STEP} up to {_LARGEST_HEAD}",
        ),
        (min(desc.window) < -1, f"no window {desc.window}"),
        (not 0 <= desc.dropout < 1, "dropout is at least 0 and below 1"),
        (desc.layout == "thd" and not desc.padding, "thd without padding: sequences have lengths"),
        (
            desc.arbitrary and (desc.padding or desc.window != (-1, -1)),
            "an arbitrary mask excludes padding and window: it says all of them itself",
        ),
        (desc.softcap != 0, "cuDNN's attention has no cap of logits beside masks"),
        (desc.bias == "alibi", "cuDNN's ALiBi has slopes of its own, and takes none"),
        (desc.bias not in (*_BIASES, "alibi"), f"no bias {desc.bias!r}"),
        (has_bias and desc.layout == "thd", "no bias for sequences in thd"),
        (
            is_at_the_end and (has_bias or desc.dropout > 0),
            "cuDNN takes no bias and no dropout with a diagonal at the bottom right corner",
        ),
        (
            desc.max_logit and desc.softmax != "vanilla",
            "cuDNN gives no largest logit beside a sink",
        ),
        (bias_grad and desc.bias is None, "the gradient of a bias without a bias"),
    )
    reason = next((text for wrong, text in problems if wrong), None)
    if reason is not None:
        return reason
    if is_plain(desc):
        is_built = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]  # torch's
        return None if is_built else "this torch is built without cuDNN"
    reason = cudnn_frontend.missing()
    return None if reason is None else f"torch's operators lack what is asked for, and {reason}"
