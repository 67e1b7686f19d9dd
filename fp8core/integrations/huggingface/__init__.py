"""Hugging Face's transformers: loading a model for low precision, and checkpoints of its layout.

Importing this package imports neither ``transformers`` nor ``safetensors``. Asking for
:class:`Fp8CoreConfig` or :class:`Fp8CoreQuantizer` imports both, and registers the quantization
method ``"fp8core"`` with transformers.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING

from fp8core.errors import did_you_mean
from fp8core.interchange.checkpoints import load_pretrained, load_quantized, save_pretrained

if TYPE_CHECKING:
    from fp8core.integrations.huggingface.quantizer import Fp8CoreConfig, Fp8CoreQuantizer

__all__ = [
    "Fp8CoreConfig",
    "Fp8CoreQuantizer",
    "load_pretrained",
    "load_quantized",
    "save_pretrained",
]
__dir__ = partial(sorted, __all__)


if not TYPE_CHECKING:  # to a type checker, it would make every name an attribute

    def __getattr__(name: str) -> object:
        """Return what the quantizer's module has under ``name``.

        Raises:
            AttributeError: the package has no such name; names the nearest.
            ImportError: the framework that it belongs to is not installed.
        """
        if name not in __all__:
            near = did_you_mean(name, __all__)
            # No `name=`: Python would add a nearest name too.
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{near}")
        return getattr(importlib.import_module(f"{__name__}.quantizer"), name)
