"""What a backend may have: variants of calls, names of kernels, recorders, transfers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fp8core
from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    PackedRotaryDesc,
    Recording,
    variant_of,
)
from fp8core.dispatch import table
from fp8core.dispatch.table import UNNAMED, TrackingResolver
from fp8core.errors import PluginError, UnsupportedError
from fp8core.torch_ops import definition
from fp8core.torch_ops.encoding import Operation, encode
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


def kernels_of(desc: OpDesc, **members: Any) -> table.Kernels:
    return table.kernels_of(resolve(desc, **members).choice)


def test_a_callable_names_its_kernels() -> None:
    named = kernels_of(toys.GEMM, kernel="toy::gemm", other_kernels=[("toy::slow", "is slow")])
    assert named == ("toy::gemm", (("toy::slow", "is slow"),))


@pytest.mark.parametrize("given", ["name", [("name",)], [("name", 7)], 7])
def test_other_kernels_that_are_no_pairs_of_texts_are_an_error(given: object) -> None:
    with pytest.raises(PluginError, match=r"expected pairs of texts"):
        kernels_of(toys.GEMM, other_kernels=given)


def test_kernel_that_is_no_text_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"kernel=7; expected a text"):
        kernels_of(toys.GEMM, kernel=7)


def test_member_whose_reading_fails_is_an_error() -> None:
    class Run:
        def __call__(self) -> None: ...

        @property
        def kernel(self) -> str:
            raise LookupError("no driver")

    toys.register(toys.backend("toy", bind=lambda *_: Run()))
    with pytest.raises(PluginError, match=r"names its kernels, but reading them failed: LookupE"):
        table.kernels_of(table.resolve(toys.GEMM, CPU).choice)


VARIANTS = [
    replace(toys.QUANTIZE, sums=True),
    replace(toys.QUANTIZE, chunked=True),
    replace(toys.QUANTIZE, counted=True),
    FusedDesc(
        ActivationBackwardDesc("gelu", torch.bfloat16, torch.bfloat16),
        replace(toys.QUANTIZE, chunked=True),
    ),
    NormBackwardDesc(NormDesc("rmsnorm", torch.float32, torch.float32, 1e-5), added=True),
    replace(toys.GEMM, part=True),
    replace(toys.SCALE_UPDATE, prepared=True),
    FusedDesc(
        ActivationBackwardDesc("swiglu", torch.bfloat16, torch.bfloat16),
        replace(toys.QUANTIZE, split=True),
    ),
    PackedRotaryDesc(torch.bfloat16, "bshd"),
]


@pytest.mark.parametrize("desc", VARIANTS, ids=str)
def test_a_variant_is_bound_where_its_backend_and_a_graph_that_is_captured_have_it(
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
        captured = table.resolve_optional(desc, CPU, "toy")
    assert (captured is not None) == (variant_of(desc) in ("added", "split", "packed"))
    with FakeTensorMode():  # what calls write, as the amax of a half, is no tensor of a graph
        assert table.resolve_optional(desc, CPU, "toy") is None


@pytest.mark.parametrize("has_variants", [True, False])
@pytest.mark.parametrize("groups", [(), (torch.tensor([0, 3, 3, 6]),)], ids=["dense", "groups"])
def test_nan_and_inf_are_counted_with_a_cast_or_before_it(
    groups: tuple[torch.Tensor, ...], has_variants: bool
) -> None:
    toys.register(toys.backend("toy", has_variants=has_variants))
    fields = {"grouped": bool(groups), "offsets_on_device": bool(groups)}
    desc = replace(toys.QUANTIZE, **fields, counted=True)
    x = torch.randn(8, 16).to(desc.dtype)
    x[2, :3], x[5, 0], x[7] = torch.nan, torch.inf, -torch.inf  # the last row is of no group
    plain, resolved = (table.resolve(each, CPU) for each in (replace(desc, counted=False), desc))
    assert plain.choice == resolved.choice
    count = torch.tensor([2**40])
    quantized = resolved.run(x, *groups, nonfinite_out=count)
    assert int(count) == 2**40 + (4 if groups else 4 + 16)
    expected = plain.run(x, *groups)
    assert torch.equal(quantized.rowwise.data, expected.rowwise.data)
    assert torch.equal(resolved.run(x, *groups).rowwise.data, expected.rowwise.data)


def test_fake_tensors_reach_no_backend() -> None:
    """They have no memory that a kernel could read; the operators in graphs know their shapes."""
    calls: list[str] = []
    toys.register(toys.backend("toy", calls=calls))
    x = torch.randn(8, 16).to(toys.QUANTIZE.dtype)
    real = table.resolve(toys.QUANTIZE, CPU, backend="toy").run
    with FakeTensorMode() as mode:
        fake = table.resolve(toys.QUANTIZE, CPU, backend="toy").run(mode.from_tensor(x))
    assert type(fake.rowwise.data) is FakeTensor
    assert not calls
    assert table.resolve(toys.QUANTIZE, CPU, backend="toy").run is real
    assert real(x).rowwise.data.shape == fake.rowwise.data.shape
    assert calls == ["quantize"]


@pytest.mark.parametrize("has_variants", [True, False])
def test_a_fusion_is_in_a_graph_if_it_counts(has_variants: bool) -> None:
    toys.register(toys.backend("toy", bind=lambda *_: max, has_variants=has_variants))
    desc = FusedDesc(ActivationDesc("gelu", torch.bfloat16, torch.bfloat16), toys.QUANTIZE)
    assert table.resolve_optional(desc, CPU, "toy") is not None
    with table.capturing():
        assert (table.resolve_optional(desc, CPU, "toy") is not None) == has_variants
    encoded = Operation("toy", desc)
    if has_variants:
        assert definition.bound(encode(encoded), CPU) is max
        return
    with pytest.raises(UnsupportedError, match=r"counted.* for toy on cpu: no counted"):
        definition.bound(encode(encoded), CPU)


class Recorder:
    def record(self, run: Any, leading: Any, saved: Any = (), constants: Any = ()) -> Recording: ...


def recording(monkeypatch: pytest.MonkeyPatch, recorder: Any) -> table.Resolved:
    """Resolve a GEMM of a toy backend whose ``recorder`` answers by this function."""
    monkeypatch.setattr(
        toys.ToyBackend, "recorder", lambda self, desc, device: recorder(), raising=False
    )
    return resolve(toys.GEMM)


def test_the_recorder_of_a_backend_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Recorder()
    assert recording(monkeypatch, lambda: one).recorder is one


def test_a_backend_may_record_nothing_of_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recording(monkeypatch, lambda: None).recorder is None


def test_a_recorder_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match=r"recorder\(desc, device\) failed: IndexError"):
        recording(monkeypatch, lambda: [][0])


class Copies:
    """What moves rows between ranks, and does nothing."""

    def takes(self, num_bytes: int) -> bool:
        return True

    def gather(self, x: Any) -> Any: ...

    def scatter(self, size: Any, dtype: Any) -> Any: ...


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


def test_transfers_that_fail_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match=r"transfers\(ranks, device\), which failed: IndexError"):
        transfers(monkeypatch, lambda: [][0])


class Answers:
    """Resolves to operations with the recorders of a list, one after the other."""

    def __init__(self, recorders: list[Any]) -> None:
        self.recorders = iter(recorders)

    def resolve(self, *asked: object) -> Any:
        return SimpleNamespace(recorder=next(self.recorders))

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
