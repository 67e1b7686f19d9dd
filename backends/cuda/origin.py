"""The origin of an installed library, in a file beside it: read before the library is loaded.

A library of another CUDA cannot be loaded, so that it cannot be asked itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from fp8core.backend_api import UnsupportedError

NAME = "origin.json"

DISTRIBUTIONS = {"13": "fp8core-cuda", "12": "fp8core-cuda-cu12"}
"""The distribution of the prebuilt library for each major version of CUDA, that of PyPI's torch
first. Two may be installed beside each other: their packages have different names."""


class Origin(NamedTuple):
    """Of a library that there is, or that this process needs.

    Attributes:
        version: of fp8core.
        sources: the hash of its sources.
        architectures: as nvcc spells them.
        cuda: the version of CUDA, as ``13.0``; empty for a torch without CUDA.
    """

    version: str
    sources: str
    architectures: tuple[str, ...]
    cuda: str

    def text(self) -> str:
        """Return the content of the file."""
        return json.dumps(self._asdict()) + "\n"

    def problem(self, needed: Origin) -> str | None:
        """Say why a library of this origin is of no use where ``needed`` is, and what would be."""
        ours, theirs = (origin.cuda.partition(".")[0] for origin in (self, needed))
        instead = f"install {DISTRIBUTIONS.get(theirs, 'fp8core-cuda')}=={needed.version}"
        if theirs and ours != theirs:
            return f"is for CUDA {ours}, torch uses {needed.cuda}: {instead}"
        if self.sources != needed.sources:
            return (
                f"was built from other sources, fp8core {self.version} ({self.sources}); these are "
                f"{needed.version} ({needed.sources}): {instead}"
            )
        if not set(needed.architectures) <= set(self.architectures):
            return (
                f"was built for {' '.join(self.architectures)}, this machine takes "
                f"{' '.join(needed.architectures)}: build it with --arch "
                f"{' '.join(sorted({*self.architectures, *needed.architectures}))}"
            )
        return None


def package(cuda: str) -> str:
    """Return the name of the package that holds the library for CUDA ``cuda``, as ``13.0``.

    Raises:
        UnsupportedError: there is none for it.
    """
    name = DISTRIBUTIONS.get(cuda.partition(".")[0])
    if name is None:
        raise UnsupportedError(
            f"cuda: no prebuilt library for CUDA {cuda}; there is one for CUDA "
            f"{' and '.join(sorted(DISTRIBUTIONS))}."
        )
    return name.replace("-", "_")


def read(folder: Path) -> Origin | None:
    """Return the origin of the library in ``folder``, None if it does not say.

    Raises:
        UnsupportedError: the file there is damaged.
    """
    path = folder / NAME
    try:
        said = json.loads(path.read_text("utf-8"))
        version, sources, cuda = (str(said[name]) for name in ("version", "sources", "cuda"))
        return Origin(version, sources, tuple(map(str, said["architectures"])), cuda)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UnsupportedError(f"has a damaged {NAME} ({error}): install it anew") from None
