"""Gradient descent with momentum: torch's step, with Transformer Engine's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version
from torch.optim.sgd import sgd

from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.sharded_weight import (
    ShardedWeight,
    as_part_of,
    local_part,
    plain_for_writing,
)
from fp8core.training.optimizers.fused import FLOATS, FusedOptimizer, check_positive

_REQUIRED: Any = object()
_MOMENTUM: Final = "momentum_buffer"
_OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
_STEPPED = (torch.Tensor, torch.nn.Parameter, ShardedWeight)


class FusedSGD(FusedOptimizer):
    """Gradient descent by the step of ``torch.optim.SGD``, its fused kernels on CUDA.

    Args:
        params: parameters, or groups of them, in float32, bfloat16 or float16. Those in float32
            take gradients in 16 bits too, others those of their own dtype.
        lr, momentum, dampening, weight_decay, nesterov: as of ``torch.optim.SGD``.
        wd_after_momentum: not offered, as torch adds the weight decay in front of the momentum.
        materialize_master_grads: has no effect, as parameters are stepped by their own gradients.
        set_grad_none: deprecated; give ``zero_grad`` its argument.

    Raises:
        OperandError: no ``lr``, negative numbers, or Nesterov's momentum without a momentum or with
            a dampening.
        UnsupportedError: ``wd_after_momentum``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = _REQUIRED,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        if lr is _REQUIRED:
            raise OperandError("FusedSGD: lr is missing; it has no default.")
        check_decay("FusedSGD", wd_after_momentum)
        self._note_set_grad_none(set_grad_none)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        numbers = (lr, momentum, dampening, weight_decay, nesterov)
        super().__init__(params, dict(zip(_OPTIONS, numbers, strict=True)))

    def _check_options(self, group: dict[str, Any]) -> None:
        check_positive("FusedSGD", group, "lr", "momentum", "weight_decay")
        momentum, dampening = group["momentum"], group["dampening"]
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise OperandError(
                f"FusedSGD(nesterov=True, momentum={momentum}, dampening={dampening}): expected a "
                f"momentum, and a dampening of 0."
            )

    def _check_parameter(self, param: torch.Tensor) -> None:
        if local_part(param).dtype not in FLOATS or type(local_part(param)) not in _STEPPED:
            raise OperandError(
                f"FusedSGD: a parameter of {param.dtype} ({type(param).__name__}); expected "
                f"float32, bfloat16 or float16. Step quantized ones with fp8core.MasterWeights."
            )

    def _check_gradient(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        super()._check_gradient(param, grad)
        check_dtypes("FusedSGD", param, grad)

    def _names_of_state(self, param: torch.Tensor) -> set[str]:
        return {_MOMENTUM}

    def _store(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self.state[param][name] = torch.zeros_like(param.detach())
        local_part(self.state[param][name]).copy_(value)

    def _step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of ``group`` that have a gradient: those without a momentum, whose
        first step it is, then the others."""
        due = [param for param in group["params"] if param.grad is not None]
        later = [param for param in due if _MOMENTUM in self.state[param]]
        first = [param for param in due if _MOMENTUM not in self.state[param]]
        options = {name: group[name] for name in _OPTIONS}
        for params, momenta in (
            (first, [None] * len(first)),
            (later, [local_part(self.state[param][_MOMENTUM]) for param in later]),
        ):
            targets = [plain_for_writing(local_part(param.detach())) for param in params]
            grads = [local_part(param.grad) for param in params]
            for param, momentum in zip(
                params, descend(targets, grads, momenta, **options), strict=True
            ):
                if momentum is not None and params is first:
                    self.state[param][_MOMENTUM] = as_part_of(momentum, param)


def check_decay(owner: str, after_momentum: bool) -> None:
    """Raise UnsupportedError if the weight decay is to be added behind the momentum."""
    if after_momentum:
        raise UnsupportedError(
            f"{owner}(wd_after_momentum=True) is not offered: torch's step adds the weight decay "
            f"in front of the momentum. Set it to False; or set the weight decay to 0, and "
            f"multiply the parameters by 1 - lr * weight_decay before each step."
        )


def check_dtypes(owner: str, param: torch.Tensor, grad: torch.Tensor) -> None:
    """Raise OperandError if ``grad`` would be rounded to the dtype of ``param``."""
    if grad.dtype != param.dtype and param.dtype != torch.float32:
        raise OperandError(
            f"{owner}: a parameter of {param.dtype} with a gradient of {grad.dtype}; expected a "
            f"gradient of its dtype. Step float32 masters with fp8core.MasterWeights, or round the "
            f"gradient."
        )


def descend(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor | None],
    **options: Any,
) -> list[torch.Tensor | None]:
    """Step plain tensors in place by ``torch.optim.SGD``'s step, and return their momenta.

    Args:
        params: of any dtypes, devices and strides.
        grads: of their shapes.
        momenta: of their shapes and dtypes, updated in place; or all None in the first step, which
            returns new ones, or None without a momentum.
        options: lr, momentum, dampening, weight_decay and nesterov.
    """
    # The fused kernels take tensors of the same strides alone.
    stored = [param.contiguous() for param in params]
    of_dtype = [
        grad.to(param.dtype).contiguous() for grad, param in zip(grads, params, strict=True)
    ]
    updated = [None if momentum is None else momentum.contiguous() for momentum in momenta]
    # torch chooses the step of other devices. Its fused one of CPUs steps parameters of 16 bits
    # wrongly (torch 2.11 to 2.13), and takes the elements of strided ones for contiguous.
    is_fused = all(param.is_cuda for param in params)
    sgd(stored, of_dtype, updated, fused=is_fused or None, maximize=False, **options)
    for tensors, values in ((params, stored), (momenta, updated)):
        for tensor, value in zip(tensors, values, strict=True):
            if tensor is value and value is not None:
                increment_version(value)  # torch counts no writes of its fused kernels
            elif tensor is not None and value is not None:
                tensor.copy_(value)
    return [
        value if momentum is None else momentum
        for momentum, value in zip(momenta, updated, strict=True)
    ]
