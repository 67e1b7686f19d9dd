"""Optimizers whose step is one operation of a backend for all parameters.

The names and arguments are those of ``transformer_engine.pytorch.optimizers``. Any optimizer of
torch works as well, with :class:`fp8core.MasterWeights` for parameters of lower precision.

The functions of lists of tensors have the arguments of Transformer Engine's and Apex's. The first
argument of each, the size of a chunk, has no effect. ``noop_flag``, int32 ``[1]``, stops a step if
it is not 0: nothing is written. Functions that scale or take norms set it to 1 where a result is
not finite. ``tensor_lists`` holds lists of as many tensors. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import AdamDesc
from fp8core.errors import OperandError
from fp8core.tensors.sharded_weight import local_part, plain_for_writing
from fp8core.torch_ops.private import copy_all, foreach_mul, foreach_norm
from fp8core.training.optimizers.fused import FusedSGD, check_decay, check_dtypes, descend
from fp8core.training.optimizers.fused_adam import FusedAdam, adam_steps

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

Lists: TypeAlias = "Sequence[Sequence[torch.Tensor]]"
Number: TypeAlias = "float | torch.Tensor"


class MultiTensorApply:
    """Calls a function of lists of tensors, without the tensors that are empty.

    Args:
        chunk_size: handed to the function.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Lists,
        *args: Any,
    ) -> Any:
        """Return ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``; of a DTensor, op gets
        this rank's part. None if all tensors are empty.

        Raises:
            OperandError: the lists have different lengths.
        """
        if len({len(tensors) for tensors in tensor_lists}) > 1:
            raise OperandError(
                f"multi_tensor_applier: lists of {[len(tensors) for tensors in tensor_lists]} "
                f"tensors; expected as many in each."
            )
        local = [
            [plain_for_writing(local_part(tensor)) for tensor in tensors]
            for tensors in tensor_lists
        ]
        filled = [at for at, tensor in enumerate(local[0]) if tensor.numel()] if local else []
        if not filled:
            return None
        chosen = [[tensors[at] for at in filled] for tensors in local]
        return op(self.chunk_size, noop_flag_buffer, chosen, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Set the tensors of the second list to those of the first one times ``scale``, in float32."""
    _scale(noop_flag, tensor_lists, scale)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """As :func:`multi_tensor_scale`, by a tensor of one element."""
    _scale(noop_flag, tensor_lists, scale)


@torch.no_grad()
def _scale(noop_flag: torch.Tensor, tensor_lists: Lists, scale: Number) -> None:
    inputs, outputs = _lists(tensor_lists, 2)
    if not inputs:
        return
    copy_all(list(outputs), _scaled(inputs, scale))
    filled = [tensor for tensor in outputs if tensor.numel()]  # the largest of none has no value
    if filled:
        largest = [tensor.float() for tensor in foreach_norm(filled, torch.inf)]
        _report(torch.stack(largest).max(), noop_flag)


def _scaled(tensors: Sequence[torch.Tensor], by: Number) -> list[torch.Tensor]:
    """Return ``tensors`` times ``by``, in float32."""
    if not tensors:
        return []
    if isinstance(by, torch.Tensor):
        by = by.float().reshape(())
        by = by.item() if by.device.type == "cpu" else by  # foreach takes one of its device alone
    return list(foreach_mul([tensor.float() for tensor in tensors], by))


def _report(result: torch.Tensor, noop_flag: torch.Tensor) -> None:
    """Set ``noop_flag`` to 1 where the one element of ``result`` is not finite."""
    noop_flag.copy_(torch.where(result.isfinite(), noop_flag, 1))


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all elements of the first list, float32 ``[1]``, and with ``per_tensor``
    that of each tensor ``[n]``, else an empty tensor."""
    (tensors,) = _lists(tensor_lists, 1)
    if not tensors:
        empty = torch.zeros(1, dtype=torch.float32, device=noop_flag.device)
        return empty, empty[:0]
    norms = torch.stack(foreach_norm(list(tensors), 2.0, dtype=torch.float32))
    total = torch.linalg.vector_norm(norms).reshape(1)
    _report(total, noop_flag)
    return total, norms if per_tensor else norms[:0]


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`multi_tensor_l2norm`, of the elements times ``inv_scale``, a tensor of one
    element."""
    (tensors,) = _lists(tensor_lists, 1)
    return multi_tensor_l2norm(chunk_size, noop_flag, [_scaled(tensors, inv_scale)], per_tensor)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Number,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam; lists: gradients, parameters, averages of the gradients and of their
    squares, and, if there are any, float32 masters. ``mode`` 1 is AdamW, 0 adds the weight decay to
    the gradients."""
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    _adam(noop_flag, tensor_lists, numbers, 1.0)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """As :func:`multi_tensor_adam` without masters, the numbers on the device: ``lr``, ``step``,
    int32, and ``inv_scale``, by which gradients are multiplied first."""
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    _adam(noop_flag, tensor_lists, numbers, inv_scale)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable
"""As :func:`multi_tensor_adam_capturable`, with a fifth list, float32 masters."""


@torch.no_grad()
def _adam(
    noop_flag: torch.Tensor, tensor_lists: Lists, numbers: tuple[Any, ...], inv_scale: Number
) -> None:
    lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay = numbers
    has_masters = len(tensor_lists) == 5
    rows = [*zip(*_lists(tensor_lists, 5 if has_masters else 4), strict=True)]
    kind = "float32" if has_masters else "none"
    descs = [
        AdamDesc(param.dtype, grad.dtype, average.dtype, kind, bool(mode))
        for grad, param, average, *_ in rows
    ]
    keywords = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": epsilon,
        "weight_decay": weight_decay,
        "step": step,
        "bias_correction": bool(bias_correction),
        "inv_scale": inv_scale,
        "found_inf": noop_flag,
    }
    adam_steps(zip(descs, rows, strict=True), lambda _: keywords)


