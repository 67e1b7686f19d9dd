"""Steps of optimizers: one launch for up to 48 parameters, each element read and written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import MASTER_KINDS, AdamDesc, OperandError
from fp8core_backends.cuda.layout import DTYPES
from fp8core_backends.cuda.operations import first_problem, runs
from fp8core_backends.cuda.private import count_writes
from fp8core_backends.cuda.stream import index_of, raw_stream

Tensors = Sequence[torch.Tensor]
Number = float | torch.Tensor


def _problem(desc: AdamDesc) -> str | None:
    """Say why there is no kernel for ``desc``, or None."""
    is_short = desc.master == "remainder"
    averages = (torch.float32, torch.bfloat16)
    return first_problem(
        (desc.dtype not in DTYPES, f"no step of parameters of {desc.dtype}"),
        (desc.grad_dtype not in DTYPES, f"no step by gradients of {desc.grad_dtype}"),
        (desc.master not in MASTER_KINDS, f"no masters {desc.master!r}"),
        (is_short and desc.dtype != torch.bfloat16, f"no remainders of {desc.dtype}"),
        (desc.state_dtype not in averages, f"no averages in {desc.state_dtype}"),
    )


@runs(AdamDesc, refuses=_problem)
class AdamStep:
    """The callable of an AdamDesc."""

    __slots__ = ("_device", "_dtypes", "_index", "_native_step", "kernel")

    def __init__(self, desc: AdamDesc, device: torch.device, native: Any) -> None:
        self.kernel = "fp8core::step_adam"
        self._index = index_of(device)
        self._device = torch.device("cuda", self._index)
        masters = {"float32": torch.float32, "remainder": torch.int16}.get(desc.master)
        states = (desc.state_dtype, desc.state_dtype)
        self._dtypes = (desc.grad_dtype, desc.dtype, *states, masters)
        types = [
            native.InputType.__members__[DTYPES[dtype]]
            for dtype in (desc.dtype, desc.grad_dtype, desc.state_dtype)
        ]
        master = native.MasterKind.__members__[desc.master]
        self._native_step = native.Adam(*types, master, desc.decoupled, self._index)

    def __call__(
        self,
        grads: Tensors,
        params: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        masters: Tensors,
        *,
        lr: Number,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: Number,
        bias_correction: bool = True,
        inv_scale: Number = 1.0,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Update all tensors but the gradients in place; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, size or device than the kernel reads.
        """
        lists = (grads, params, exp_avgs, exp_avg_sqs, masters)
        if not params:
            return
        rate, (rate_address, rate_tensor) = _number(self._device, lr, torch.float32)
        scale, (scale_address, scale_tensor) = _number(self._device, inv_scale, torch.float32)
        count, (count_address, count_tensor) = _number(self._device, step, torch.int32)
        stop, stop_tensor = _address_of_stop(self._device, found_inf)
        numbers = (
            *(rate, scale, rate_address, scale_address, stop),
            *map(float, (beta1, beta2, eps, weight_decay)),
            bool(bias_correction),
            *(count, count_address),
        )
        _run(self._native_step, self._index, lists, self._dtypes, numbers)
        # Copies of numbers, until the kernels are enqueued.
        del rate_tensor, scale_tensor, count_tensor, stop_tensor


def _number(
    device: torch.device, value: Number, dtype: torch.dtype
) -> tuple[float, tuple[int, torch.Tensor | None]]:
    """Return the number, and the address of the one on the device, 0 for none, with its tensor."""
    if not isinstance(value, torch.Tensor):
        return float(value), (0, None)
    is_on_host = value.device.type == "cpu"
    if value.numel() != 1 or not (is_on_host or value.device == device):
        raise OperandError(
            f"a number of the step is a tensor {list(value.shape)} on {value.device}; expected one "
            f"element on {device}."
        )
    if is_on_host:
        return float(value), (0, None)
    value = value.to(dtype)
    return 0.0, (value.data_ptr(), value)


def _address_of_stop(
    device: torch.device, found_inf: torch.Tensor | None
) -> tuple[int, torch.Tensor | None]:
    """Return the address of what stops the step, 0 for none, with its tensor."""
    if found_inf is None:
        return 0, None
    stop = found_inf if found_inf.dtype in (torch.float32, torch.int32) else found_inf.float()
    if stop.numel() != 1 or stop.device != device:
        raise OperandError(
            f"found_inf is {list(found_inf.shape)} on {found_inf.device}; expected one element "
            f"on {device}."
        )
    return stop.data_ptr(), stop


def _run(
    native_step: Callable[..., None],
    index: int,
    lists: Sequence[Tensors],
    dtypes: Sequence[torch.dtype | None],
    numbers: tuple[Any, ...],
) -> None:
    """Step tensors that are contiguous where they are, others by way of copies."""
    count = len(lists[1])
    for tensors, dtype in zip(lists, dtypes, strict=True):
        due = 0 if dtype is None else count
        if len(tensors) != due or any(tensor.dtype != dtype for tensor in tensors):
            raise OperandError(
                f"a step of {count} parameters: {len(tensors)} tensors of "
                f"{sorted({str(tensor.dtype) for tensor in tensors})}; expected {due} of {dtype}."
            )
    stored = [[tensor.contiguous() for tensor in tensors] for tensors in lists]
    _check_sizes(stored, index)
    rows = []
    for at in range(count):
        addresses = [group[at].data_ptr() if group else 0 for group in stored]
        rows.append((*addresses, stored[1][at].numel()))
    native_step(rows, numbers, raw_stream(index))
    written = [tensor for tensors in lists[1:] for tensor in tensors]
    for tensors, copies in zip(lists[1:], stored[1:], strict=True):
        for target, copy in zip(tensors, copies, strict=True):
            if target is not copy:
                target.copy_(copy)
    count_writes(written)  # torch does not see the kernel's writes


def _check_sizes(stored: Sequence[Tensors], index: int) -> None:
    for at, param in enumerate(stored[1]):
        for group in stored:
            if group and (group[at].shape != param.shape or group[at].get_device() != index):
                raise OperandError(
                    f"a step of parameter {at} {list(param.shape)}: a tensor of it is "
                    f"{list(group[at].shape)} on {group[at].device}; expected the same shape, on "
                    f"cuda:{index}."
                )
