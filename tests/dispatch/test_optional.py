"""What a callable offers besides its call: found and checked when the operation is bound."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8core
from fp8core.backend_api import (
    ActivationBackwardDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    Recording,
)
from fp8core.dispatch import table
from fp8core.dispatch.optional import Offers
from fp8core.dispatch.table import UNNAMED, TrackingResolver
from fp8core.errors import PluginError
from tests.dispatch import toys
from tests.dispatch.toys import CPU


def resolve(desc: OpDesc, **members: Any) -> table.Resolved:
    """Resolve ``desc`` on a toy backend whose callable has these members."""

    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            raise AssertionError("nothing is to be computed")

        for name, member in members.items():
            setattr(run, name, member)
        return run

    toys.register(toys.backend("toy", bind=bind))
    return table.resolve(desc, CPU)


def pairs(other: Any) -> Callable[..., Any]:
    def pair(x: Any, other: Any, **given: Any) -> None: ...

    return pair


def update(histories: Any, scales: Any, targets: Any, nonfinite: Any = ()) -> None: ...


def test_member_that_fits_is_offered() -> None:
    for desc, name, member in (
        (toys.QUANTIZE, "bind_pair", pairs),
        (toys.SCALE_UPDATE, "prepare", update),
        (toys.GEMM, "kernel", "toy::gemm"),
    ):
        with toys.isolation():
            offers = resolve(desc, **{name: member}).offers
        assert offers == Offers(**{name: member}), (desc, name)


@pytest.mark.parametrize(
    ("desc", "name", "member", "expected", "found"),
    [
        (toys.QUANTIZE, "bind_pair", lambda: None, "bind_pair(other)", "bind_pair()"),
        (toys.QUANTIZE, "bind_pair", 3, "bind_pair(other)", "3"),
        (
            toys.SCALE_UPDATE,
            "prepare",
            lambda histories, scales: None,
            "prepare(histories, scales, targets, nonfinite)",
            "prepare(histories, scales)",
        ),
    ],
)
def test_method_that_cannot_be_called_prints_both_sides(
    desc: OpDesc, name: str, member: Any, expected: str, found: str
) -> None:
    with pytest.raises(PluginError) as raised:
        resolve(desc, **{name: member})
    text = str(raised.value)
    assert text.startswith(f"toy says that it runs {desc}, but its bind() returned")
    assert f"\n  expected {expected}\n  found    {found}" in text


@pytest.mark.parametrize("given", ["name", [("name",)], [("name", 7)], 7])
def test_other_kernels_that_are_no_pairs_of_texts_are_an_error(given: object) -> None:
    with pytest.raises(PluginError, match=r"expected pairs of texts.*NamesOtherKernels"):
        resolve(toys.GEMM, other_kernels=given)


def test_kernel_that_is_no_text_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"kernel=7; expected a text.*NamesKernel"):
        resolve(toys.GEMM, kernel=7)


def test_member_whose_reading_fails_is_an_error() -> None:
    class Run:
        def __call__(self) -> None: ...

        @property
        def kernel(self) -> str:
            raise LookupError("no driver")

    toys.register(toys.backend("toy", bind=lambda *_: Run()))
    with pytest.raises(PluginError, match=r"member 'kernel', but reading it failed: LookupError"):
        table.resolve(toys.GEMM, CPU)


class Silent:
    def __repr__(self) -> str:
        raise LookupError("no driver")


class Refusing(inspect.Signature):
    """A signature of the plug-in's own class, with code that fails."""

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        raise LookupError("no driver")


SILENT = Silent()


def with_a_default(other: Any, stream: Any, queue: Any = SILENT) -> None: ...


def with_a_signature(stream: Any) -> None: ...


with_a_signature.__signature__ = Refusing()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("member", "found"),
    [
        (with_a_default, "bind_pair(other, stream, queue=an object of class Silent)"),
        (with_a_signature, "bind_pair()"),
    ],
    ids=["repr of a default", "class of a signature"],
)
def test_misfit_is_named_without_the_plug_in_s_code(member: Any, found: str) -> None:
    with pytest.raises(PluginError, match=r"QuantizesPairs") as raised:
        resolve(toys.QUANTIZE, bind_pair=member)
    assert f"\n  found    {found}" in str(raised.value)


