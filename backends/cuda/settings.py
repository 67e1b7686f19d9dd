"""The environment variables that this backend reads, and the folder that it keeps files in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fp8core.backend_api import RecipeError


@dataclass(frozen=True, slots=True)
class Settings:
    """``autotune``: time cuBLASLt's algorithms once a shape; ``builds``: compile on first use;
    ``transfers``: copy rows between ranks beside products, None where ranks are known to be on one
    host."""

    autotune: bool
    builds: bool
    cache_dir: Path
    transfers: bool | None = None


def read() -> Settings:
    """Read ``FP8CORE_AUTOTUNE`` (1), ``FP8CORE_BUILD`` (1), ``FP8CORE_CACHE_DIR`` and
    ``FP8CORE_TRANSFERS`` (None).

    Raises:
        RecipeError: a flag is neither 0 nor 1, or the user has no home folder and names no other.
    """
    transfers = _flag("FP8CORE_TRANSFERS") if os.environ.get("FP8CORE_TRANSFERS") else None
    return Settings(autotunes(), _flag("FP8CORE_BUILD"), _cache_dir(), transfers)


def autotunes() -> bool:
    """Read ``FP8CORE_AUTOTUNE`` alone, which costs less; raises as :func:`read`."""
    return _flag("FP8CORE_AUTOTUNE")


def toolkits() -> list[Path]:
    """Return the folders of CUDA that ``CUDA_HOME`` and ``CUDA_PATH`` name."""
    named = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    return [Path(folder) for folder in named if folder]


def _flag(name: str) -> bool:
    value = os.environ.get(name, "") or "1"
    if value not in ("0", "1"):
        raise RecipeError(f"{name}={value!r}: expected 0 or 1.")
    return value == "1"


def _cache_dir() -> Path:
    named = os.environ.get("FP8CORE_CACHE_DIR")
    try:
        if named:
            return Path(named).expanduser().absolute()
        # XDG Base Directory Specification, section 3: a relative path is to be ignored
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "fp8core"
    except RuntimeError as error:
        raise RecipeError(
            f"FP8CORE_CACHE_DIR={named or ''}: {error} Name the folder by an absolute path."
        ) from None
