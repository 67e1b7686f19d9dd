"""The operations by name, and how a plug-in registers a backend that computes them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from fp8core.backend_api import attention, layers, training  # noqa: F401  they record operations
from fp8core.backend_api.amax import QuantizeByAmaxDesc
from fp8core.backend_api.descriptors import GemmDesc
from fp8core.backend_api.layers import FusedDesc
from fp8core.backend_api.record import RECORDS

if TYPE_CHECKING:

    class OpDesc(Protocol):
        """A descriptor: a frozen dataclass that says which operation is to be computed."""

        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __hash__(self) -> int: ...

        @property
        def op(self) -> str:
            """The operation's name."""

        @property
        def low_precision(self) -> bool:
            """Whether the operation quantizes, or reads what is quantized."""

else:
    # A class that extends another operation's is one of that already. QuantizeByAmaxDesc extends
    # the call, too.
    _DESCS = dict.fromkeys(record.desc for record in RECORDS.values())
    _ROOTS = [desc for desc in _DESCS if _DESCS.keys().isdisjoint(desc.__mro__[1:])]
    OpDesc = functools.reduce(operator.or_, _ROOTS, QuantizeByAmaxDesc)

OPS: tuple[str, ...] = tuple(sorted(op for op, record in RECORDS.items() if not record.is_optional))
"""Names of the operations every backend's devices need, as ``FP8CORE_OP_BACKEND`` spells them."""

OPTIONAL_OPS: tuple[str, ...] = tuple(sorted(RECORDS.keys() - set(OPS)))
"""Fusions that a backend may offer; without them the pair runs."""


def variant_of(desc: OpDesc) -> str | None:
    """Return the field by which ``desc`` asks for more than its operation's call gives, None if it
    asks for the call alone.

    Variants are optional: a backend denies what it does not have, and the caller composes it. A
    graph has those of ``GRAPH_VARIANTS``.

    >>> from fp8core.backend_api import OperandSpec, QuantizeDesc
    >>> spec = OperandSpec("e4m3", (0, 0), 448.0)
    >>> variant_of(QuantizeDesc(torch.bfloat16, spec, None, sums=True))
    'sums'
    """
    if isinstance(desc, FusedDesc):
        desc = replace(desc.quantize, sums=False)
    return next((name for name in _VARIANTS if getattr(desc, name, False)), None)


_VARIANTS = (
    *("added", "chunked", "part", "prepared", "sums", "padded", "split", "packed"),
    "counted",
)

GRAPH_VARIANTS = frozenset(("added", "split", "packed"))
"""The variants that the operators of graphs have: with tensors alone, of which none is written but
amaxes and counts."""


class Alignment(NamedTuple):
    """``m``, ``n`` and ``k`` of a GEMM must be multiples of these, elements. 1 takes any size."""

    m: int = 1
    n: int = 1
    k: int = 1


class Backend(Protocol):
    """The methods of every backend, which has one more for each operation, named ``desc.op``, with
    the descriptor first: ``gemm(desc, a, b, *, bias, out)``.

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
        amax_range: the largest magnitudes of a block, both ends included, for which the two bounds
            above hold. Codes and scales of other blocks are the device's: those of tiny values and
            of inf. A block of zeros gives zeros in any case. NaN is in the default range alone.
        sum_error_per_term, sum_error: a product ``d = a @ b.T`` over ``k`` terms is within ``c *
            (|a| @ |b|.T)`` plus 1 ulp of the output of the exact sum, with ``c = sum_error + k *
            sum_error_per_term``. The defaults are those of float32 sums in any order, with four
            more roundings for the scales, wherever they are applied.
    """

    source: str = ""
    code_steps: int = 0
    scale_ulps: int = 0
    amax_range: tuple[float, float] = (0.0, math.inf)
    sum_error_per_term: float = 2.0**-24
    sum_error: float = 2.0**-22


@runtime_checkable
class DeclaresNumerics(Protocol):
    """A backend that bounds the difference of its results; without this it is ``Numerics()``."""

    def numerics(self, desc: OpDesc, device: torch.device) -> Numerics:
        """Return the bounds that hold for ``desc``, a supported descriptor, on ``device``."""


API_VERSION = (6, 5)
"""(major, minor). A backend written for another major, or a newer minor, is not loaded.

The minor rises with a change that an old backend can ignore: a new operation, a new optional
method, a new field with a default. The major rises with every other change.
"""

BREAKING_CHANGES: Mapping[int, str] = {
    2: "quantize and fused operations take nonfinite_out",
    3: "AmaxDesc holds a QuantizeDesc, amax takes group_offsets and quantize takes amax",
    4: "BackendSpec requires api_version, cross_entropy returns largest beside log_sum and its "
    "backward takes both",
    5: "sgd is no operation of backends, and SgdDesc is gone",
    6: "QuantizeDesc may ask for sums and chunks, also of FusedDesc, NormBackwardDesc for another "
    "gradient to be added, GemmDesc for parts and ScaleUpdateDesc for an update that is prepared; "
    "of members beside a call, there are the names of kernels alone; a Recorder has call, "
    "Transfers have maximum",
}
"""What each major version changed that a backend of an older one does not know."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend as its plug-in registers it, before its code is imported.

    The first three fields and ``api_version`` are all that a first backend needs.

    Attributes:
        name: the name for ``FP8CORE_BACKEND`` and ``use_backend``.
        device_types: torch device types it runs natively, the preferred one first.
        factory: ``"package.module:Class"``, imported and called once, on first use.
        probe: returns why the backend cannot be used on this machine, or None; cheap, touches no
            device.
        priority: the highest wins among backends of a device.
        portable: it also runs on any other device type, as an emulation that must be asked for.
        preferred_recipe: the recipe of ``get_default_recipe()`` when this backend is selected.
        environment: the ``FP8CORE_*`` names that only this backend reads.
        builder: ``"package.module:function"`` that ``fp8core build NAME`` calls, or empty. It
            compiles ahead of time, takes the architectures as strings, None for those of this
            machine, and the keyword ``output``, a folder or None, and returns the path written.
        selftest: ``"package.module:function"`` that ``fp8core selftest NAME`` calls, or empty:
            a function without arguments that asks the device what no document settles, and yields
            a :class:`Finding` for each question.
        transposes: for compiled graphs alone, which have to know strides before anything is
            computed: its columnwise operands are contiguous, not transposed views.
        api_version: the version it was written for, in numbers, ``(4, 0)``. The constant
            :data:`API_VERSION` would claim whatever version is installed.
        operand_fields: the later fields of :class:`OperandSpec` that it knows: ``row_scaled``,
            ``four_over_six``, ``scale_max``. A spec that uses another field is not passed to it.
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
    selftest: str = ""
    api_version: tuple[int, int] = field(kw_only=True)
    operand_fields: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A question of a backend's ``selftest``, answered by a device.

    Attributes:
        name: the question, in a few words.
        assumption: what the backend and its documentation assume.
        holds: whether the device does that.
        answer: what it does.
    """

    name: str
    assumption: str
    holds: bool
    answer: str
