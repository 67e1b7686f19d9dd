"""Amaxes apart from their cast, and casts by given ones: against the reference, bit for bit.

On the device the native kernels run. Without one, the reference stands in for each kernel and reads
the workspace as the kernel does: what is then tested is how amaxes are laid out for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    AmaxDesc,
    OpDesc,
    Operand,
    OperandSpec,
    QuantizeByAmaxDesc,
    Quantized,
    QuantizeDesc,
    amax_extent,
)
from fp8core_backends.cuda import amax as seam
from fp8core_backends.reference.backend import ReferenceBackend
from tests.backends.cuda.cuda_cases import DEVICE, backend, spec

BF16, CPU = torch.bfloat16, torch.device("cpu")
PAIRS: dict[str, tuple[OperandSpec | None, OperandSpec | None]] = {
    "tensor": (spec("current"), spec("current")),
    "tensor hybrid": (spec("current"), spec("current", "e5m2")),
    "tensor rowwise": (spec("current"), None),
    "tensor columnwise": (None, spec("current")),
    "rows": (spec("rowwise"), spec("rowwise")),
    "rows hybrid": (spec("rowwise"), spec("rowwise", "e5m2")),
    "rows alone": (spec("rowwise"), None),
    "columns alone": (None, spec("rowwise")),
    "tensor and columns": (spec("current"), spec("rowwise")),
    "rows and blocks": (spec("rowwise"), spec("vector")),
    "blocks and tensor": (spec("square"), spec("current")),
}
GROUPS = (0, 3, 3, 36, 37)
SHAPES = ((70, 40), (1, 128), (130, 264), (256, 8))
EMPTY = ((0, 16), (16, 0), (0, 0))
Bind = Callable[[OpDesc], Callable[..., Any]]


def reference(desc: OpDesc) -> Callable[..., Any]:
    return ReferenceBackend().bind(desc, CPU)


class KernelAmax:
    """The amax kernels: of the tensor, or of all rows and columns."""

    def __init__(self, extent: str, dtype: torch.dtype, index: int, native: Any) -> None:
        one = spec("current" if extent == "tensor" else "rowwise")
        self._desc = QuantizeDesc(dtype, one, one)
        self._is_of_rows = extent == "row"

    def __call__(self, x: torch.Tensor, *groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
        desc = dataclasses.replace(self._desc, grouped=bool(groups), offsets_on_device=bool(groups))
        made = reference(AmaxDesc(desc))(x, *groups)
        return (made[: len(x)], made[len(x) :], made) if self._is_of_rows else (made,) * 3


def kernel_cast(desc: QuantizeDesc, device: torch.device, native: Any) -> Callable[..., Quantized]:
    """The cast kernels of one spec, whose workspace has rows before columns, wanted or not."""

    def run(
        x: torch.Tensor,
        *groups: torch.Tensor,
        amax: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        if amax is None:
            made: Quantized = reference(desc)(x, *groups, nonfinite_out=nonfinite_out)
            return made
        assert groups or x.numel(), "a kernel that is not launched writes no scales"
        assert amax.is_contiguous()
        rows, cols = x.shape
        count = len(groups[0]) - 1 if groups else 1
        entries = amax[:count]
        if amax_extent(desc.rowwise or desc.columnwise) == "row":
            of_rows, of_columns = amax[:rows], amax[rows : rows + count * cols]
            entries = of_rows if desc.columnwise is None else of_columns
            if desc.rowwise is not None and desc.columnwise is not None:
                entries = torch.cat((of_rows, of_columns))
        by_amax = reference(QuantizeByAmaxDesc.of(desc))
        made = by_amax(x, *groups, amax=entries, nonfinite_out=nonfinite_out)
        return made

    run.kernel = "of the reference"  # type: ignore[attr-defined]
    return run


@pytest.fixture
def on_kernels_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> Bind:
    monkeypatch.setattr(seam, "_Amax", KernelAmax)
    monkeypatch.setattr(seam, "bind_quantize", kernel_cast)

    def bind(desc: OpDesc) -> Callable[..., Any]:
        make: Any = seam.bind_amax if isinstance(desc, AmaxDesc) else seam.bind_quantize_by_amax
        run: Callable[..., Any] = make(desc, DEVICE, None)
        return run

    return bind


@pytest.fixture
def on_the_device() -> Bind:
    def bind(desc: OpDesc) -> Callable[..., Any]:
        run = backend("cuda").bind(desc, DEVICE)

        def there(*arguments: torch.Tensor, **keywords: torch.Tensor) -> Any:
            is_list = isinstance(desc, AmaxDesc | QuantizeDesc) and not _reads_offsets(desc)
            moved = [
                own if is_list and own.dtype == torch.int64 else own.to(DEVICE) for own in arguments
            ]
            return run(*moved, **{name: own.to(DEVICE) for name, own in keywords.items()})

        return there

    return bind


def _reads_offsets(desc: AmaxDesc | QuantizeDesc) -> bool:
    cast = desc.quantize if isinstance(desc, AmaxDesc) else desc
    return cast.offsets_on_device


each_runner = pytest.mark.parametrize(
    "runner",
    [
        "on_kernels_of_the_reference",
        pytest.param("on_the_device", marks=pytest.mark.needs_accelerator("cuda")),
    ],
)
GROUPED = (None, False, True)
"""One tensor, groups at offsets that are a list, and at offsets on the device."""


def cast_of(pair: str, on_device: bool | None) -> QuantizeDesc:
    return QuantizeDesc(BF16, *PAIRS[pair], on_device is not None, bool(on_device))


def inputs(shape: tuple[int, int], on_device: bool | None) -> tuple[torch.Tensor, ...]:
    x = (torch.randn(shape) * torch.rand(shape[0], 1).exp()).to(BF16)
    if x.numel() > 100:
        x.view(-1)[::97] = torch.nan
    if on_device is None:
        return (x,)
    ends = torch.tensor([*GROUPS, shape[0]])
    return x, ends.clamp(max=shape[0])


def equal(ours: Operand | None, theirs: Operand | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    assert ours.scale_inv is not None
    assert theirs.scale_inv is not None
    return torch.equal(ours.data.cpu(), theirs.data) and torch.equal(
        ours.scale_inv.cpu(), theirs.scale_inv
    )


@each_runner
@pytest.mark.parametrize("pair", PAIRS)
def test_amaxes_equal_the_reference(pair: str, runner: str, request: pytest.FixtureRequest) -> None:
    bind: Bind = request.getfixturevalue(runner)
    for on_device in GROUPED:
        desc = AmaxDesc(cast_of(pair, on_device))
        run = bind(desc)
        for shape in (*SHAPES, *EMPTY):
            arguments = inputs(shape, on_device)
            assert torch.equal(run(*arguments).cpu(), reference(desc)(*arguments)), (desc, shape)


@each_runner
@pytest.mark.parametrize("pair", PAIRS)
def test_casts_by_larger_amaxes_equal_the_reference(
    pair: str, runner: str, request: pytest.FixtureRequest
) -> None:
    bind: Bind = request.getfixturevalue(runner)
    for on_device in GROUPED:
        cast = cast_of(pair, on_device)
        desc = QuantizeByAmaxDesc.of(cast)
        run = bind(desc)
        for shape in (*SHAPES, *EMPTY):
            arguments = inputs(shape, on_device)
            amax = reference(AmaxDesc(cast))(*arguments)
            amax = amax * torch.linspace(1, 3, len(amax)) + 0.5
            ours, theirs = run(*arguments, amax=amax), reference(desc)(*arguments, amax=amax)
            for name in Quantized._fields:
                assert equal(getattr(ours, name), getattr(theirs, name)), (desc, name, shape)


@each_runner
@pytest.mark.parametrize("pair", ["tensor", "rows hybrid", "rows and blocks"])
def test_casts_by_amaxes_count_once(pair: str, runner: str, request: pytest.FixtureRequest) -> None:
    bind: Bind = request.getfixturevalue(runner)
    cast = cast_of(pair, None)
    (x,) = inputs((70, 40), None)
    amax = reference(AmaxDesc(cast))(x)
    count = torch.zeros(1, dtype=torch.int64)
    if runner == "on_the_device":
        count = count.to(DEVICE)
    bind(QuantizeByAmaxDesc.of(cast))(x, amax=amax, nonfinite_out=count)
    assert count.item() == x.isnan().sum()


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("pair", ["tensor", "rows", "columns alone"])
def test_strided_input_and_amax_are_read_as_they_are(pair: str, on_the_device: Bind) -> None:
    cast = cast_of(pair, None)
    wide = torch.randn(130, 264).to(BF16)
    for x in (wide[:, ::2], wide[:, :40], wide.t()):
        amax = reference(AmaxDesc(cast))(x) * 2
        spread = torch.stack((amax, amax), 1)[:, 0]
        ours = on_the_device(QuantizeByAmaxDesc.of(cast))(x.to(DEVICE), amax=spread.to(DEVICE))
        theirs = reference(QuantizeByAmaxDesc.of(cast))(x, amax=amax)
        assert all(itertools.starmap(equal, zip(ours, theirs, strict=True)))
