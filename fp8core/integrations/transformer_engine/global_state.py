"""``FP8GlobalStateManager`` and the queries beside it, to read what is active."""

from __future__ import annotations

from typing import Any, NoReturn

from fp8core.context.autocast import active
from fp8core.inspection import available
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.tensors.parameter.init import is_initializing_quantized

__all__ = [
    "FP8GlobalStateManager",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
]


class _Refusing(type):
    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"FP8GlobalStateManager.{name} is not offered: fp8core keeps no global state of scales "
            f"and buffers. A layer holds its own, and autocast updates it on exit."
        )


class FP8GlobalStateManager(metaclass=_Refusing):
    """What the innermost ``autocast`` of the calling thread asks for."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether layers compute in low precision."""
        return active().quantize is not None

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether layers record amaxes while they compute in high precision."""
        return active().observe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the active recipe; outside of any autocast, the default one."""
        request = active()
        return request.quantize or request.observe or get_default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """Return the process group over which delayed amaxes are reduced, or None."""
        return active().process_group

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether layers constructed now store their weights in low precision."""
        return is_initializing_quantized()

    @classmethod
    def reset(cls) -> None:
        """Do nothing: there is no state besides that of layers and open autocasts."""

    is_fp8_available = staticmethod(lambda: available.is_fp8_available(True))
    is_mxfp8_available = staticmethod(lambda: available.is_mxfp8_available(True))
    is_fp8_block_scaling_available = staticmethod(
        lambda: available.is_fp8_block_scaling_available(True)
    )
    is_nvfp4_available = staticmethod(lambda: available.is_nvfp4_available(True))


def check_fp8_support() -> tuple[bool, str]:
    """Return whether the selected backend runs FP8 with one scale a tensor, and why not."""
    return _pair(available.is_fp8_available(True))


def check_mxfp8_support() -> tuple[bool, str]:
    """Return whether it runs MXFP8, and why not."""
    return _pair(available.is_mxfp8_available(True))


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """Return whether it runs FP8 with a scale for 128 elements, and why not."""
    return _pair(available.is_fp8_block_scaling_available(True))


def check_nvfp4_support() -> tuple[bool, str]:
    """Return whether it runs NVFP4, and why not."""
    return _pair(available.is_nvfp4_available(True))


def _pair(answer: bool | tuple[bool, str]) -> tuple[bool, str]:
    assert isinstance(answer, tuple)
    return answer
