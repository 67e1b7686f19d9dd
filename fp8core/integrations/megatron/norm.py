"""fp8core's norms with the arguments of Megatron's."""

from __future__ import annotations

from typing import Any

from fp8core.errors import UnsupportedError
from fp8core.integrations.megatron.config import device_of
from fp8core.modules.norm import LayerNorm, RMSNorm

__all__ = ["Fp8CoreNorm"]


class Fp8CoreNorm:
    """Constructs the norm that a config names; a class, as specs hold classes."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Return fp8core's LayerNorm or RMSNorm."""
        kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise UnsupportedError(
                f"normalization={config.normalization!r} is not offered by Fp8CoreSpecProvider; "
                f"norms are {', '.join(kinds)}."
            )
        norm = kinds[config.normalization](
            hidden_size,
            eps,
            params_dtype=config.params_dtype,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            device=device_of(config),
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = bool(config.sequence_parallel)  # type: ignore[attr-defined]  # Megatron reads it
        return norm
