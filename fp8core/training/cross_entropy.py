"""Cross entropy of logits that needs no matrix of probabilities.

The name and arguments are those of ``transformer_engine.pytorch``.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from fp8core.backend_api import CrossEntropyBackwardDesc, CrossEntropyDesc
from fp8core.chain.alone import bound, derivatives, in_torch, is_transformed, needs_node, plain
from fp8core.errors import OperandError, elsewhere
from fp8core.modules.calls.parameters import refuse_arguments
from fp8core.torch_ops.capture import is_captured

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: torch.distributed.ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross entropy of each position, or its mean; float32, float64 from float64.

    Computed in that precision: ``(1 - s) * (log_sum - inp[target]) + s * (log_sum - inp.mean())``
    with ``s = label_smoothing`` and the logarithm of the summed exponentials, from the differences
    of logits to the largest one. ``inp`` is kept for backward as it is, neither copied nor written.
    With a ``label_smoothing``, differences whose sum overflows give no finite loss, as in torch.

    Args:
        inp: logits ``[..., classes]``.
        target: int64, a class for each position: of the shape of ``inp`` without its last
            dimension, or of as many elements.
        label_smoothing: from 0 to 1.
        reduce_loss: return the mean over the positions that are not ignored, of no dimension; NaN
            where all are.
        dist_process_group: the ranks that hold the other classes; more than one is not offered.
        ignore_idx: the target of positions whose loss and gradient are 0.
        is_cg_capturable: has no effect; CUDA graphs may always record the call.
        overwrite_input: has no effect, as no copy of ``inp`` is held that it would save.

    On an accelerator the host does not read targets: the loss of one that is no class is inf.

    Raises:
        OperandError: shapes, dtypes or devices that do not fit, or, on the CPU, a target that is no
            class.
        UnsupportedError: a process group of several ranks.
    """
    owner = "parallel_cross_entropy"
    if dist_process_group is not None:
        refuse_arguments(parallel_cross_entropy, locals(), ("dist_process_group",))
    if _input is not None:
        warnings.warn("_input is now called inp.", FutureWarning, stacklevel=2)
        inp = _input
    classes = _check_inputs(owner, inp, target, label_smoothing)
    labels = target.reshape(-1)
    if labels.device.type == "cpu" and not (is_captured(labels) or is_transformed()):
        _check_classes(owner, labels, classes, ignore_idx)
    rows = plain(inp, f"inp of {owner}").reshape(-1, classes)
    values = (inp.dtype, float(label_smoothing), int(ignore_idx))
    loss = _losses(values, rows, labels)
    if reduce_loss:
        return loss.sum() / (labels != ignore_idx).sum()
    return loss.reshape(inp.shape[:-1])


def _check_inputs(
    owner: str, inp: torch.Tensor, target: torch.Tensor, label_smoothing: float
) -> int:
    """Return the number of classes of logits and targets that fit."""
    if not isinstance(inp, torch.Tensor) or inp.dtype not in _FLOATS or inp.dim() < 2:
        is_tensor = isinstance(inp, torch.Tensor)
        shown = f"{inp.dtype} {list(inp.shape)}" if is_tensor else type(inp).__name__
        raise OperandError(f"{owner}: inp is {shown}; expected floating-point [..., classes].")
    classes = inp.shape[-1]
    if not isinstance(target, torch.Tensor) or target.dtype != torch.int64:
        shown = str(target.dtype) if isinstance(target, torch.Tensor) else type(target).__name__
        raise OperandError(f"{owner}: target is {shown}; expected a tensor of int64.")
    if classes == 0 or target.numel() * classes != inp.numel():
        raise OperandError(
            f"{owner}: target has {target.numel()} elements, inp is {list(inp.shape)}; expected a "
            f"class for each position, and at least one class."
        )
    if target.device != inp.device:
        raise elsewhere(f"{owner}: target", target.device, "inp", inp.device)
    if not 0.0 <= label_smoothing <= 1.0:
        raise OperandError(f"{owner}(label_smoothing={label_smoothing}): expected 0 to 1.")
    return classes


def _check_classes(owner: str, labels: torch.Tensor, classes: int, ignored: int) -> None:
    is_wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
    if bool(is_wrong.any()):
        raise OperandError(
            f"{owner}: target has {int(labels[is_wrong][0])}; expected classes from 0 to "
            f"{classes - 1}, or ignore_idx={ignored}."
        )


def _losses(
    values: tuple[torch.dtype, float, int], x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Return the losses ``[t]`` of a CrossEntropyDesc of ``values``."""
    if is_transformed():
        loss: torch.Tensor = in_torch(CrossEntropyDesc, values, x.device)(x, target)[0]
    elif needs_node(x):
        loss = _Losses.apply(values, x, target)  # type: ignore[no-untyped-call]  # torch's
    else:
        loss = bound(CrossEntropyDesc, values, x)(x, target)[0]
    return loss


class _Losses(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(
        ctx: Any, values: tuple[torch.dtype, float, int], x: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        loss, *sums = bound(CrossEntropyDesc, values, x)(x, target)
        ctx.save_for_backward(x, target, *sums)
        ctx.values = values
        return loss  # type: ignore[no-any-return]  # bound callables are untyped

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        x, target, *sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            run = in_torch(CrossEntropyDesc, ctx.values, x.device)
            (grad_x,) = derivatives(lambda x: run(x, target)[:1], (x,), (grad,))
        else:
            run = bound(CrossEntropyBackwardDesc, ctx.values, x)
            grad_x = run(grad, x, target, *sums)
        return None, grad_x, None
