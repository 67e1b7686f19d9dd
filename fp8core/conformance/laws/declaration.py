"""Laws 2 and 7: a backend's declarations, which are read without running an operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    Alignment,
    FusedDesc,
    GemmDesc,
    NormBackwardDesc,
    Numerics,
    OpDesc,
    OperandSpec,
    QuantizeDesc,
)
from fp8core.chain.fusion import variants
from fp8core.conformance.catalogue import CatalogueEntry, catalogue
from fp8core.conformance.checks import EVERY_OP, FUSED, law
from fp8core.conformance.compare import Broken, require
from fp8core.conformance.subject import Subject
from fp8core.dispatch.registry import named_kernels
from fp8core.torch_ops.private import TorchDispatchMode

GEMMS = ("gemm", "grouped_gemm")


class _NoTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Breaks law 7 when a tensor operation runs."""

    def __torch_dispatch__(self, func: Any, *rest: Any) -> None:
        raise Broken(f"a declaration called {func}")


def _declared(subject: Subject) -> Iterator[CatalogueEntry]:
    return (entry for entry in catalogue() if subject.refuses(entry.desc) is None)


@law(7)
def something_is_supported(subject: Subject) -> None:
    """At least one descriptor of the catalogue is supported."""
    require(any(_declared(subject)), "the backend supports no descriptor that any layer asks for")


@law(7, is_strict=True)
def every_operation_with_a_method_is_supported(subject: Subject) -> None:
    """A backend with a method named like an operation supports some descriptor of it."""
    some = {entry.desc.op for entry in _declared(subject)}
    idle = [op for op in EVERY_OP if hasattr(subject.backend, op) and op not in some]
    require(not idle, f"has methods for {', '.join(idle)}, but supports no descriptor of them")


@law(7)
def unsupported_touches_no_tensor(subject: Subject) -> None:
    """unsupported() runs no tensor operation, for any descriptor."""
    with _NoTensors():  # type: ignore[no-untyped-call]  # likewise
        for entry in catalogue():
            subject.backend.unsupported(entry.desc, subject.device)


@law(7)
def unsupported_gives_a_reason_or_none(subject: Subject) -> None:
    """unsupported() returns None or a sentence, and the same one twice."""
    for label, desc in catalogue():
        first, again = (subject.backend.unsupported(desc, subject.device) for _ in range(2))
        is_reason = first is None or (isinstance(first, str) and bool(first.strip()))
        require(is_reason, f"{label}: unsupported() returned {first!r}")
        require(first == again, f"{label}: unsupported() said {first!r}, then {again!r}")


@law(7)
def unknown_descriptors_are_denied(subject: Subject) -> None:
    """A descriptor of a later API version is unsupported, and so is an object of another type."""
    later = {type(entry.desc): entry.desc for entry in _declared(subject)}
    for kind, desc in later.items():
        derived = type(f"Later{kind.__name__}", (kind,), {})
        values = {field.name: getattr(desc, field.name) for field in dataclasses.fields(desc)}
        _denied(subject, derived(**values), f"a subclass of {kind.__name__}")
    for nonsense in (object(), None, "gemm"):
        _denied(subject, nonsense, repr(nonsense))


@law(7)
def unknown_values_are_denied(subject: Subject) -> None:
    """A supported descriptor with an unknown format, dtype, name or transform is unsupported."""
    for label, desc in _declared(subject):
        for word, unknown in _unknown(desc):
            _denied(subject, unknown, f"{label} with {word}")


@law(7)
def kernels_are_named_by_texts(subject: Subject) -> None:
    """The kernels that a callable names, to run and not to run, have names that explain shows."""
    for entry in _declared(subject):
        named_kernels(subject.bound(entry.desc), f"{subject.name}: the callable of {entry.desc}")


def _denied(subject: Subject, desc: Any, name: str) -> None:
    reason = subject.backend.unsupported(desc, subject.device)
    require(isinstance(reason, str), f"{name} is said to be supported")


