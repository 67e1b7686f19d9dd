"""The methods of a backend class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from fp8core.backend_api.descriptors import GemmDesc
from fp8core.backend_api.operations import OpDesc

__all__ = ["Alignment", "Backend", "bind_method"]


class Alignment(NamedTuple):
    """``m``, ``n`` and ``k`` of a GEMM must be multiples of these, elements. 1 takes any size."""

    m: int = 1
    n: int = 1
    k: int = 1


class Backend(Protocol):
    """The methods of every backend. It has one more for each operation, named ``desc.op``, which
    takes the descriptor first: ``gemm(desc, a, b, *, bias, out)``.

    The conformance kit (``fp8core.conformance``) tests it. A backend whose results differ by design
    declares that as :class:`~fp8core.backend_api.DeclaresNumerics`.
    """

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        """Return the reason why ``desc`` cannot run on ``device``, or None if it can.

        Default deny: a descriptor that is not understood is unsupported. Touches no tensor and
        no device memory. Whoever supports a descriptor supports either half of it.
        """

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Return the numbers of which the sizes of a supported GEMM must be multiples."""

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        """Return the callable that runs ``desc``; called once for each descriptor.

        :func:`bind_method` is enough for a backend that has nothing to prepare. For speed, the
        callable may have more members: :mod:`fp8core.backend_api.optional`.
        """


def bind_method(backend: Backend, desc: OpDesc) -> Callable[..., Any]:
    """Return ``backend``'s method for ``desc`` with the descriptor filled in."""
    method: Callable[..., Any] = getattr(backend, desc.op)
    return partial(method, desc)
