"""States as Transformer Engine pickles them, by stand-ins for its recipe classes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch

RECIPES = "transformer_engine.common.recipe"
NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E2M1 = _FormatHelper(6, 6)
    E4M3 = _FormatHelper(448, 448)
    E5M2 = _FormatHelper(57344, 57344)
    HYBRID = _FormatHelper(448, 57344)


class DelayedScaling:
    """Has the fields of Transformer Engine 2.20's as attributes."""

    def __init__(self, **fields: Any) -> None:
        self.margin = 0
        self.fp8_format = Format.HYBRID
        self.amax_history_len = 1024
        self.amax_compute_algo = "max"
        self.scaling_factor_compute_algo = None
        self.reduce_amax = True
        self.fp8_dpa = self.fp8_mha = False
        self.backward_override = None
        vars(self).update(fields)


class MXFP8BlockScaling:
    pass


class UserRecipe:
    pass


for _kind in (_FormatHelper, Format, DelayedScaling, MXFP8BlockScaling):
    _kind.__module__, _kind.__qualname__ = RECIPES, _kind.__name__
UserRecipe.__module__, UserRecipe.__qualname__ = "their.code", "UserRecipe"


@contextmanager
def importable() -> Iterator[None]:
    """Let pickle find the stand-ins under Transformer Engine's name."""
    before = dict(sys.modules)
    for name in ("transformer_engine", "transformer_engine.common", RECIPES, "their", "their.code"):
        sys.modules[name] = ModuleType(name)
    for kind in (_FormatHelper, Format, DelayedScaling, MXFP8BlockScaling):
        setattr(sys.modules[RECIPES], kind.__name__, kind)
    sys.modules["their.code"].UserRecipe = UserRecipe
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def buffers(gemms: int = 1, length: int = 4) -> dict[str, torch.Tensor]:
    """Return the tensors of a module with ``gemms`` GEMMs."""
    generator = torch.Generator().manual_seed(gemms)

    def random(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    values = (random(3 * gemms), random(length, 3 * gemms), random(2 * gemms))
    return dict(zip(NAMES, (*values, random(length, 2 * gemms)), strict=True))


def content(recipe: Any = None, **tensors: torch.Tensor) -> dict[str, Any]:
    """Return what get_extra_state of a module pickles."""
    extra = {"fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448, "fp8_max_bwd": 57344}
    given = {} if recipe is None else {"recipe": recipe}
    return {**given, **(tensors or buffers()), "extra_fp8_variables": extra}


def pickled(value: Any, protocol: int = 4) -> bytes:
    with importable():
        return pickle.dumps(value, protocol)


def unpickled(data: bytes) -> Any:
    """Read bytes that the library wrote, as Transformer Engine does."""
    with importable():
        return pickle.loads(data)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