_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@torch.no_grad()
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Number,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: torch.dtype | str,
) -> None:
    """A step of Adam of parameters in FP8 with delayed scales.

    Lists: gradients, codes (uint8), both averages, masters (float32, may be left out), scales,
    amaxes and inverse scales, float32 ``[1]`` each. The codes become those of the new values times
    ``scale``; ``amax`` takes the largest magnitude, ``scale_inv`` becomes ``1 / scale``.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2``, or their names here, ``"e4m3"``
            and ``"e5m2"``.
    """
    dtype: Any = _FP8.get(fp8_dtype, fp8_dtype) if isinstance(fp8_dtype, str) else fp8_dtype
    if dtype not in _FP8.values():
        raise OperandError(
            f"multi_tensor_adam_fp8(fp8_dtype={fp8_dtype!r}): expected one of {', '.join(_FP8)}, "
            f"or torch's dtype of that format."
        )
    has_masters = len(tensor_lists) == 8
    shaped = 5 if has_masters else 4  # the others hold one number a tensor
    grads, codes, averages, squares, *rest = _lists(tensor_lists, shaped + 3, shaped)
    *masters, scales, amaxes, inverses = rest
    # Scales have one element and a dimension, which a parameter may lack.
    values = (
        list(masters[0])
        if has_masters
        else [
            packed.view(dtype).float() * inverse.reshape(())
            for packed, inverse in zip(codes, inverses, strict=True)
        ]
    )
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    _adam(noop_flag, [grads, values, averages, squares], numbers, 1.0)
    largest = torch.finfo(dtype).max
    for at, value in enumerate(values):
        scaled = (value * scales[at].reshape(())).clamp(-largest, largest).to(dtype)
        results = [(codes[at], scaled.view(torch.uint8)), (inverses[at], 1 / scales[at])]
        if value.numel():
            results.append((amaxes[at], torch.maximum(amaxes[at], value.abs().amax())))
        _write(noop_flag, results)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """A step of gradient descent; lists: gradients, parameters, momenta, and, if there are any,
    copies of the parameters in another dtype. With ``first_run`` the momenta are not read.

    Raises:
        UnsupportedError: ``wd_after_momentum``.
        OperandError: a gradient of another dtype than its parameter, which is not float32.
    """
    check_decay("multi_tensor_sgd", wd_after_momentum)
    has_copies = len(tensor_lists) == 4
    grads, params, momenta, *copies = _lists(tensor_lists, 4 if has_copies else 3)
    for param, grad in zip(params, grads, strict=True):
        check_dtypes("multi_tensor_sgd", param, grad)
    stepped = [param.clone() for param in params]
    new_momenta = descend(
        stepped,
        _scaled(grads, scale),
        [None if first_run else momentum.clone() for momentum in momenta],
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=wd,
        nesterov=bool(nesterov),
    )
    pairs = [*zip(params, stepped, strict=True), *zip(momenta, new_momenta, strict=True)]
    for copy_list in copies:
        pairs.extend(zip(copy_list, stepped, strict=True))
    _write(noop_flag, [(to, value) for to, value in pairs if value is not None])


def _write(noop_flag: torch.Tensor, results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Set each first tensor to the second one, unless ``noop_flag`` stops the step."""
    goes_on = (noop_flag == 0).reshape(())
    for to, result in results:
        to.copy_(torch.where(goes_on, result.to(to.dtype), to))


def _lists(tensor_lists: Lists, count: int, shaped: int | None = None) -> Lists:
    """Return ``tensor_lists``, or refuse another number of lists, or of tensors in one, and tensors
    of several shapes at one position of the first ``shaped`` lists, of all if None."""
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(lengths) != count or len(set(lengths)) > 1:
        raise OperandError(
            f"tensor_lists has {len(lengths)} lists of {lengths} tensors; expected {count} lists "
            f"of as many tensors."
        )
    for at, group in enumerate(zip(*tensor_lists[:shaped], strict=True)):
        if any(member.shape != group[0].shape for member in group):
            raise OperandError(
                f"tensor_lists: the tensors at position {at} are "
                f"{[list(member.shape) for member in group]}; expected one shape."
            )
    return tensor_lists
