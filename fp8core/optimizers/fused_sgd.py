"""Gradient descent with momentum for all parameters at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fp8core.backend_api import SgdDesc
from fp8core.chain.alone import bound
from fp8core.errors import OperandError
from fp8core.optimizers.fused_adam import _check_gradient, _local, settings_of
from fp8core.tensors.sharded_weight import ShardedWeight, plain_for_writing

__all__ = ["FusedSGD"]

_REQUIRED: Any = object()
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_STEPPED = (torch.Tensor, torch.nn.Parameter, ShardedWeight)


class FusedSGD(torch.optim.Optimizer):
    """Gradient descent, as ``torch.optim.SGD``; computed in float32.

    Args:
        params: parameters, or groups of them, in float32, bfloat16 or float16.
        lr, momentum, dampening, weight_decay, nesterov: as of ``torch.optim.SGD``.
        wd_after_momentum: add the weight decay behind the momentum.
        materialize_master_grads: has no effect, as parameters are stepped by their own gradients.
        set_grad_none: deprecated; give ``zero_grad`` its argument.

    Raises:
        OperandError: no ``lr``, negative numbers, or Nesterov's momentum without a momentum or with
            a dampening.
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
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in numbers.items():
            if value < 0:
                raise OperandError(f"FusedSGD({name}={value}): expected 0 or above.")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise OperandError(
                f"FusedSGD(nesterov=True, momentum={momentum}, dampening={dampening}): expected a "
                f"momentum, and a dampening of 0."
            )
        if set_grad_none is not None:
            text = "set_grad_none is deprecated; use zero_grad(set_to_none=...)."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                if _local(param).dtype not in _FLOATS or type(_local(param)) not in _STEPPED:
                    raise OperandError(
                        f"FusedSGD: a parameter of {param.dtype} "
                        f"({type(param).__name__}); expected float32, bfloat16 or float16. Step "
                        f"quantized ones with fp8core.MasterWeights."
                    )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, or with ``set_to_none=False`` set them to zero.

        Raises:
            OperandError: ``set_to_none`` contradicts ``set_grad_none``.
        """
        if self.set_grad_none is not None:
            if set_to_none not in (None, self.set_grad_none):
                raise OperandError(
                    f"zero_grad(set_to_none={set_to_none}) of a FusedSGD with "
                    f"set_grad_none={self.set_grad_none}; give one of them."
                )
            set_to_none = self.set_grad_none
        super().zero_grad(set_to_none=set_to_none is None or set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {**settings_of(self), **super().__getstate__()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; return what ``closure`` returned.

        Raises:
            OperandError: a gradient is sparse, or of another shape or device than its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:  # checked before anything is stepped
                        _check_gradient(param, param.grad)
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        batches: dict[tuple[SgdDesc, bool, torch.device], list[list[torch.Tensor]]] = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            is_first = "momentum_buffer" not in self.state[param]
            if is_first:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param.detach())
            desc = SgdDesc(param.dtype, grad.dtype, decay_after_momentum=self.wd_after_momentum)
            lists = batches.setdefault((desc, is_first, param.device), [[], [], [], []])
            momentum = self.state[param]["momentum_buffer"]
            stepped = plain_for_writing(_local(param.detach()))
            for tensors, one in zip(lists, (_local(grad), stepped, _local(momentum)), strict=False):
                tensors.append(one)
        for (desc, is_first, where), lists in batches.items():
            values = tuple(getattr(desc, name) for name in SgdDesc.__slots__)
            bound(SgdDesc, values, where)(
                *lists,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                dampening=group["dampening"],
                nesterov=bool(group["nesterov"]),
                is_first=is_first,
            )
