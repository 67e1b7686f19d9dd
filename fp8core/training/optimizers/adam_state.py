"""The state of Adam: the averages and masters of parameters, in the dtypes that were asked for."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import as_part_of, local_part
from fp8core.training.optimizers.fused import FusedOptimizer
from fp8core.training.optimizers.scaled_state import LARGEST, ScaledState

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
        value = local_part(unscaled_state)
        if isinstance(held, ScaledState):
            held.write(value)
        else:
            local_part(held).copy_(value)

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

    def _given(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Masters of float32 parameters, which Transformer Engine saves, are their values and are
        left out."""
        if not self._has_master(param) and param.dtype == torch.float32:
            state = {name: value for name, value in state.items() if name != MASTER}
        return super()._given(param, state)

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


def _value_of(param: torch.Tensor) -> torch.Tensor:
    """Return the initial value of a master: of a quantized parameter, the one that it kept."""
    local = local_part(param.detach())
    if not isinstance(local, QuantizedTensor):
        return local.float()
    kept = local.get_high_precision_init_val()
    return local.dequantize(torch.float32) if kept is None else kept.to(local.device).float()