def _unknown(desc: OpDesc) -> Iterator[tuple[str, OpDesc]]:
    """Yield copies of ``desc`` with one unknown value each, and the words that describe it."""
    strange: dict[str, Any] = {
        "dtype": torch.complex64,
        "out_dtype": torch.complex64,
        "name": "no_such_activation",
        "kind": "no_such_norm",
        "algorithm": "no_such_algorithm",
        "layout": "no_such_layout",
        "score_function": "no_such_function",
        "master": "no_such_masters",
        "grad_dtype": torch.complex64,
        "state_dtype": torch.complex64,
        "copy_dtype": torch.complex64,
    }
    for field in dataclasses.fields(desc):
        value = getattr(desc, field.name)
        changes: dict[str, Any] = {}
        if field.name in strange:
            changes[f"{field.name}={strange[field.name]}"] = strange[field.name]
        if field.name == "params":
            changes["one parameter more"] = (*value, 1.0)
        if isinstance(value, OperandSpec):
            changes |= {f"{word} in {field.name}": spec for word, spec in _unknown_specs(value)}
        for word, change in changes.items():
            yield word, dataclasses.replace(desc, **{field.name: change})


def _unknown_specs(spec: OperandSpec) -> Iterator[tuple[str, OperandSpec]]:
    for field, word in (
        ("format", "an unknown format"),
        ("transform", "an unknown transform"),
        ("scale_format", "a scale format of a later version"),
    ):
        yield word, of_a_later_version(spec, **{field: "no_such_name"})


def of_a_later_version(spec: OperandSpec, **changed: str) -> OperandSpec:
    """Return ``spec`` with names that this version of the contract does not know.

    An OperandSpec checks its fields when it is constructed. A later version may know more names
    than this one, and the backend under test will then be asked about them.
    """
    later = object.__new__(OperandSpec)
    for field in dataclasses.fields(spec):
        value = changed.get(field.name, getattr(spec, field.name))
        object.__setattr__(later, field.name, value)  # frozen, and checked by __init__ alone
    return later


@law(7, *GEMMS)
def alignment_is_positive(subject: Subject, desc: GemmDesc) -> None:
    """alignment() gives three positive integers, without touching a tensor."""
    with _NoTensors():  # type: ignore[no-untyped-call]  # likewise
        align = subject.backend.alignment(desc)
    is_right = isinstance(align, Alignment) and all(isinstance(n, int) and n > 0 for n in align)
    require(is_right, f"alignment() returned {align!r}")


@law(7, *EVERY_OP)
def declared_bounds_name_their_source(subject: Subject, desc: OpDesc) -> None:
    """A bound that is not the default comes with its source, and is positive."""
    declared = subject.numerics(desc)
    figures = dataclasses.replace(declared, source="")
    require(figures == Numerics() or bool(declared.source.strip()), f"{declared} names no source")
    values = (
        declared.code_steps,
        declared.scale_ulps,
        declared.sum_error_per_term,
        declared.sum_error,
    )
    require(all(0 <= value < math.inf for value in values), f"{declared} is no bound")
    low, high = declared.amax_range
    require(0 <= low < high, f"{declared} has an empty range of amaxes")


@law(2, "quantize")
def either_half_is_supported(subject: Subject, desc: QuantizeDesc) -> None:
    """Whoever quantizes in both orientations quantizes in either alone."""
    for half in desc.halves():
        if half.rowwise is not None or half.columnwise is not None:
            reason = subject.refuses(half)
            require(reason is None, f"supports {desc}, but not {half}: {reason}")


@law(2, *FUSED)
def either_part_of_a_fusion_is_supported(subject: Subject, desc: FusedDesc) -> None:
    """Whoever fuses a producer with a cast does both alone, and fuses every variant in use."""
    is_gradient = isinstance(desc.producer, NormBackwardDesc | ActivationBackwardDesc)
    cast = dataclasses.replace(desc.quantize, sums=is_gradient)
    used = variants(FusedDesc(desc.producer, cast)).values()
    for part in (desc.producer, dataclasses.replace(cast, sums=False), *used):
        reason = subject.refuses(part)
        require(reason is None, f"supports {desc}, but not {part}: {reason}")
