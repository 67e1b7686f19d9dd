"""Adam and AdamW for all parameters at once, with master values in float32 or in 16 more bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AdamDesc
from fp8core.chain.alone import bound
from fp8core.errors import OperandError, UnsupportedError
from fp8core.optimizers.scaled_state import LARGEST, ScaledState
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import plain_for_writing

__all__ = ["FusedAdam"]

_AVERAGES = ("exp_avg", "exp_avg_sq")
_MASTER = "master_param"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class FusedAdam(torch.optim.Optimizer):
    """Adam; AdamW with ``adam_w_mode``, as ``torch.optim.AdamW``.

    Computed in float32. A group has one number of steps, ``group["step"]``. Quantized parameters
    are written directly from their masters: rounded once, from float32.

    Args:
        params: parameters, or groups of them, in float32, bfloat16, float16 or quantized.
        lr, betas, eps, weight_decay: as of ``torch.optim.AdamW``.
        amsgrad: not offered.
        bias_correction: divide the averages by ``1 - beta ** step``.
        adam_w_mode: decoupled weight decay; else it is added to the gradients.
        capturable: the number of steps and ``lr`` are tensors on the device, and a step with an
            infinite gradient of ``torch.amp.GradScaler`` is skipped there, so that a CUDA graph can
            record the step.
        master_weights: hold the value of each parameter below float32 in ``master_weight_dtype``.
            Quantized parameters need it. A master starts as the value that
            ``quantized_model_init(preserve_high_precision_init_val=True)`` kept, else as the
            parameter's.
        master_weight_dtype: float32, or float16 with one scale a tensor.
        exp_avg_dtype, exp_avg_sq_dtype: float32, bfloat16, or with one scale a tensor float16 or
            ``torch.uint8``, which stands for FP8 (e4m3).
        use_decoupled_grad: take ``param.decoupled_grad`` in the place of ``param.grad``.
        store_param_remainders: of a bfloat16 parameter with a float32 master, hold only the 16 bits
            that the parameter lacks; no effect for others.
        set_grad_none: deprecated; give ``zero_grad`` its argument.

    Raises:
        UnsupportedError: ``amsgrad``, or a combination of dtypes that cannot be stepped.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        _check_numbers(lr, betas, eps, weight_decay)
        dtypes = (exp_avg_dtype, exp_avg_sq_dtype)
        problems = (
            (amsgrad, "amsgrad=True"),
            (
                master_weights and master_weight_dtype not in (torch.float32, torch.float16),
                f"master_weight_dtype={master_weight_dtype}",
            ),
            (exp_avg_dtype not in _STATE_DTYPES, f"exp_avg_dtype={exp_avg_dtype}"),
            (exp_avg_sq_dtype not in _STATE_DTYPES, f"exp_avg_sq_dtype={exp_avg_sq_dtype}"),
            (
                capturable and dtypes not in ((torch.float32,) * 2, (torch.bfloat16,) * 2),
                f"capturable=True with exp_avg_dtype={exp_avg_dtype} and "
                f"exp_avg_sq_dtype={exp_avg_sq_dtype}, which are not both float32 or both bfloat16",
            ),
            (
                capturable and master_weights and master_weight_dtype != torch.float32,
                f"capturable=True with master_weight_dtype={master_weight_dtype}",
            ),
        )
        for is_wrong, text in problems:
            if is_wrong:
                raise UnsupportedError(f"FusedAdam: {text} is not offered.")
        if set_grad_none is not None:
            text = "set_grad_none is deprecated; use zero_grad(set_to_none=...)."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        self.capturable = capturable
        self.master_weights = master_weights
        self.adam_w_mode = bool(adam_w_mode)
        self.use_decoupled_grad = use_decoupled_grad
        self.set_grad_none = set_grad_none
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            _MASTER: master_weight_dtype,
        }
        is_single = master_weights and master_weight_dtype == torch.float32
        self.store_param_remainders = store_param_remainders and is_single
        if capturable and self.store_param_remainders:
            raise UnsupportedError(
                "FusedAdam: capturable=True with store_param_remainders=True is not offered."
            )
        defaults = {
            "lr": torch.tensor(float(lr)) if capturable else lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        if capturable:
            self._step_supports_amp_scaling = True  # torch.amp.GradScaler asks for it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options that differ from the defaults.

        Raises:
            OperandError, UnsupportedError: a parameter that is not stepped; nothing is added then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                self._check_parameter(param)
        except (OperandError, UnsupportedError):
            self.param_groups.pop()
            raise
        if self.capturable and group["params"]:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)

    def _check_parameter(self, param: torch.Tensor) -> None:
        local = _local(param)
        if isinstance(local, QuantizedTensor):
            if not self.master_weights:
                raise UnsupportedError(
                    "FusedAdam of quantized parameters without masters is not offered; set "
                    "master_weights=True."
                )
            if self.capturable:
                raise UnsupportedError(
                    "FusedAdam(capturable=True) of quantized parameters is not offered."
                )
        elif param.dtype not in _FLOATS:
            raise OperandError(
                f"FusedAdam: a parameter of {param.dtype}; expected float32, bfloat16, float16 or "
                f"a quantized one."
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, or with ``set_to_none=False`` set them to zero.

        Raises:
            OperandError: ``set_to_none`` contradicts ``set_grad_none``.
        """
        if self.set_grad_none is not None:
            if set_to_none not in (None, self.set_grad_none):
                raise OperandError(
                    f"zero_grad(set_to_none={set_to_none}) of a FusedAdam with "
                    f"set_grad_none={self.set_grad_none}; give one of them."
                )
            set_to_none = self.set_grad_none
        is_cleared = set_to_none is None or set_to_none
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=is_cleared)
            return
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            grad = getattr(param, "decoupled_grad", None)
            if grad is None:
                continue
            if is_cleared:
                param.decoupled_grad = None
            else:
                grad.zero_()

    # State

    def __getstate__(self) -> dict[str, Any]:
        return {**settings_of(self), **super().__getstate__()}

    def get_unscaled_state(
        self, param: torch.Tensor, state_name: str, skip_unscale: bool = False
    ) -> torch.Tensor:
        """Return the value of ``exp_avg``, ``exp_avg_sq`` or ``master_param``: float32, remainders
        as they are, and bfloat16 as it is with ``skip_unscale``."""
        held: Any = self.state[param][state_name]
        if isinstance(held, ScaledState):
            return held.value()
        local = _local(held)
        return local.float() if local.dtype == torch.bfloat16 and not skip_unscale else local

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Store a value, float32, or of a remainder int16, in the dtype of the state."""
        if state_name not in self.state[param]:
            self._make_state(param, state_name)
        held: Any = self.state[param][state_name]
        if isinstance(held, ScaledState):
            held.write(unscaled_state)
        else:
            _local(held).copy_(_local(unscaled_state))

    @torch.no_grad()
    def initialize_state(
        self, param: torch.Tensor, store_param_remainders: bool | None = None
    ) -> None:
        """Make the state of ``param``: averages of 0, and its master."""
        for name in _AVERAGES:
            self._make_state(param, name)
        if not self._has_master(param):
            return
        self._make_state(param, _MASTER)
        if not self._has_remainder(param):
            self.set_scaled_state(param, _MASTER, _value_of(param))

    def _has_master(self, param: torch.Tensor) -> bool:
        is_low = isinstance(_local(param), QuantizedTensor) or param.dtype != torch.float32
        return self.master_weights and is_low

    def _has_remainder(self, param: torch.Tensor) -> bool:
        is_half = param.dtype == torch.bfloat16 and not isinstance(_local(param), QuantizedTensor)
        return self.store_param_remainders and is_half

    def _make_state(self, param: torch.Tensor, name: str) -> None:
        dtype = self.name_to_dtype_map[name]
        if name == _MASTER and self._has_remainder(param):
            dtype = torch.int16
        elif dtype == torch.uint8:
            dtype = torch.float8_e4m3fn
        like = param.detach()
        if isinstance(_local(like), QuantizedTensor):
            like = _value_of(param)
        if dtype in LARGEST:
            self.state[param][name] = ScaledState.zeros(_local(like), dtype)
        else:
            self.state[param][name] = torch.zeros_like(like, dtype=dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with its values in float32; remainders as they are."""
        stored = super().state_dict()
        saved = chain.from_iterable(group["params"] for group in stored["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(saved, params, strict=True):
            if key in stored["state"]:
                stored["state"][key] = {
                    name: self._whole(param, name) for name in stored["state"][key]
                }
        return stored

    def _whole(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return a value as torch saves it: of a DTensor, a DTensor."""
        held: Any = self.state[param][name]
        if not isinstance(held, ScaledState) and type(held) is not torch.Tensor:
            whole: torch.Tensor = held
            return whole.float() if whole.dtype == torch.bfloat16 else whole
        return self.get_unscaled_state(param, name)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; values are stored in the dtypes of this optimizer.

        Raises:
            OperandError: values of another shape; or masters are remainders there and values here,
                or the other way round. Nothing is loaded then.
        """
        saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        loaded = [
            (param, name, value)
            for key, param in zip(saved, params, strict=False)
            for name, value in state_dict["state"].get(key, {}).items()
            if value is not None
        ]
        for param, name, value in loaded:
            self._check_loaded(param, name, value)
        # Without the values, which torch would convert to the parameters' dtypes.
        super().load_state_dict({**state_dict, "state": {}})
        for param, name, value in loaded:
            value = value if value.dtype == torch.int16 else value.float()
            self.set_scaled_state(param, name, _local(value).to(param.device))

    def _check_loaded(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        is_remainder = name == _MASTER and self._has_remainder(param)
        if is_remainder != (value.dtype == torch.int16):
            raise OperandError(
                f"FusedAdam.load_state_dict: {name} is {value.dtype}; with "
                f"store_param_remainders={self.store_param_remainders} it would be "
                f"{'torch.int16' if is_remainder else 'a float'}."
            )
        if _local(value).shape != _local(param).shape:
            raise OperandError(
                f"FusedAdam.load_state_dict: {name} is {list(_local(value).shape)}, its parameter "
                f"{list(_local(param).shape)}. Load the state of the same model."
            )

    # The step

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
            for param in chain.from_iterable(group["params"] for group in self.param_groups):
                grad = self._gradient(param)
                if grad is not None:  # checked before anything is stepped
                    _check_gradient(param, grad)
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        found_inf = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        if found_inf is not None:
            found_inf = found_inf.to(device)
        group["step"] = self._next_step(group.get("step"), device, found_inf)
        batches: dict[tuple[AdamDesc, torch.device], _Batch] = {}
        for param in group["params"]:
            grad = self._gradient(param)
            if grad is None:
                continue
            if not self.state[param]:
                self.initialize_state(param)
            self._collect(param, _local(grad), batches)
        beta1, beta2 = group["betas"]
        keywords = {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "step": group["step"],
            "bias_correction": bool(group["bias_correction"]),
        }
        if scale is not None:
            keywords["inv_scale"] = scale.to(device).double().reciprocal().float()
        if found_inf is not None:
            keywords["found_inf"] = found_inf.reshape(1)
        for (desc, where), batch in batches.items():
            values = tuple(getattr(desc, name) for name in AdamDesc.__slots__)
            run = bound(AdamDesc, values, where)
            numbers = keywords if where == device else _moved(keywords, where)
            run(*batch.lists, **numbers)
            for write in batch.after:
                write()

    def _gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        return getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad

    def _next_step(
        self, step: Any, device: torch.device, found_inf: torch.Tensor | None
    ) -> int | torch.Tensor:
        if not self.capturable:
            return 1 if step is None else int(step) + 1
        if step is None:
            step = torch.zeros(1, dtype=torch.int32, device=device)
        count: torch.Tensor = torch.as_tensor(step, dtype=torch.int32).reshape(1).to(device)
        # In place, so that a CUDA graph counts on.
        count += 1 if found_inf is None else (found_inf == 0).to(torch.int32).reshape(1)
        return count

    def _collect(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        batches: dict[tuple[AdamDesc, torch.device], _Batch],
    ) -> None:
        """Add the tensors of ``param`` to those that are stepped alike."""
        after: list[Callable[[], Any]] = []
        averages = self._averages(param, after)
        local = plain_for_writing(_local(param.detach()))
        masters: list[torch.Tensor] = []
        kind = "none"
        if self._has_remainder(param):
            kind, masters = "remainder", [_local(self.state[param][_MASTER])]
        elif self._has_master(param):
            master = self._temporary(param, _MASTER, after)
            if isinstance(local, QuantizedTensor):
                quantized, local = local, master
                after.append(lambda: quantized.copy_(master))
            else:
                kind, masters = "float32", [master]
        desc = AdamDesc(local.dtype, grad.dtype, averages[0].dtype, kind, self.adam_w_mode)
        batch = batches.setdefault((desc, local.device), _Batch([[] for _ in range(5)], []))
        for tensors, one in zip(batch.lists, (grad, local, *averages, *masters), strict=False):
            tensors.append(one)
        batch.after.extend(after)

    def _averages(
        self, param: torch.Tensor, after: list[Callable[[], Any]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both averages in one dtype that an operation takes."""
        first, second = (self.state[param][name] for name in _AVERAGES)
        if not (isinstance(first, ScaledState) or isinstance(second, ScaledState)):
            first, second = _local(first), _local(second)
            if first.dtype == second.dtype:
                return first, second
        one, two = (self._temporary(param, name, after) for name in _AVERAGES)
        return one, two

    def _temporary(
        self, param: torch.Tensor, name: str, after: list[Callable[[], Any]]
    ) -> torch.Tensor:
        """Return a state in float32: itself, or a copy that is stored after the step."""
        held: Any = self.state[param][name]
        if not isinstance(held, ScaledState) and _local(held).dtype == torch.float32:
            return _local(held)
        value = self.get_unscaled_state(param, name)
        after.append(lambda: self.set_scaled_state(param, name, value))
        return value


class _Batch(NamedTuple):
    """The lists of an operation, and what is written after it."""

    lists: list[list[torch.Tensor]]
    after: list[Callable[[], Any]]


def _moved(numbers: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return numbers of a step with those that are tensors on ``device``."""
    return {
        name: one.to(device) if isinstance(one, torch.Tensor) else one
        for name, one in numbers.items()
    }


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the public attributes of an optimizer, of which torch copies and pickles only some."""
    return {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, another tensor as it is."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _value_of(param: torch.Tensor) -> torch.Tensor:
    """Return the initial value of a master: of a quantized parameter, the one that it kept."""
    local = _local(param.detach())
    if not isinstance(local, QuantizedTensor):
        return local.float()
    kept = local.get_high_precision_init_val()
    return local.dequantize(torch.float32) if kept is None else kept.to(local.device).float()


def _check_gradient(param: torch.Tensor, grad: torch.Tensor) -> None:
    if grad.is_sparse or grad.shape != param.shape or grad.device != param.device:
        found = "sparse" if grad.is_sparse else f"{list(grad.shape)} on {grad.device}"
        raise OperandError(
            f"FusedAdam: the gradient of a parameter {list(param.shape)} on {param.device} is "
            f"{found}; expected a dense one of its shape, on its device."
        )
    if grad.dtype not in _FLOATS:
        raise OperandError(f"FusedAdam: a gradient of {grad.dtype}; expected a float of 16 or 32.")


def _check_numbers(lr: Any, betas: Any, eps: float, weight_decay: float) -> None:
    numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    for name, value in numbers.items():
        if not isinstance(value, torch.Tensor) and not value >= 0:
            raise OperandError(f"FusedAdam({name}={value}): expected 0 or above.")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise OperandError(f"FusedAdam(betas={betas}): expected two numbers from 0 to below 1.")
