"""Gradient descent with momentum for all parameters at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from fp8core.backend_api import SgdDesc
from fp8core.chain.alone import bound
from fp8core.errors import OperandError
from fp8core.tensors.sharded_weight import ShardedWeight, local_part, plain_for_writing
from fp8core.training.optimizers.fused import FLOATS, FusedOptimizer, check_positive

_REQUIRED: Any = object()
_MOMENTUM: Final = "momentum_buffer"
_STEPPED = (torch.Tensor, torch.nn.Parameter, ShardedWeight)


class FusedSGD(FusedOptimizer):
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
        self._note_set_grad_none(set_grad_none)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

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

    def _names_of_state(self, param: torch.Tensor) -> set[str]:
        return {_MOMENTUM}

    def _store(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self.state[param][name] = torch.zeros_like(param.detach())
        local_part(self.state[param][name]).copy_(value)

    def _step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of ``group`` that have a gradient, those of one kind at once."""
        batches: dict[tuple[SgdDesc, bool, torch.device], list[list[torch.Tensor]]] = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            is_first = _MOMENTUM not in self.state[param]
            if is_first:
                self.state[param][_MOMENTUM] = torch.zeros_like(param.detach())
            desc = SgdDesc(param.dtype, grad.dtype, decay_after_momentum=self.wd_after_momentum)
            lists = batches.setdefault((desc, is_first, param.device), [[], [], [], []])
            momentum = self.state[param][_MOMENTUM]
            stepped = plain_for_writing(local_part(param.detach()))
            for tensors, one in zip(
                lists, (local_part(grad), stepped, local_part(momentum)), strict=False
            ):
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
