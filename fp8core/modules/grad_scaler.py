"""``watch_grad_scaler``: torch's GradScaler skips a step whose casts met NaN or inf.

torch's GradScaler offers no public way to add to its search for inf. Its ``unscale_``, and its
``step`` for gradients that are not unscaled yet (also with optimizers that unscale by themselves,
such as fused ones), get their found-inf tensors from one private method, on the CPU and on CUDA.
This module adds the result of the casts to the tensors that it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.found_inf import Counts, device_of, differ, layers_of, read_counts
from fp8core.torch_ops.private import UNSCALE_GRADS

__all__ = ["GradScalerWatch", "watch_grad_scaler"]


def watch_grad_scaler(
    scaler: torch.amp.GradScaler,
    model: torch.nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
) -> GradScalerWatch:
    """Have ``scaler`` skip a step if casts of ``model`` met NaN or inf on the way to it.

    ::

        scaler = torch.amp.GradScaler("cuda")
        fp8core.watch_grad_scaler(scaler, model)

    Call it once, before training; the loop stays as it is. Wherever the scaler looks for inf in an
    optimizer's gradients, the counters of the casts are added to its result, on the device: no
    gradient changes, and the host does not wait. ``scaler.update()`` starts the next count, so
    gradients that accumulate over several backward passes are one step, and all optimizers of a
    step get the same answer. Calls that record no gradients do not count. A scaler that is not
    enabled skips nothing. A copy of the scaler, or an unpickled one, watches no model until this
    function is called for it. Where gradients are on the CPU and layers are not, the host waits.

    With torch.distributed all ranks of ``group`` (None: the default group) skip a step if one of
    them has to, as they would with the same gradients. Each rank has to call this function, and to
    step as often as the others.

    Raises:
        OperandError: ``scaler`` is no torch.amp.GradScaler, or ``model`` has no layer of fp8core.
        UnsupportedError: the GradScaler of this torch lacks the private method.
    """
    layers_of(model, "watch_grad_scaler")
    if not isinstance(scaler, torch.amp.GradScaler):
        raise OperandError(
            f"watch_grad_scaler: expected a torch.amp.GradScaler, found {type(scaler).__name__}. "
            f"Other scalers can ask fp8core.found_inf(model)."
        )
    if not callable(getattr(scaler, UNSCALE_GRADS, None)):
        raise UnsupportedError(
            f"watch_grad_scaler: the GradScaler of torch {torch.__version__} has no "
            f"{UNSCALE_GRADS}; torch 2.11 to 2.13 have. Ask fp8core.found_inf(model) before the "
            f"step instead."
        )
    return GradScalerWatch(scaler, model, group)


class GradScalerWatch:
    """A model watched for a scaler, from :func:`watch_grad_scaler` until :meth:`remove`."""

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        model: torch.nn.Module,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._model: torch.nn.Module | None = model
        self._group = group
        self._before: Counts = read_counts(layers_of(model, "watch_grad_scaler"))
        for name, after in ((UNSCALE_GRADS, self._merge), ("update", self._begin)):
            setattr(scaler, name, _Followed(scaler, name, after))

    def remove(self) -> None:
        """Stop watching: the scaler looks at gradients alone again."""
        self._model = None
        self._before = {}

    def _begin(self, result: None) -> None:
        if self._model is not None:
            self._before = read_counts(layers_of(self._model, "watch_grad_scaler"))

    def _merge(self, found_inf: dict[torch.device, torch.Tensor]) -> None:
        """Raise one of the scaler's found-inf tensors to 1.0 if casts have met NaN or inf.

        One is enough, as the scaler adds them up. A rank without gradients has none, and the scaler
        refuses its step, but it takes part in the reduction, for which the other ranks wait.
        """
        if self._model is None:
            return
        now = read_counts(layers_of(self._model, "watch_grad_scaler"))
        device = next(iter(found_inf), None) or device_of(self._model, now)
        with torch.no_grad():
            met = differ(now, self._before, device, in_training=True)
            has_ranks = dist.is_available() and dist.is_initialized()
            if has_ranks and dist.get_world_size(self._group) > 1:
                dist.all_reduce(met, op=dist.ReduceOp.MAX, group=self._group)
            if found_inf:
                total = found_inf[device]
                torch.maximum(total, met.reshape(total.shape), out=total)


class _Followed:
    """The method ``name`` of ``scaler``, with ``after`` called on its result.

    A copy or a pickle of the scaler gets its plain method instead.
    """

    def __init__(
        self, scaler: torch.amp.GradScaler, name: str, after: Callable[[Any], None]
    ) -> None:
        self._scaler, self._name, self._after = scaler, name, after
        self._run = getattr(scaler, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._run(*args, **kwargs)
        self._after(result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._scaler, self._name)
