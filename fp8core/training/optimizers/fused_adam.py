"""Adam and AdamW for all parameters at once, with master values in float32 or in 16 more bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AdamDesc
from fp8core.chain.alone import bound
from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.quantized_tensor import QuantizedTensor, initial_value
from fp8core.tensors.sharded_weight import as_part_of, local_part, plain_for_writing
from fp8core.training.optimizers.fused import FLOATS, FusedOptimizer, check_positive

LARGEST: dict[torch.dtype, float] = {
    torch.float16: torch.finfo(torch.float16).max / 2,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max,
}
"""What the largest magnitude of a tensor becomes."""


class ScaledState(NamedTuple):
    """``codes * scale``; ``scale`` is float32 ``[1]``. 0 where all values are 0."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def zeros(cls, like: torch.Tensor, dtype: torch.dtype) -> ScaledState:
        """Return zeros of the shape of ``like``."""
        codes = torch.zeros_like(like, dtype=torch.float32).to(dtype)
        return cls(codes, torch.zeros(1, dtype=torch.float32, device=like.device))

    def value(self) -> torch.Tensor:
        """Return the values, float32."""
        return self.codes.float() * self.scale.reshape(())

    def write(self, value: torch.Tensor) -> None:
        """Store ``value``, float32, by a scale that its largest magnitude takes."""
        amax = value.abs().amax() if value.numel() else value.new_zeros(())
        # A smaller scale has no finite reciprocal.
        scale = (amax / LARGEST[self.codes.dtype]).clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(amax != 0, scale, 0)
        factor = torch.where(scale > 0, 1 / scale, 0)
        self.codes.copy_((value * factor).to(self.codes.dtype))
        self.scale.copy_(scale.reshape(1))


AVERAGES = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"


def _value_of(param: torch.Tensor) -> torch.Tensor:
    """Return the initial value of a master: of a quantized parameter, the one that it kept."""
    local = local_part(param.detach())
    if isinstance(local, QuantizedTensor):
        return initial_value(local, torch.float32)
    return local.float()


_STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class FusedAdam(FusedOptimizer):
    """Adam; AdamW with ``adam_w_mode``, as ``torch.optim.AdamW``.

    Computed in float32. A group has one number of steps, ``group["step"]``. Quantized parameters
    are written directly from their masters: rounded once, from float32. A state is a tensor, codes
    with one scale, or the bits that a bfloat16 parameter lacks; values are saved and loaded.

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
        self._note_set_grad_none(set_grad_none)
        self.capturable = capturable
        self.master_weights = master_weights
        self.adam_w_mode = bool(adam_w_mode)
        self.use_decoupled_grad = use_decoupled_grad
        # The dtype in which each state is held; uint8 stands for FP8 (e4m3).
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            MASTER: master_weight_dtype,
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
        """As of the base; with ``capturable`` its ``lr`` becomes a tensor on the device."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable and group["params"]:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_positive("FusedAdam", group, "lr", "eps", "weight_decay")
        betas = group["betas"]
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise OperandError(f"FusedAdam(betas={betas}): expected two numbers from 0 to below 1.")

    def _check_parameter(self, param: torch.Tensor) -> None:
        local = local_part(param)
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
        elif param.dtype not in FLOATS:
            raise OperandError(
                f"FusedAdam: a parameter of {param.dtype}; expected float32, bfloat16, float16 or "
                f"a quantized one."
            )

    def get_unscaled_state(
        self, param: torch.Tensor, state_name: str, skip_unscale: bool = False
    ) -> torch.Tensor:
        """Return the value of ``exp_avg``, ``exp_avg_sq`` or ``master_param``: float32, remainders
        as they are, and bfloat16 as it is with ``skip_unscale``."""
        state: Any = self.state[param][state_name]
        if isinstance(state, ScaledState):
            return state.value()
        local = local_part(state)
        return local.float() if local.dtype == torch.bfloat16 and not skip_unscale else local

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Store a value, float32, or of a remainder int16, in the dtype of the state."""
        if state_name not in self.state[param]:
            self._make_state(param, state_name)
        state: Any = self.state[param][state_name]
        value = local_part(unscaled_state)
        if isinstance(state, ScaledState):
            state.write(value)
        else:
            local_part(state).copy_(value)

    @torch.no_grad()
    def initialize_state(
        self, param: torch.Tensor, store_param_remainders: bool | None = None
    ) -> None:
        """Make the state of ``param``: averages of 0, and its master."""
        for name in AVERAGES:
            self._make_state(param, name)
        if not self._has_master(param):
            return
        self._make_state(param, MASTER)
        if not self._has_remainder(param):
            self.set_scaled_state(param, MASTER, _value_of(param))

    def _has_master(self, param: torch.Tensor) -> bool:
        """Say whether ``param`` has a master: it is below float32."""
        is_low = isinstance(local_part(param), QuantizedTensor) or param.dtype != torch.float32
        return self.master_weights and is_low

    def _has_remainder(self, param: torch.Tensor) -> bool:
        """Say whether the master of ``param`` is held as the bits that it lacks."""
        is_half = param.dtype == torch.bfloat16 and not isinstance(
            local_part(param), QuantizedTensor
        )
        return self.store_param_remainders and is_half

    def _make_state(self, param: torch.Tensor, name: str) -> None:
        dtype = self.name_to_dtype_map[name]
        if self._is_remainder(param, name):
            dtype = torch.int16
        elif dtype == torch.uint8:
            dtype = torch.float8_e4m3fn
        like = param.detach()
        if isinstance(local_part(like), QuantizedTensor):
            like = _value_of(param)
        if dtype in LARGEST:
            self.state[param][name] = ScaledState.zeros(local_part(like), dtype)
        else:
            self.state[param][name] = torch.zeros_like(like, dtype=dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with its values in float32, and remainders in int32.

        The state of a parameter that is a DTensor is one as well, placed as the parameter.
        """
        stored = super().state_dict()
        saved = chain.from_iterable(group["params"] for group in stored["param_groups"])
        for key, param in zip(saved, self._all_params(), strict=True):
            if key in stored["state"]:
                stored["state"][key] = {
                    name: self._saved(param, name) for name in stored["state"][key]
                }
        return stored

    def _saved(self, param: torch.Tensor, name: str) -> torch.Tensor:
        value = self.get_unscaled_state(param, name)
        # gloo and NCCL gather and broadcast no int16.
        return as_part_of(value.int() if value.dtype == torch.int16 else value, param)

    def _part_of_state(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Masters of float32 parameters, which Transformer Engine saves, are their values and are
        left out."""
        if not self._has_master(param) and param.dtype == torch.float32:
            state = {name: value for name, value in state.items() if name != MASTER}
        return super()._part_of_state(param, state)

    def _names_of_state(self, param: torch.Tensor) -> set[str]:
        return {*AVERAGES, MASTER} if self._has_master(param) else {*AVERAGES}

    def _like_of_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        return param.detach().view(torch.int16) if self._is_remainder(param, name) else param

    def _options(self) -> str:
        return (
            f" with master_weights={self.master_weights}, "
            f"store_param_remainders={self.store_param_remainders}"
        )

    def _store(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        value = value if self._is_remainder(param, name) else value.float()
        self.set_scaled_state(param, name, value.to(param.device))

    def _is_remainder(self, param: torch.Tensor, name: str) -> bool:
        return name == MASTER and self._has_remainder(param)

    def _clear_gradients(self, *, to_none: bool) -> None:
        if not self.use_decoupled_grad:
            super()._clear_gradients(to_none=to_none)
            return
        for param in self._all_params():
            grad = getattr(param, "decoupled_grad", None)
            if grad is None:
                continue
            if to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]  # Megatron's
            else:
                grad.zero_()

    def _step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of ``group`` that have a gradient, those of one kind at once."""
        found_inf = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        if found_inf is not None:
            found_inf = found_inf.to(device)
        group["step"] = self._next_step(group.get("step"), device, found_inf)
        steps: list[tuple[AdamDesc, Sequence[torch.Tensor]]] = []
        after: list[Callable[[], Any]] = []
        for param in group["params"]:
            grad = self._gradient(param)
            if grad is None:
                continue
            if not self.state[param]:
                self.initialize_state(param)
            steps.append(self._collected(param, local_part(grad), after))
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
        adam_steps(steps, lambda where: keywords if where == device else _moved(keywords, where))
        for write in after:
            write()

    def _gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return what ``param`` is stepped by."""
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

    def _collected(
        self, param: torch.Tensor, grad: torch.Tensor, after: list[Callable[[], Any]]
    ) -> tuple[AdamDesc, Sequence[torch.Tensor]]:
        """Return the step of ``param`` and its tensors, and note in ``after`` what is written after
        the step."""
        averages = self._averages(param, after)
        local = plain_for_writing(local_part(param.detach()))
        masters: list[torch.Tensor] = []
        kind = "none"
        if self._has_remainder(param):
            kind, masters = "remainder", [local_part(self.state[param][MASTER])]
        elif self._has_master(param):
            master = self._temporary(param, MASTER, after)
            if isinstance(local, QuantizedTensor):
                quantized, local = local, master
                after.append(lambda: quantized.copy_(master))
            else:
                kind, masters = "float32", [master]
        desc = AdamDesc(local.dtype, grad.dtype, averages[0].dtype, kind, self.adam_w_mode)
        return desc, (grad, local, *averages, *masters)

    def _averages(
        self, param: torch.Tensor, after: list[Callable[[], Any]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both averages in one dtype that an operation takes."""
        first, second = (self.state[param][name] for name in AVERAGES)
        if not (isinstance(first, ScaledState) or isinstance(second, ScaledState)):
            first, second = local_part(first), local_part(second)
            if first.dtype == second.dtype:
                return first, second
        first, second = (self._temporary(param, name, after) for name in AVERAGES)
        return first, second

    def _temporary(
        self, param: torch.Tensor, name: str, after: list[Callable[[], Any]]
    ) -> torch.Tensor:
        """Return a state in float32: itself, or a copy that is stored after the step."""
        state: Any = self.state[param][name]
        if not isinstance(state, ScaledState) and local_part(state).dtype == torch.float32:
            return local_part(state)
        value = self.get_unscaled_state(param, name)
        after.append(lambda: self.set_scaled_state(param, name, value))
        return value


def adam_steps(
    steps: Iterable[tuple[AdamDesc, Sequence[torch.Tensor]]],
    numbers_on: Callable[[torch.device], dict[str, Any]],
) -> None:
    """Run steps of Adam, those of one descriptor and device at once.

    Args:
        steps: the descriptor of each, and its gradient, parameter, averages and, if it has one,
            master.
        numbers_on: returns the keywords of :class:`AdamDesc` for parameters of a device.
    """
    batches: dict[tuple[AdamDesc, torch.device], list[list[torch.Tensor]]] = {}
    for desc, tensors in steps:
        lists = batches.setdefault((desc, tensors[1].device), [[], [], [], [], []])
        for of_kind, tensor in zip(lists, tensors, strict=False):  # masters may be missing
            of_kind.append(tensor)
    for (desc, where), lists in batches.items():
        values = tuple(getattr(desc, name) for name in AdamDesc.__slots__)
        bound(AdamDesc, values, lists[1][0])(*lists, **numbers_on(where))


def _moved(numbers: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return numbers of a step with those that are tensors on ``device``."""
    return {
        name: number.to(device) if isinstance(number, torch.Tensor) else number
        for name, number in numbers.items()
    }
