"""The contract between fp8core and a backend: plain tensors, small frozen descriptors, few verbs.

Every matrix product in the library has one form, with the contraction last and float32
accumulation::

    d[m, n] = a[m, k] @ b[n, k].T

and every operand ``[rows, k]`` is quantized along the dimension that the product contracts. An
operand is *rowwise* when it is made from ``x [rows, k]`` itself, *columnwise* when it is made from
``x.T``: columnwise(x) has the shape of ``x.T``. Shape is the contract; strides belong to the
backend that made the operand, and a product takes operands of any strides, as another backend may
have made them.

What every operation keeps to: inputs may have any strides and sizes, zero among them, are on the
device that the operation was bound for, and are not written unless the descriptor says so. Results
are new tensors, which share no memory with an input and do not depend on what memory held before.

A backend is described by a :class:`BackendSpec`, registered by a plug-in's
``fp8core_register_backends`` hook, and implements :class:`Backend`. It sees no module, recipe,
autograd graph, process group or global state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import pluggy
import torch

from fp8core.backend_api.descriptors import (
    ACTIVATIONS,
    GATED,
    OPS,
    OPTIONAL_OPS,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    Alignment,
    AmaxDesc,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
    ScaleUpdateDesc,
)
from fp8core.backend_api.operands import (
    GROUP_STEP,
    TRANSFORMS,
    Parts,
    hadamard16,
    scale_inverses,
    split_groups,
)
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.formats import FormatSpec

__all__ = [
    "ACTIVATIONS",
    "API_VERSION",
    "GATED",
    "GROUP_STEP",
    "OPS",
    "OPTIONAL_OPS",
    "TRANSFORMS",
    "ActivationBackwardDesc",
    "ActivationDesc",
    "AddNormDesc",
    "Alignment",
    "AmaxDesc",
    "Backend",
    "BackendSpec",
    "DeclaresNumerics",
    "DequantizeDesc",
    "FormatSpec",
    "FusedDesc",
    "GemmDesc",
    "GroupedGemmDesc",
    "NormBackwardDesc",
    "NormDesc",
    "Numerics",
    "OpDesc",
    "Operand",
    "OperandError",
    "OperandSpec",
    "Parts",
    "QuantizeDesc",
    "Quantized",
    "RecipeError",
    "ScaleUpdateDesc",
    "UnsupportedError",
    "bind_method",
    "hadamard16",
    "hookimpl",
    "scale_inverses",
    "split_groups",
]

API_VERSION = (2, 0)
"""(major, minor). A backend written for another major, or a newer minor, is not loaded.

The minor rises with what an old backend can ignore: a new operation, a new optional method, a new
field with a default. The major rises with everything else.
"""

hookimpl = pluggy.HookimplMarker("fp8core")
"""Marks the functions of a plug-in module that implement a hook of :mod:`fp8core.hookspecs`."""


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

        :func:`bind_method` does for a backend that has nothing to prepare. The callable may carry
        an attribute ``kernel``, a string that names what runs on the device; ``explain`` shows it,
        and without it the callable's own name.
        """


@dataclass(frozen=True, slots=True)
class Numerics:
    """By how much a backend's results may differ; the conformance tests hold it to that.

    Attributes:
        source: where the figures below come from: a manual's section, a measurement. Needed as
            soon as one of them is not the default.
        code_steps: how many representable values of the format a quantized element may be away
            from the reference's. 0: bit for bit.
        scale_ulps: how many units in the last place a scale may be away from the reference's, or
            codes, where scales are bytes. 0: bit for bit.
        sum_error_per_term, sum_error: a product ``d = a @ b.T`` over ``k`` terms is within ``c *
            (|a| @ |b|.T)`` plus 1 ulp of the output of the exact sum, with ``c = sum_error + k *
            sum_error_per_term``. The defaults are those of float32 sums in any order, with four
            more roundings for the scales, wherever they are applied.
    """

    source: str = ""
    code_steps: int = 0
    scale_ulps: int = 0
    sum_error_per_term: float = 2.0**-24
    sum_error: float = 2.0**-22


@runtime_checkable
class DeclaresNumerics(Protocol):
    """A backend that bounds the difference of its results; without this it is ``Numerics()``."""

    def numerics(self, desc: OpDesc, device: torch.device) -> Numerics:
        """Return the bounds that hold for ``desc``, a supported descriptor, on ``device``."""


def bind_method(backend: Backend, desc: OpDesc) -> Callable[..., Any]:
    """Return ``backend``'s method for ``desc`` with the descriptor filled in."""
    method: Callable[..., Any] = getattr(backend, desc.op)
    return partial(method, desc)


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend as its plug-in registers it: cheap, nothing heavy is imported yet.

    Attributes:
        name: what ``FP8CORE_BACKEND`` and ``use_backend`` call it.
        device_types: torch device types it runs natively, the preferred one first.
        factory: ``"package.module:Class"``, imported and called once, on first use.
        probe: returns why the backend cannot be used on this machine, or None; cheap, touches no
            device.
        priority: the highest wins among backends of a device.
        portable: it also runs on any other device type, as an emulation that must be asked for.
        preferred_recipe: what ``get_default_recipe()`` gives when this backend is selected.
        environment: the ``FP8CORE_*`` names that only this backend reads.
        builder: ``"package.module:function"`` that ``fp8core build NAME`` calls, or empty: what the
            backend compiles ahead of time. Takes the architectures as strings, None for those of
            this machine, and the keyword ``output``, a folder or None; returns the path made.
        transposes: its columnwise operands are contiguous, not transposed views; compiled graphs
            have to know strides beforehand.
        api_version: the :data:`API_VERSION` it was written for.
    """

    name: str
    device_types: Sequence[str]
    factory: str
    probe: Callable[[], str | None] = lambda: None
    priority: int = 0
    portable: bool = False
    preferred_recipe: str = "current"
    environment: Sequence[str] = ()
    builder: str = ""
    transposes: bool = False
    api_version: tuple[int, int] = API_VERSION


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
