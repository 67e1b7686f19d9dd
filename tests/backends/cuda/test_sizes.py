"""The conformance kit's laws at the sizes where the kernels divide their work in another way.

The kit's own run tries a few sizes of each operation; these are one row and one column, vectors,
tiles and panels, whole, cut and one more than whole, and more than a launch takes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import pytest
import torch

from fp8core.backend_api import (
    ATTENTION_LAYOUTS,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    AmaxDesc,
    ColumnSumsDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DequantizeDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    QuantizeDesc,
    RotaryDesc,
    RouteDesc,
)
from fp8core.conformance.catalogue import CatalogueEntry
from fp8core.conformance.checks import checks
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import Size, Subject
from fp8core.recipe import NVFP4BlockScaling
from fp8core.recipe.plan import LayerRole
from fp8core_backends.cuda import fused_chunked, quantize_chunked
from tests.backends.cuda.cuda_cases import (
    DTYPES,
    EMPTY,
    KERNELS,
    NORM_COLUMNS,
    SHAPES,
    spec,
    subject,
)
from tests.pairs import pairs, turns

pytestmark = pytest.mark.needs_accelerator("cuda")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PARAMS = {"clamped_swiglu": (7.0, 1.702, 1.0)}
NORMS = ("rmsnorm", "layernorm")
PLAIN_FP4 = {"disable_rht": True, "disable_2d_quantization": True}

# Also more rows than a launch's y has.
NORM_SIZES = (
    *((33, n) for n in NORM_COLUMNS),
    *((1, 8), (2, 2304), (700, 264), (700, 5120), (1, 40000), (66000, 1), (66000, 64)),
)
# Columns in whole vectors: one; cut and whole chunks, tiles and panels; clusters of every size.
# Columns in no whole vectors, or more than two passes take.
FUSED_NORM_SIZES = (
    *((1, 8), (1, 128), (33, 264), (64, 256), (70, 520), (127, 136), (128, 128), (130, 1000)),
    *((129, 768), (257, 1024), (300, 2048), (144, 2304), (272, 4096), (100, 5120), (160, 6144)),
    *((96, 8192), (140, 12288), (40, 13824), (130, 16384), (1040, 264), (1, 1), (5, 20000)),
)
# A row, a vector, whole tiles and partial ones.
WHOLE_VECTORS = (
    *((1, 8), (1, 128), (128, 8), (3, 16), (16, 48), (127, 136), (128, 128), (130, 264)),
    *((256, 512), (8, 4096), (1000, 1000), (33, 2048), (384, 640), (4096, 24), (257, 1032)),
)
FUSED_ACTIVATION_SIZES = (*WHOLE_VECTORS, (1, 1), (128, 130), (5, 4100), *EMPTY)
# Fewer columns than a vector, one vector, rows that begin at odd addresses.
ACTIVATION_SIZES = (*SHAPES, (1, 7), (1, 8), (5, 9), (3, 20008), (33, 2056), (70000, 8), *EMPTY)
# One launch and two; one tile of columns and several; a long sum.
SUM_SIZES = (
    *(*SHAPES, (257, 256), (320, 264), (4097, 520), (8192, 4096)),
    *((70_000, 24), (24, 70_000), (100_000, 1)),
)
# Sequence, batch, heads, head size, rotated elements: in vectors of eight elements; one by one; and
# more columns of a head than the shared memory of a block takes, the last part of them ragged.
ROTARY_SIZES = (
    *((1, 1, 1, 16, 16), (3, 2, 2, 64, 64), (5, 3, 32, 128, 128), (7, 2, 8, 128, 128)),
    *((2, 2, 3, 80, 32), (33, 3, 1, 96, 48), (2, 1, 200, 256, 256), (9, 2, 3, 24, 16)),
    *((7, 3, 2, 10, 6), (5, 2, 3, 130, 32), (4, 3, 5, 33, 8), (3, 2, 2, 96, 24)),
    *((300, 1, 1, 3, 2), (2, 3, 2, 72, 72), (2, 2, 1, 128, 2), (131, 2, 2, 4, 4)),
    *((3, 2, 2, 4112, 4112), (2, 2, 3, 2064, 1040), (2, 3, 2, 1100, 1030), (2, 1, 1, 3001, 4)),
)


# Tokens and experts: of a warp, of the shared memory of a block, and of a small mask's one launch.
ROUTE_SIZES = (
    *((1, 31), (255, 32), (256, 33), (257, 100), (4096, 256), (4097, 300), (9, 2048)),
    *((33, 1), (2048, 8), (2049, 32), (16383, 8), (16384, 31), (16385, 32), (33000, 8)),
)
CASTS = ("delayed", "current", "rowwise", "vector", "square")


def casts() -> Iterator[QuantizeDesc]:
    """Yield each cast from each dtype, to each format, and with scales of powers of two."""
    for name, element, power in pairs(CASTS, ("e4m3", "e5m2"), (False, True)):
        if not (power and name == "delayed"):
            for dtype in DTYPES:
                own = spec(name, element, power)
                yield QuantizeDesc(dtype, own, own)
    yield QuantizeDesc(BF16, spec("current"), spec("vector", "e5m2"))
    for name in CASTS:
        yield from QuantizeDesc(BF16, spec(name), spec(name)).halves()
    for name, element, dtype in pairs(("mx", "mx square"), ("e4m3", "e5m2"), DTYPES):
        yield QuantizeDesc(dtype, spec(name, element), spec(name, element))
    yield QuantizeDesc(BF16, spec("mx"), spec("mx", "e5m2"))
    yield QuantizeDesc(BF16, spec("mx"), spec("mx square"))
    for name in ("mx", "mx square"):
        yield from QuantizeDesc(BF16, spec(name), spec(name)).halves()
    fp4, turned, square = spec("fp4"), spec("fp4 transformed"), spec("fp4 square")
    four = dataclasses.replace(fp4, target=4.0)
    both = ((fp4, fp4), (fp4, turned), (square, square), (fp4, square), (four, four))
    squares = (square, dataclasses.replace(square, transform="hadamard16"))
    for specs, dtype in pairs((*both, squares), DTYPES):
        yield QuantizeDesc(dtype, *specs)
    yield from QuantizeDesc(BF16, fp4, turned).halves()


def fusions() -> Iterator[FusedDesc]:
    """Yield fusions of norms and activations with the casts that recipes have beside them."""
    names = ("delayed", "current", "rowwise", "vector")
    axes = (NORMS, names, ("e4m3", "e5m2"), (BF16, F16))
    for kind, name, element, dtype in pairs(*axes):
        out = F32 if name == "delayed" else dtype
        own = spec(name, element)
        yield FusedDesc(NormDesc(kind, dtype, out, 1e-5), QuantizeDesc(out, own, own))
    for kind, dtype in pairs(NORMS, (BF16, F16)):
        rounded = QuantizeDesc(dtype, spec("delayed"), spec("delayed"))
        yield FusedDesc(NormDesc(kind, dtype, dtype, 1e-5), rounded)
    for name, power in pairs(names[1:], (True,)):
        own = spec(name, power_of_two=power)
        yield FusedDesc(NormDesc("rmsnorm", BF16, BF16, 1e-5), QuantizeDesc(BF16, own, own))
    names = (*names, "mx", "mx square")
    kinds = (ActivationDesc, ActivationBackwardDesc)
    for kind, activation, name, dtype in pairs(kinds, ("gelu", "swiglu"), names, (BF16, F16)):
        is_float = name == "delayed" and not (
            kind is ActivationBackwardDesc and activation == "swiglu"
        )
        out = F32 if is_float else dtype
        own = spec(name, "e5m2" if kind is ActivationBackwardDesc else "e4m3")
        sums = (False, True) if kind is ActivationBackwardDesc else (False,)
        for one in sums:
            producer = kind(activation, dtype, out)
            yield FusedDesc(producer, QuantizeDesc(out, own, own, sums=one))
    for activation, name, one in pairs(("silu", "geglu"), names[:4], (False, True)):
        out = F32 if name == "delayed" and (not one or activation == "silu") else BF16
        producer = (ActivationBackwardDesc if one else ActivationDesc)(activation, BF16, out)
        for half in QuantizeDesc(out, spec(name), spec(name)).halves():
            yield FusedDesc(producer, dataclasses.replace(half, sums=one))
    for name, activation, one in pairs(("delayed", "vector"), ("gelu", "srelu"), (False, True)):
        out = F32 if name == "delayed" else F16
        cast = QuantizeDesc(out, spec(name), spec(name), sums=one)
        yield FusedDesc(ActivationBackwardDesc(activation, F16, out), cast)
    for options, activation, dtype in pairs(({}, PLAIN_FP4), ("gelu", "swiglu"), (BF16, F16)):
        plan = NVFP4BlockScaling(**options).plan(LayerRole("linear"), dtype)
        backward = [(kinds[1], tensor) for tensor in (plan.grad_output, plan.weight)]
        for kind, tensor in ((kinds[0], plan.input), *backward):
            producer, sums = kind(activation, dtype, dtype), kind is ActivationBackwardDesc
            for cast in (QuantizeDesc(dtype, *tensor), *QuantizeDesc(dtype, *tensor).halves()):
                yield FusedDesc(producer, dataclasses.replace(cast, sums=sums))


def activations() -> Iterator[OpDesc]:
    """Yield each activation and its derivative from each dtype to each."""
    for name, dtype, out in pairs(KERNELS, DTYPES, DTYPES):
        for kind in (ActivationDesc, ActivationBackwardDesc):
            yield kind(name, dtype, out, PARAMS.get(name, ()))


def norms() -> Iterator[OpDesc]:
    """Yield norms between all dtypes, the norm of a sum, and their derivatives."""
    for kind, dtype, out, centered in pairs(NORMS, DTYPES, DTYPES, (False, True)):
        desc = NormDesc(kind, dtype, out, 1e-5, centered)
        yield desc
        yield NormBackwardDesc(desc)
        if dtype == out:
            yield AddNormDesc(desc)


def values() -> Iterator[DequantizeDesc]:
    """Yield the dequantization of each operand to each dtype."""
    names = (*CASTS, "mx", "mx square", "fp4", "fp4 square", "fp4 transformed")
    for (name, element), dtype in pairs([*turns(names, ("e4m3", "e5m2"))], DTYPES):
        yield DequantizeDesc(spec(name, element), dtype)


def losses() -> Iterator[OpDesc]:
    for dtype in DTYPES:
        yield CrossEntropyDesc(dtype, 0.1)
        yield CrossEntropyBackwardDesc(dtype, 0.1)


DESCS: dict[str, list[OpDesc]] = {
    "casts": [*casts()],
    "amaxes": [AmaxDesc(QuantizeDesc(one, spec("current"), spec("rowwise"))) for one in DTYPES],
    "values": [*values()],
    "norms": [*norms()],
    "activations": [*activations()],
    "fusions": [*fusions()],
    "column sums": [ColumnSumsDesc(dtype) for dtype in DTYPES],
    "rotary": [
        RotaryDesc(dtype, layout, *flags)
        for layout, dtype, *flags in pairs(ATTENTION_LAYOUTS, DTYPES, (False, True), (False, True))
    ],
    "routes": [RouteDesc(torch.bool, "mask"), RouteDesc(torch.int32, "mask")],
    "losses": [*losses()],
}
SIZES: dict[str, tuple[Size, ...]] = {
    "quantize": (*SHAPES, (32, 32), (96, 160), *EMPTY),
    "dequantize": (*SHAPES, *EMPTY, (300, 322), (70_000, 24), (24, 70_000)),
    "norm": NORM_SIZES,
    "norm_backward": NORM_SIZES,
    "add_norm": tuple(size for size in NORM_SIZES if size[0] == 33),
    "norm_quantize": (*FUSED_NORM_SIZES, *EMPTY),
    "activation": ACTIVATION_SIZES,
    "activation_backward": ACTIVATION_SIZES,
    "activation_quantize": FUSED_ACTIVATION_SIZES,
    "activation_backward_quantize": FUSED_ACTIVATION_SIZES,
    "column_sums": SUM_SIZES,
    "rotary": ROTARY_SIZES,
    "route": ROUTE_SIZES,
    "cross_entropy": ((300, 32000), (300, 32001), (30, 128256)),
    "cross_entropy_backward": ((300, 32000), (300, 32001), (30, 128256)),
}
OF_SIZES = (
    *("quantize_codes_equal_the_reference", "quantize_scales_equal_the_reference"),
    *("quantize_records_the_amax", "quantize_counts_nan_and_inf"),
    "quantize_and_sum_equals_the_call_and_sums",
    *("amax_is_exact", "dequantize_rounds_once"),
    *("norm_is_within_the_bound", "norm_is_exact_where_the_mean_is_large"),
    "norm_backward_is_within_the_bound",
    *("norm_keeps_nan_and_inf_in_their_rows", "a_norm_adds_gradients_as_the_pair"),
    *("add_norm_equals_its_unfused_pair", "activation_is_within_the_bound"),
    *("activation_backward_is_within_the_bound", "fused_equals_its_unfused_pair"),
    "fused_counts_nan_and_inf_of_its_result",
    "column_sums_are_within_the_bound",
    *("rotary_is_within_the_bound", "rotary_starts_at_the_given_positions"),
    "rotary_of_packed_heads_equals_that_of_each",
    "route_equals_the_reference",
    *("cross_entropy_is_within_the_bound", "cross_entropy_backward_is_within_the_bound"),
)
"""The laws that try the sizes given to them."""
OF_CHUNKS = (
    *("quantize_chunked_equals_the_whole", "quantize_variants_count_the_whole"),
    *("quantize_and_sum_equals_the_call_and_sums", "fused_chunks_equal_the_call"),
)


@functools.cache
def at_sizes() -> Subject:
    found = subject()
    return Subject("cuda", found.backend, found.device, found.judge, found.spec, SIZES)


def check_laws(desc: OpDesc, laws: Iterable[str]) -> None:
    of_desc = [CatalogueEntry(str(desc), desc)]
    made = list(checks(at_sizes(), [LAWS[name] for name in laws], of_desc))
    assert made, f"no law is about {desc}, or the backend refuses it"
    for check in made:
        check.run()
    at_sizes().results.clear()


CASES = [(name, str(desc), desc) for name, descs in DESCS.items() for desc in descs]


@pytest.mark.parametrize(
    "desc", [one[2] for one in CASES], ids=[" ".join(one[:2]) for one in CASES]
)
def test_laws_hold_at_the_kernels_sizes(desc: OpDesc) -> None:
    check_laws(desc, OF_SIZES)


def comes_in_chunks(desc: OpDesc) -> bool:
    is_computed = isinstance(desc, FusedDesc) and isinstance(desc.producer, ActivationBackwardDesc)
    cast = desc.quantize if is_computed else desc
    if not isinstance(cast, QuantizeDesc) or None in (cast.rowwise, cast.columnwise):
        return False
    if cast.rowwise.block == cast.columnwise.block == (0, 0):
        return cast.rowwise.delayed or not is_computed
    return cast.rowwise.block == cast.columnwise.block == (1, 128)


@pytest.mark.parametrize("desc", [*filter(comes_in_chunks, [one[2] for one in CASES])], ids=str)
def test_laws_hold_in_small_chunks(desc: OpDesc, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused_chunked, quantize_chunked):
        monkeypatch.setattr(module, "CHUNK_ROWS", 128)
        monkeypatch.setattr(module, "LEAST_SAVED", 1)
    assert at_sizes().variant(desc, chunked=True) is not None
    check_laws(desc, OF_CHUNKS)
