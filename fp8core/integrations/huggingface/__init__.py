"""Hugging Face's transformers: loading a model for low precision, and checkpoints of its layout.

Each name is imported from its module when it is first asked for, so that importing this package
imports neither ``transformers`` nor ``safetensors``. Asking for :class:`Fp8CoreConfig` registers
the quantization method ``"fp8core"`` with transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fp8core.errors import did_you_mean

if TYPE_CHECKING:
    from fp8core.integrations.huggingface.quantizer import Fp8CoreConfig, Fp8CoreQuantizer
    from fp8core.interchange.checkpoints.reading import load_pretrained
    from fp8core.interchange.checkpoints.writing import save_pretrained

__all__ = ["Fp8CoreConfig", "Fp8CoreQuantizer", "load_pretrained", "save_pretrained"]

_MODULES = {
    # Importing the quantizer registers both with transformers.
    "Fp8CoreConfig": "fp8core.integrations.huggingface.quantizer",
    "Fp8CoreQuantizer": "fp8core.integrations.huggingface.quantizer",
    "load_pretrained": "fp8core.interchange.checkpoints.reading",
    "save_pretrained": "fp8core.interchange.checkpoints.writing",
}


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


if not TYPE_CHECKING:  # to a type checker, it would make every name an attribute

    def __getattr__(name: str) -> object:
        """Import ``name`` from its module.

        Raises:
            AttributeError: the package has no such name; names the nearest.
            ImportError: the framework that it belongs to is not installed.
        """
        if name not in _MODULES:
            near = did_you_mean(name, _MODULES)
            # No `name=`: Python would add a nearest name too.
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{near}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