def test_callable_without_a_readable_signature_is_taken() -> None:
    # A compiled extension's callables look like this one: inspect.signature() raises ValueError.
    assert resolve(toys.QUANTIZE, bind_pair=max).offers.bind_pair is max


@pytest.mark.parametrize(
    "desc", [toys.GEMM, replace(toys.QUANTIZE, grouped=True), toys.QUANTIZE.halves()[0]], ids=str
)
def test_other_descriptors_are_not_asked_for_the_methods_of_a_dense_cast(desc: OpDesc) -> None:
    assert resolve(desc, bind_pair=3).offers == Offers()


def test_none_is_no_offer() -> None:
    assert resolve(toys.QUANTIZE, bind_pair=None).offers == Offers()


def test_operator_of_a_captured_graph_offers_nothing() -> None:
    resolve(toys.QUANTIZE, bind_pair=pairs)
    with table.capturing():
        assert table.resolve(toys.QUANTIZE, CPU).offers == Offers()


VARIANTS = [
    replace(toys.QUANTIZE, sums=True),
    replace(toys.QUANTIZE, chunked=True),
    FusedDesc(
        ActivationBackwardDesc("gelu", torch.bfloat16, torch.bfloat16),
        replace(toys.QUANTIZE, chunked=True),
    ),
    NormBackwardDesc(NormDesc("rmsnorm", torch.float32, torch.float32, 1e-5), added=True),
    replace(toys.GEMM, part=True),
]


@pytest.mark.parametrize("desc", VARIANTS, ids=str)
def test_a_variant_is_bound_where_its_backend_has_it_and_no_graph_is_captured(
    desc: OpDesc,
) -> None:
    toys.register(
        toys.backend("toy", bind=lambda *_: max, has_variants=True),
        toys.backend("plain", bind=lambda *_: max),
    )
    resolved = table.resolve_optional(desc, CPU, "toy")
    assert resolved is not None
    assert resolved.run is max
    assert table.resolve_optional(desc, CPU, "plain") is None
    with table.capturing():
        assert table.resolve_optional(desc, CPU, "toy") is None


def test_pair_is_what_the_method_returns() -> None:
    def pair(x: Any, other: Any, *, nonfinite_out: Any) -> None: ...

    one = resolve(toys.QUANTIZE, bind_pair=lambda other: pair)
    assert one.pair_with(one) is pair


@pytest.mark.parametrize("members", [{}, {"bind_pair": lambda _: None}], ids=["none", "declined"])
def test_there_may_be_no_pair(members: dict[str, Any]) -> None:
    one = resolve(toys.QUANTIZE, **members)
    assert one.pair_with(one) is None


def test_pair_that_cannot_be_called_prints_both_sides() -> None:
    one = resolve(toys.QUANTIZE, bind_pair=lambda other: lambda x: None)
    with pytest.raises(PluginError, match=r"PairCast") as raised:
        one.pair_with(one)
    assert "(x, other, *, nonfinite_out)\n  found    bind_pair(other)(x)" in str(raised.value)


def test_pair_whose_making_fails_says_so() -> None:
    def fail(other: Any) -> None:
        raise LookupError("no such launch")

    one = resolve(toys.QUANTIZE, bind_pair=fail)
    with pytest.raises(PluginError, match=r"bind_pair\(other\), which failed: LookupError: no"):
        one.pair_with(one)


class Recorder:
    def record(self, run: Any, leading: Any, saved: Any = (), constants: Any = ()) -> Recording: ...


class Narrow:
    def record(self, run: Any) -> Recording: ...


def recording(monkeypatch: pytest.MonkeyPatch, recorder: Any) -> table.Resolved:
    """Resolve a GEMM of a toy backend whose ``recorder`` answers by this function."""
    monkeypatch.setattr(
        toys.ToyBackend, "recorder", lambda self, desc, device: recorder(), raising=False
    )
    return resolve(toys.GEMM)


