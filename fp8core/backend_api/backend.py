"""What a backend class implements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from fp8core.backend_api.descriptors import GemmDesc
from fp8core.backend_api.operations import OpDesc

__all__ = ["Alignment", "Backend", "bind_method"]


class Alignment(NamedTuple):
    """What ``m``, ``n`` and ``k`` of a GEMM must be multiples of, elements. 1 takes any size."""

    m: int = 1
    n: int = 1
    k: int = 1


class Backend(Protocol):
    """What a backend class implements, besides one method an op (see the descriptors).

    The method named ``desc.op`` takes the descriptor first: ``gemm(desc, a, b, *, bias, out)``.

    The conformance kit (``fp8core.testing``) tests what is promised here; a backend whose
    results differ by design says so as :class:`DeclaresNumerics`.
    """

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        """Say why ``desc`` cannot run on ``device``, or None if it can.

        Default deny: a descriptor that is not understood is unsupported. Touches no tensor and
        no device memory. Whoever supports a descriptor supports either half of it.
        """

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Say what the sizes of a supported GEMM must be multiples of."""

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        """Return the callable that runs ``desc``; called once a descriptor, never in the hot path.

        :func:`bind_method` does for a backend that has nothing to prepare. The callable may offer
        more than its call: :mod:`fp8core.backend_api.optional`.
        """


def bind_method(backend: Backend, desc: OpDesc) -> Callable[..., Any]:
    """Return ``backend``'s method for ``desc`` with the descriptor filled in."""
    method: Callable[..., Any] = getattr(backend, desc.op)
    return partial(method, desc)
