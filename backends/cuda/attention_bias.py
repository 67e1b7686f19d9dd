"""Addends of attention's logits: a bias, and a mask as a bias that no logit outweighs."""

from __future__ import annotations

import torch

from fp8core.backend_api import AttentionDesc, OperandError

_EXCLUDES = -1e30
"""Finite, so that a row of it alone has a softmax: -inf less -inf would be NaN."""


def added(
    desc: AttentionDesc,
    full: tuple[int, int, int, int],
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Return what is added to the scaled logits, of four dimensions that broadcast to ``full [b,
    heads, s_q, s_kv]``, contiguous; None if nothing is.

    A bias before the scale is computed in float32; a float16 one beside a mask, too.

    Raises:
        OperandError: bias or mask are missing, or do not broadcast.
    """
    total = None
    if desc.bias is not None:
        total = _of_four(desc, "bias", bias, full, device)
        if total.dtype not in (torch.float32, desc.dtype):
            total = total.float()
        if desc.bias == "pre_scale":
            total = total.float() * desc.scale
    if desc.arbitrary:
        excluded = _of_four(desc, "mask", mask, full, device)
        has_range = desc.dtype == torch.bfloat16  # float16 has no number as large
        dtype = torch.bfloat16 if has_range else torch.float32
        if total is None:
            total = excluded.new_zeros((), dtype=dtype)
        if total.dtype == torch.float16:
            total = total.float()
        total = total.masked_fill(excluded, _EXCLUDES)
    if total is None:
        return None
    if total.shape[3] != full[3]:  # cuDNN broadcasts the other dimensions
        total = total.expand(*total.shape[:3], full[3])
    is_readable = total.is_contiguous() and total.data_ptr() % 16 == 0
    return total if is_readable else total.clone(memory_format=torch.contiguous_format)


def _of_four(
    desc: AttentionDesc,
    name: str,
    x: torch.Tensor | None,
    full: tuple[int, int, int, int],
    device: torch.device,
) -> torch.Tensor:
    """Return ``x`` with ones in front of its dimensions."""
    if x is None:
        raise OperandError(f"{desc}: {name} is missing; expected {list(full)}, or 1s in it.")
    sizes = (1,) * (4 - x.dim()) + tuple(x.shape)
    is_right = len(sizes) == 4 and all(
        extent in (1, size) for extent, size in zip(sizes, full, strict=False)
    )
    is_right = is_right and (x.dtype == torch.bool) == (name == "mask") and x.device == device
    if not is_right:
        raise OperandError(
            f"{desc}: {name} {x.dtype} {list(x.shape)} on {x.device}; expected a "
            f"{'bool' if name == 'mask' else 'float'} tensor that broadcasts to {list(full)} on "
            f"{device}."
        )
    return x.view(sizes)


def blind_rows(mask: torch.Tensor, batch: int) -> torch.Tensor:
    """Return which queries the mask shows no key, as a mask that broadcasts to statistics."""
    rows = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)).all(-1)
    return rows.expand(batch, -1, -1)


def grad_of_bias(
    desc: AttentionDesc, grad_logits: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of ``bias`` from that of the scaled logits ``[b, heads, s_q, s_kv]``."""
    sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    dims = [at for at, size in enumerate(sizes) if size == 1 and grad_logits.shape[at] != 1]
    total = grad_logits.float()
    if dims:
        total = grad_logits.sum(dims, keepdim=True, dtype=torch.float32)
    if desc.bias == "pre_scale":
        total = total * desc.scale
    return total.to(bias.dtype).view(bias.shape)