def test_the_recorder_of_a_backend_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Recorder()
    assert recording(monkeypatch, lambda: one).offers == Offers(recorder=one)


def test_a_backend_may_record_nothing_of_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recording(monkeypatch, lambda: None).offers == Offers()


class TakesNothing(Recorder):
    def call(self) -> None: ...


@pytest.mark.parametrize(
    ("recorder", "text"),
    [
        (TakesNothing, r"RecordsFunctions:\n  expected call\(function, tensor, tensor\)"),
        (
            Narrow,
            r"Recorder:\n  expected record\(run, leading, saved, constants\)\n  found    record",
        ),
        (object, r"Recorder:\n  expected record"),
        (lambda: [][0], r"recorder\(desc, device\), which failed: IndexError"),
    ],
    ids=["call takes nothing", "other parameters", "no method", "raises"],
)
def test_a_recorder_that_cannot_record_is_an_error(
    recorder: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PluginError, match=text):
        recording(monkeypatch, recorder)


class Copies:
    """What moves rows between ranks, and does nothing."""

    def takes(self, num_bytes: int) -> bool:
        return True

    def gather(self, x: Any) -> Any: ...

    def scatter(self, size: Any, dtype: Any) -> Any: ...


class OneWay:
    takes = gather = Copies.takes


def transfers(monkeypatch: pytest.MonkeyPatch, offered: Callable[[], Any]) -> Any:
    """What moves rows by a toy backend whose ``transfers`` answers by this function."""
    monkeypatch.setattr(
        toys.ToyBackend, "transfers", lambda self, ranks, device: offered(), raising=False
    )
    toys.register(toys.backend("toy"))
    return moved_by()


def moved_by() -> Any:
    return table.transfers(SimpleNamespace(size=2, rank=0, group_name="g"), CPU, torch.bfloat16)


def test_what_moves_rows_is_that_of_the_backend_which_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Copies()
    assert transfers(monkeypatch, lambda: one) is one
    with fp8core.use_backend("reference"):
        assert moved_by() is None


def test_a_backend_may_move_nothing_between_some_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transfers(monkeypatch, lambda: None) is None


def test_a_graph_holds_collectives_of_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with table.capturing():
        assert transfers(monkeypatch, Copies) is None


@pytest.mark.parametrize(
    ("offered", "text"),
    [
        (OneWay, r"expected gather\(x\)\n  found    gather\(num_bytes\)|expected scatter"),
        (lambda: [][0], r"toy has transfers\(ranks, device\), which failed: IndexError"),
    ],
    ids=["no scatter", "raises"],
)
def test_transfers_that_cannot_move_rows_are_an_error(
    offered: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PluginError, match=text):
        transfers(monkeypatch, offered)


class Answers:
    """Resolves to operations with the recorders of a list, one after the other."""

    def __init__(self, recorders: list[Any]) -> None:
        self.recorders = iter(recorders)

    def resolve(self, *asked: object) -> Any:
        return SimpleNamespace(offers=Offers(recorder=next(self.recorders)))

    resolve_optional = resolve


@pytest.mark.parametrize(
    ("recorders", "is_common"),
    [([0, 0], True), ([0, 1], False), ([0, None], False), ([None, 0], False)],
    ids=["the same", "two", "one has none", "the first has none"],
)
def test_operations_of_one_recorder_are_recorded_in_one_run(
    recorders: list[int | None], is_common: bool
) -> None:
    two = (Recorder(), Recorder())
    given = [None if at is None else two[at] for at in recorders]
    noting = TrackingResolver(Answers(given))
    noting.resolve(toys.GEMM, CPU, UNNAMED)
    noting.resolve_optional(toys.GEMM, CPU, "toy", UNNAMED)
    assert noting.recorder is (two[0] if is_common else None)


def test_without_operations_there_is_no_recorder() -> None:
    assert TrackingResolver(Answers([])).recorder is None
