"""What optimizers share whose step is one operation for all parameters of a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from fp8core.errors import OperandError

__all__ = ["FLOATS", "FusedOptimizer"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of parameters and gradients that operations step."""


class FusedOptimizer(torch.optim.Optimizer):
    """Checks all gradients, then steps one group after the other."""

    set_grad_none: bool | None

    def _note_set_grad_none(self, given: bool | None) -> None:
        """Keep the deprecated argument ``set_grad_none``, and warn if it is given."""
        if given is not None:
            text = "set_grad_none is deprecated; use zero_grad(set_to_none=...)."
            warnings.warn(text, DeprecationWarning, stacklevel=3)
        self.set_grad_none = given

    def _all_params(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of all groups."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return what ``param`` is stepped by."""
        return param.grad

    def _step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of ``group`` that have a gradient."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, or with ``set_to_none=False`` set them to zero.

        Raises:
            OperandError: ``set_to_none`` contradicts ``set_grad_none``.
        """
        if self.set_grad_none is not None:
            if set_to_none not in (None, self.set_grad_none):
                raise OperandError(
                    f"zero_grad(set_to_none={set_to_none}) of a {type(self).__name__} with "
                    f"set_grad_none={self.set_grad_none}; give one of them."
                )
            set_to_none = self.set_grad_none
        self._clear_gradients(to_none=set_to_none is None or set_to_none)

    def _clear_gradients(self, *, to_none: bool) -> None:
        super().zero_grad(set_to_none=to_none)

    def __getstate__(self) -> dict[str, Any]:
        # Public attributes, of which torch copies and pickles only some.
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**public, **super().__getstate__()}

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
            for param in self._all_params():
                grad = self._gradient(param)
                if grad is not None:  # checked before anything is stepped
                    self._check_gradient(param, grad)
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _check_gradient(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        owner = type(self).__name__
        if grad.is_sparse or grad.shape != param.shape or grad.device != param.device:
            found = "sparse" if grad.is_sparse else f"{list(grad.shape)} on {grad.device}"
            raise OperandError(
                f"{owner}: the gradient of a parameter {list(param.shape)} on {param.device} is "
                f"{found}; expected a dense one of its shape, on its device."
            )
        if grad.dtype not in FLOATS:
            raise OperandError(
                f"{owner}: a gradient of {grad.dtype}; expected a float of 16 or 32."
            )
