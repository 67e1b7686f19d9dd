"""fp8core in MindSpeed's place for Transformer Engine's layers under Megatron.

MindSpeed fabricates ``transformer_engine`` out of empty classes, and has Megatron's layers of that
package replaced by its own. :func:`install` puts the alias there instead and leaves those patches
out, so that Megatron's own classes run on fp8core's layers; MindSpeed's other patches stay. Call it
first::

    from fp8core.compat import mindspeed

    mindspeed.install()
    import mindspeed.megatron_adaptor
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fp8core.compat import transformer_engine
from fp8core.errors import UnsupportedError
from fp8core.reporting import log_once

__all__ = ["CLASSES", "classes", "install", "is_left_out"]

_EXTENSION = "megatron.core.extensions.transformer_engine"
CLASSES: Mapping[str, str] = {
    "MindSpeedTELayernorm": "TENorm",
    "MindSpeedTELayerNormColumnParallelLinear": "TELayerNormColumnParallelLinear",
    "MindSpeedTEGroupedLinear": "TEGroupedLinear",
    "TEColumnParallelLinear": "TEColumnParallelLinear",
    "TERowParallelLinear": "TERowParallelLinear",
}
"""MindSpeed's layers with Transformer Engine's interface, and Megatron's class for each."""

# What belongs to these layers besides: the experts' two kinds, the recipe and its context, padding.
_BELONGING = (
    *("TELinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"),
    *("TEDelayedScaling", "Fp8Padding", "Fp8Unpadding", "te_checkpoint"),
)
_CONTEXT = (
    *("megatron.core.fp8_utils.get_fp8_context", "megatron.core.fp8_utils.get_fp8_recipe"),
    "megatron.core.enums.Fp8Recipe",
)
_MANAGER = "mindspeed.patch_utils"
_ADAPTOR = "mindspeed.megatron_adaptor"


def is_left_out(target: str) -> bool:
    """Return whether MindSpeed's patch of ``target``, a dotted name, gives way to fp8core.

    >>> is_left_out("transformer_engine.pytorch.Linear")
    True
    >>> is_left_out("megatron.core.transformer.attention.Attention.forward")
    False
    """
    module, _, rest = target.partition(f"{_EXTENSION}.")
    if not module and rest:
        return rest.partition(".")[0] in (*CLASSES.values(), *_BELONGING)
    package, _, name = target.rpartition(".")
    if package.startswith("megatron.") and name in (*CLASSES.values(), *_BELONGING):
        return True  # a module that has imported the class
    return target.partition(".")[0] == "transformer_engine" or target in _CONTEXT


def install(version: str = transformer_engine.VERSION) -> None:
    """Install the alias, and have MindSpeed leave out its own layers of Transformer Engine.

    Raises:
        UnsupportedError: MindSpeed is not installed, or has patched Megatron already; or see
            :func:`fp8core.compat.transformer_engine.install`.
    """
    if _ADAPTOR in sys.modules:
        raise UnsupportedError(
            f"{_ADAPTOR} is imported already, and has patched Megatron. Call "
            f"fp8core.compat.mindspeed.install() before that import."
        )
    transformer_engine.install(version)
    try:
        manager = importlib.import_module(_MANAGER).MindSpeedPatchesManager
    except ModuleNotFoundError as error:
        transformer_engine.uninstall()
        raise UnsupportedError(
            f"MindSpeed cannot be imported ({error}). Without it, Megatron needs only "
            f"fp8core.compat.transformer_engine.install()."
        ) from None
    if not getattr(manager.register_patch, "leaves_out", False):
        manager.register_patch = staticmethod(_filtered(manager.register_patch))


def _filtered(register: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(register)
    def register_patch(orig_func_name: str, *args: Any, **kwargs: Any) -> None:
        if is_left_out(orig_func_name):
            log_once(f"MindSpeed's patch of {orig_func_name} gives way to fp8core", logging.INFO)
            return
        register(orig_func_name, *args, **kwargs)

    register_patch.leaves_out = True  # type: ignore[attr-defined]  # read by install
    return register_patch


def classes() -> dict[str, type]:
    """Return Megatron's class for each of :data:`CLASSES`, which runs on fp8core's layers.

    Raises:
        UnsupportedError: Megatron was imported without the alias, or cannot be.
    """
    try:
        extension = importlib.import_module(_EXTENSION)
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"megatron-core cannot be imported ({error}).") from None
    if not (transformer_engine.is_installed() and extension.HAVE_TE):
        raise UnsupportedError(
            "Megatron does not run on fp8core. Call fp8core.compat.mindspeed.install() before it "
            "is imported."
        )
    return {name: getattr(extension, target) for name, target in CLASSES.items()}
