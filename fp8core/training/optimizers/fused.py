"""The base of optimizers whose step is one operation for all parameters of a group, and gradient
descent with momentum: torch's step, with Transformer Engine's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from numbers import Real
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version
from torch.optim.sgd import sgd

from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.checks import is_sharded, misfit
from fp8core.tensors.sharded_weight import ShardedWeight, as_part_of, local_part, plain_for_writing
from fp8core.torch_ops.private import FakeTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of parameters and gradients that operations step."""


def check_positive(owner: str, group: dict[str, Any], *names: str) -> None:
    """Raise OperandError unless each option of ``names`` is a tensor or a number of at least 0."""
    for name in names:
        value = group[name]
        if not isinstance(value, torch.Tensor) and not (
            isinstance(value, Real) and float(value) >= 0
        ):
            raise OperandError(f"{owner}({name}={value!r}): expected a number, 0 or above.")


class FusedOptimizer(torch.optim.Optimizer):
    """The base class: checks all gradients, then steps one group after the other."""

    set_grad_none: bool | None

    def _note_set_grad_none(self, set_grad_none: bool | None) -> None:
        """Store the deprecated argument ``set_grad_none``, and warn unless it is None."""
        if set_grad_none is not None:
            text = "set_grad_none is deprecated; use zero_grad(set_to_none=...)."
            warnings.warn(text, DeprecationWarning, stacklevel=3)
        self.set_grad_none = set_grad_none

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options that differ from the defaults.

        Raises:
            OperandError, UnsupportedError: an option or a parameter is unfit for a step; nothing is
                added then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
            for param in group["params"]:
                self._check_parameter(param)
        except (OperandError, UnsupportedError):
            self.param_groups.pop()
            raise

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise OperandError if an option of ``group`` has no valid number."""
        raise NotImplementedError

    def _check_parameter(self, param: torch.Tensor) -> None:
        """Raise OperandError or UnsupportedError if ``param`` cannot be stepped."""
        raise NotImplementedError

    def _all_params(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of all groups."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict()``, after the pre-hooks; values are stored in the dtypes
        of this optimizer.

        Raises:
            OperandError: a value has another kind, shape or placement; a parameter has different
                states in ``state_dict`` and here, as with different options; ``state_dict`` has a
                state of a parameter that none of its groups names; or a group lacks an option, or
                has one that is no number. Nothing is loaded then.
        """
        loaded: list[tuple[torch.Tensor, str, torch.Tensor]] = []

        def take_values(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            loaded.extend(self._values_of(saved))
            return {**saved, "state": {}}  # torch would convert values to the parameters' dtypes

        def store_values(_: Any) -> None:
            for param, name, value in loaded:
                self._store(param, name, value)

        last = self.register_load_state_dict_pre_hook(take_values)
        first = self.register_load_state_dict_post_hook(store_values, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()

    def _values_of(self, saved: dict[str, Any]) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Yield the states in ``saved``: parameter, name of the state, this rank's part."""
        keys = [*chain.from_iterable(group["params"] for group in saved["param_groups"])]
        in_groups = {*keys}
        nameless = [key for key in saved["state"] if key not in in_groups]
        if nameless:
            raise OperandError(
                f"{type(self).__name__}.load_state_dict: it has states of {nameless[0]!r}, which "
                f"none of its param_groups has. StateDictOptions(broadcast_from_rank0=True) gives "
                f"all ranks the groups of the first: for parameters of a rank's own, as of "
                f"fp8core.distributed.Experts, save and load with flatten_optimizer_state_dict="
                f"True by torch.distributed.checkpoint."
            )
        for key, param in zip(keys, self._all_params(), strict=False):
            state = saved["state"].get(key, {})
            if not isinstance(state, dict):
                raise OperandError(
                    f"{type(self).__name__}.load_state_dict: the state of parameter {key!r} is a "
                    f"{type(state).__name__}, expected a dict of tensors."
                )
            for name, value in self._part_of_state(param, state).items():
                yield param, name, value
        for group in saved["param_groups"]:
            missing = [name for name in self.defaults if name not in group]
            if missing:
                raise OperandError(
                    f"{type(self).__name__}.load_state_dict: one of its param_groups lacks "
                    f"{', '.join(missing)}; it has {', '.join(map(str, group))}. Add to each group "
                    f"what this optimizer was made with, as in its own param_groups."
                )
            self._check_options(group)

    def _part_of_state(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return this rank's part of ``state``, saved for ``param``, or raise OperandError."""
        state = {name: value for name, value in state.items() if value is not None}
        expected = self._names_of_state(param)
        if state and set(state) != expected:
            raise OperandError(
                f"{type(self).__name__}.load_state_dict: a parameter {list(param.shape)} of "
                f"{param.dtype} has the states {sorted(state)}; here it has {sorted(expected)}"
                f"{self._options()}. Make the optimizer with the options of the one that was "
                f"saved."
            )
        return {name: self._placed(param, name, value) for name, value in state.items()}

    def _placed(self, param: torch.Tensor, name: str, value: Any) -> torch.Tensor:
        """Return this rank's part of ``value``, or raise OperandError if it does not fit."""
        fault = misfit(value, self._like_of_state(param, name))
        if fault is not None:
            raise OperandError(
                f"{type(self).__name__}.load_state_dict: {name} {fault}{self._options()}. Load the "
                f"state of the same model and options; on other ranks by "
                f"torch.distributed.checkpoint."
            )
        if is_sharded(value):
            sharded_param: Any = param
            value = value.redistribute(placements=sharded_param.placements)
        return local_part(value)

    def _names_of_state(self, param: torch.Tensor) -> set[str]:
        """Return the names of the states of ``param``."""
        raise NotImplementedError

    def _like_of_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor of the shape, kind and placement of a saved state."""
        return param

    def _options(self) -> str:
        """Return the text, for messages, of the options that the states depend on."""
        return ""

    def _store(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Set the state ``name`` of ``param`` to ``value``, this rank's part."""
        raise NotImplementedError

    def _gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient by which ``param`` is stepped."""
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
        # torch copies and pickles only some of the public attributes.
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
                if grad is not None:  # all gradients are checked before the first step
                    self._check_gradient(param, grad)
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _check_gradient(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        owner = type(self).__name__
        if grad.is_sparse or grad.shape != param.shape or grad.device != param.device:
            shown = "sparse" if grad.is_sparse else f"{list(grad.shape)} on {grad.device}"
            raise OperandError(
                f"{owner}: the gradient of a parameter {list(param.shape)} on {param.device} is "
                f"{shown}; expected a dense one of its shape, on its device."
            )
        if grad.dtype not in FLOATS:
            raise OperandError(
                f"{owner}: a gradient of {grad.dtype}; expected a float of 16 or 32."
            )


_REQUIRED: Any = object()
_MOMENTUM: Final = "momentum_buffer"
_OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
_STEPPED = (torch.Tensor, torch.nn.Parameter, FakeTensor, ShardedWeight)


class FusedSGD(FusedOptimizer):
    """Gradient descent by the step of ``torch.optim.SGD``, its fused kernels on CUDA.

    Args:
        params: parameters, or groups of parameters, in float32, bfloat16 or float16. A parameter
            in float32 takes gradients in 16 bits too, any other those of its own dtype.
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
        """Step the parameters of ``group`` that have a gradient: first those without a momentum
        buffer, as in their first step, then those with one."""
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
    """Raise UnsupportedError if ``after_momentum``: the weight decay, added behind the momentum."""
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
        grads: of the parameters' shapes.
        momenta: momentum buffers of the parameters' shapes and dtypes, updated in place. All are
            None in the first step, which returns new buffers, or None if the momentum is 0.
        options: lr, momentum, dampening, weight_decay and nesterov.
    """
    # The fused kernels take only tensors of equal strides.
    stored = [param.contiguous() for param in params]
    of_dtype = [
        grad.to(param.dtype).contiguous() for grad, param in zip(grads, params, strict=True)
    ]
    updated = [None if momentum is None else momentum.contiguous() for momentum in momenta]
    # On other devices torch chooses the step. Its fused step on CPUs is wrong for parameters of 16
    # bits (torch 2.11 to 2.13), and reads strided tensors as if they were contiguous.
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
