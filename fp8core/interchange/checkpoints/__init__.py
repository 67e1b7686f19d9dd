"""Checkpoints that other libraries read and write."""

from __future__ import annotations

from functools import partial

from fp8core.interchange.checkpoints.reading import Loaded, load_pretrained, load_quantized
from fp8core.interchange.checkpoints.transformer_engine import transformer_engine_state_dict
from fp8core.interchange.checkpoints.writing import Saved, save_pretrained

__all__ = [
    "Loaded",
    "Saved",
    "load_pretrained",
    "load_quantized",
    "save_pretrained",
    "transformer_engine_state_dict",
]
__dir__ = partial(sorted, __all__)
