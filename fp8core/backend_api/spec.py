"""How a plug-in registers a backend, and the version of the contract that it is written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["API_VERSION", "BREAKING_CHANGES", "BackendSpec", "Finding"]

API_VERSION = (4, 1)
"""(major, minor). A backend written for another major, or a newer minor, is not loaded.

The minor rises with a change that an old backend can ignore: a new operation, a new optional
method, a new field with a default. The major rises with every other change.
"""

BREAKING_CHANGES: Mapping[int, str] = {
    2: "quantize and fused operations take nonfinite_out",
    3: "AmaxDesc holds a QuantizeDesc, amax takes group_offsets and quantize takes amax",
    4: "BackendSpec requires api_version, cross_entropy returns largest beside log_sum and its "
    "backward takes both",
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
        selftest: ``"package.module:function"`` that ``fp8core selftest NAME`` calls, or empty. It
            takes nothing, asks the device what no document settles, and yields a :class:`Finding`
            for each question.
        transposes: for compiled graphs alone, which have to know strides before anything is
            computed: its columnwise operands are contiguous, not transposed views.
        api_version: the version it was written for, in numbers, ``(4, 0)``. The constant
            :data:`API_VERSION` would claim whatever version is installed.
        operand_fields: the later fields of :class:`OperandSpec` that it knows: ``row_scaled``,
            ``four_over_six``, ``scale_max``. It is not asked about a spec that uses another one.
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
