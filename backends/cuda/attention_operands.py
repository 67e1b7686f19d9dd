"""Operands of attention as cuDNN takes them: checked, aligned, and as ``[b, heads, s, d]``."""

from __future__ import annotations

from typing import TypeAlias

import torch

from fp8core.backend_api import AttentionDesc, OperandError

_ALIGNMENT = 16  # bytes, of addresses and strides

Kind: TypeAlias = "list[object]"
"""What checks of tensors look at, from :func:`kind_of`."""


def kind_of(*tensors: torch.Tensor) -> Kind | None:
    """Return what :func:`check_operands`, :func:`check_rows` and :func:`in_order` look at: for
    tensors of an equal kind they say and return the same. None where an address is not aligned."""
    kind: Kind = []
    for x in tensors:
        if x.data_ptr() % _ALIGNMENT:
            return None
        kind += (x.shape, x.stride(), x.dtype, x.device)
    return kind


def by_heads(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view ``[b, heads, s, d]`` of a tensor in a dense layout."""
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2)


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor ``[b, heads, s, d]`` in a dense layout, contiguous."""
    return (x.permute(2, 0, 1, 3) if layout == "sbhd" else x.transpose(1, 2)).contiguous()


def out_size(desc: AttentionDesc, q: torch.Tensor) -> tuple[int, ...]:
    """Return the size of the result."""
    return (*q.shape[:-1], desc.head_dim_v)


def check_operands(
    desc: AttentionDesc, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: torch.device
) -> None:
    """Refuse shapes, dtypes and devices that the descriptor does not describe.

    Raises:
        OperandError: names all three tensors.
    """
    rank = 3 if desc.layout == "thd" else 4
    dtype = torch.uint8 if desc.low_precision else desc.dtype
    batch = slice(1, 2) if desc.layout == "sbhd" else slice(0, 1)
    is_right = (
        q.dim() == k.dim() == v.dim() == rank
        and q.shape[-2:] == (desc.heads, desc.head_dim)
        and k.shape[-2:] == (desc.groups, desc.head_dim)
        and v.shape[-2:] == (desc.groups, desc.head_dim_v)
        and k.shape[:-2] == v.shape[:-2]
        and (desc.layout == "thd" or q.shape[batch] == k.shape[batch])
        and q.dtype == k.dtype == v.dtype == dtype
        and q.device == k.device == v.device == device
    )
    if not is_right:
        shown = ", ".join(
            f"{name} {list(x.shape)} {x.dtype} on {x.device}"
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
        raise OperandError(
            f"{desc}: {shown}; expected q [.., {desc.heads}, {desc.head_dim}], "
            f"k [.., {desc.groups}, {desc.head_dim}] and v [.., {desc.groups}, {desc.head_dim_v}] "
            f"of {dtype} on {device}."
        )


def check_rows(
    desc: AttentionDesc,
    q: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """Refuse gradients, results and statistics of another forward call.

    Raises:
        OperandError: names the three tensors.
    """
    size = out_size(desc, q)
    if desc.layout == "thd":
        statistics: tuple[int, ...] = tuple(q.shape[:-1])
    else:
        statistics = tuple(by_heads(q, desc.layout).shape[:-1])
    is_right = (
        tuple(grad_out.shape) == tuple(out.shape) == size
        and grad_out.dtype == out.dtype == desc.dtype
        and tuple(stats.shape) == statistics
        and stats.dtype == torch.float32
        and grad_out.device == out.device == stats.device == q.device
    )
    if not is_right:
        rows = zip(("grad_out", "out", "stats"), (grad_out, out, stats), strict=True)
        shown = ", ".join(f"{name} {list(x.shape)} {x.dtype} on {x.device}" for name, x in rows)
        raise OperandError(
            f"{desc}: {shown}; expected grad_out and out {list(size)} of {desc.dtype} and stats "
            f"{list(statistics)} of torch.float32 on {q.device}."
        )


def check_number(
    desc: AttentionDesc, name: str, x: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return ``x``, float32 of one element, which cuDNN reads by address.

    Raises:
        OperandError: it is missing, or another tensor.
    """
    if x is not None and (x.dtype, x.numel(), x.device) == (torch.float32, 1, device):
        return x
    shown = None if x is None else f"{x.dtype} {list(x.shape)} on {x.device}"
    raise OperandError(
        f"{desc}: {name} is {shown}; expected torch.float32 of one element on {device}."
    )


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a contiguous copy if cuDNN cannot read its rows: elements of a head that are
    not neighbours, elements that several indices share, or addresses that are not aligned."""
    if _is_regular(x):
        return x
    step = _ALIGNMENT // x.element_size()
    *outer, last = x.stride()
    sizes = x.shape
    is_readable = last == 1 and x.data_ptr() % _ALIGNMENT == 0
    for size, stride in zip(sizes, outer, strict=False):
        is_readable = is_readable and (size == 1 or (stride > 0 and stride % step == 0))
    return x if is_readable else x.clone(memory_format=torch.contiguous_format)


def _is_regular(x: torch.Tensor) -> bool:
    """Whether ``x`` is contiguous from an aligned address: sizes of heads are aligned by
    declaration."""
    return x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Return :func:`aligned` ``x``, or a contiguous copy if its dimensions are not in the order of
    their strides."""
    if _is_regular(x):
        return x
    x = aligned(x)
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]
    return x if strides == sorted(strides, reverse=True) else x.contiguous()
