"""The state of Adam: the averages and masters of parameters, in the dtypes that were asked for."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core.optimizers.fused import FusedOptimizer
from fp8core.optimizers.scaled_state import LARGEST, ScaledState
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import local_part

__all__ = ["AVERAGES", "MASTER", "AdamState"]

AVERAGES = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"


class AdamState(FusedOptimizer):
    """Holds each state as a tensor, as codes with one scale, or as the bits that a bfloat16
    parameter lacks; saves and loads values."""

    master_weights: bool
    store_param_remainders: bool
    # The dtype in which each state is held; uint8 stands for FP8 (e4m3).
    name_to_dtype_map: dict[str, torch.dtype]

    def get_unscaled_state(
        self, param: torch.Tensor, state_name: str, skip_unscale: bool = False
    ) -> torch.Tensor:
        """Return the value of ``exp_avg``, ``exp_avg_sq`` or ``master_param``: float32, remainders
        as they are, and bfloat16 as it is with ``skip_unscale``."""
        held: Any = self.state[param][state_name]
        if isinstance(held, ScaledState):
            return held.value()
        local = local_part(held)
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
            local_part(held).copy_(local_part(unscaled_state))

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
        if name == MASTER and self._has_remainder(param):
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
        """Return the state with its values in float32; remainders as they are."""
        stored = super().state_dict()
        saved = chain.from_iterable(group["params"] for group in stored["param_groups"])
        for key, param in zip(saved, self._all_params(), strict=True):
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
        params = list(self._all_params())
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
            self.set_scaled_state(param, name, local_part(value).to(param.device))

    def _check_loaded(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        is_remainder = name == MASTER and self._has_remainder(param)
        if is_remainder != (value.dtype == torch.int16):
            raise OperandError(
                f"FusedAdam.load_state_dict: {name} is {value.dtype}; with "
                f"store_param_remainders={self.store_param_remainders} it would be "
                f"{'torch.int16' if is_remainder else 'a float'}."
            )
        given, expected = list(local_part(value).shape), list(local_part(param).shape)
        if given != expected:
            raise OperandError(
                f"FusedAdam.load_state_dict: {name} is {given}, its parameter {expected}. Load the "
                f"state of the same model."
            )


def _value_of(param: torch.Tensor) -> torch.Tensor:
    """Return the initial value of a master: of a quantized parameter, the one that it kept."""
    local = local_part(param.detach())
    if not isinstance(local, QuantizedTensor):
        return local.float()
    kept = local.get_high_precision_init_val()
    return local.dequantize(torch.float32) if kept is None else kept.to(local.device).float()
