"""Calls of the casts, norms, activations and products of csrc, small and valid."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from unittest.mock import patch

import torch

from fp8core import DotProductAttention, InferenceParams, OperandError, recipe
from fp8core.backend_api import (
    ATTENTION_LAYOUTS,
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    AmaxDesc,
    CachedAttentionDesc,
    ColumnSumsDesc,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    Operand,
    OperandSpec,
    PackedRotaryDesc,
    PagedAttentionDesc,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    RotaryDesc,
    ScaleUpdateDesc,
    SingleQueryDesc,
)
from fp8core.recipe.plan import LayerRole
from fp8core_backends.cuda import fused_chunked, native, quantize_chunked
from fp8core_backends.cuda.fused_norm import FusedNorm
from fp8core_backends.cuda.microscaling import TiledGemm
from fp8core_backends.cuda.transposition import RowsAdjacent
from tests.backends.cuda.cuda_cases import (
    DEVICE,
    DTYPES,
    KERNELS,
    backend,
    products_of_few_rows,
    spec,
)

# One element; partial tiles, read one by one and in vectors; whole tiles.
SHAPES = ((1, 1), (3, 5), (127, 129), (130, 264), (256, 256))
# Packed codes come in twos, the transform takes sixteen rows at once.
BYTE_SCALED_SHAPES = ((16, 2), (48, 34), (128, 128), (272, 130))
RECIPES = ("delayed", "current", "rowwise", "vector", "square")
MX = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
FP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3")
PAIRS = (
    *(("current", "current"), ("rowwise", "rowwise"), ("vector", "square")),
    *(("square", "vector"), ("vector", "vector")),
)


def quantize() -> None:
    """Cast in every granularity, input type, format and orientation, ragged and strided."""
    for name, element, dtype in itertools.product(RECIPES, ("e4m3", "e5m2"), DTYPES):
        own = spec(name, element)
        given = {}
        if own.delayed:
            given = {"scale": torch.ones(1).to(DEVICE), "amax_out": torch.zeros(1).to(DEVICE)}
        both = QuantizeDesc(dtype, own, own)
        whole = torch.randn(130, 272).to(dtype).to(DEVICE)
        inputs = [torch.randn(shape).to(dtype).to(DEVICE) for shape in SHAPES]
        inputs += [whole[:, 8:264], whole[1:, 1:], whole.t()]
        count = torch.zeros(1, dtype=torch.int64).to(DEVICE)
        for desc, x in itertools.product((both, *both.halves()), inputs):
            backend("cuda").bind(desc, DEVICE)(x, **given)
        infinite = torch.full((130, 264), torch.inf).to(dtype).to(DEVICE)
        for desc, x in itertools.product((both, *both.halves()), (inputs[2], infinite)):
            backend("cuda").bind(desc, DEVICE)(x, **given, nonfinite_out=count)
        for desc, x in itertools.product((both, *both.halves()), inputs):
            summed = dataclasses.replace(desc, sums=True)
            if backend("cuda").unsupported(summed, DEVICE) is None:
                backend("cuda").bind(summed, DEVICE)(x, **given)


def parts() -> None:
    """Cast gradients some rows at a time, the last of them ragged."""
    with patch.multiple(quantize_chunked, CHUNK_ROWS=128, LEAST_SAVED=1):
        for name, dtype in itertools.product(("delayed", "current", "vector"), DTYPES):
            own, given = spec(name), {}
            if own.delayed:
                given = {"scale": torch.ones(1).to(DEVICE), "amax_out": torch.zeros(1).to(DEVICE)}
            run = backend("cuda").bind(QuantizeDesc(dtype, own, own, chunked=True), DEVICE)
            for shape in ((256, 128), (300, 130), (272, 264)):
                made = run(torch.randn(shape).to(dtype).to(DEVICE), **given)
                for _ in made.rowwise:
                    pass


def fused_parts() -> None:
    """Compute and cast gradients of activations some rows at a time, with column sums and
    without."""
    with patch.multiple(fused_chunked, CHUNK_ROWS=128, LEAST_SAVED=1):
        recipes, names = ("delayed", "vector"), ("gelu", "swiglu")
        for recipe_name, name, sums in itertools.product(recipes, names, (False, True)):
            own, dtype, given = spec(recipe_name), torch.bfloat16, {}
            if own.delayed:
                given = {"scale": torch.ones(1).to(DEVICE), "amax_out": torch.zeros(1).to(DEVICE)}
            rounds = name in GATED or not own.delayed
            out_dtype = dtype if rounds else torch.float32
            producer = ActivationBackwardDesc(name, dtype, out_dtype)
            cast = QuantizeDesc(out_dtype, own, own, sums=sums, chunked=True)
            desc = FusedDesc(producer, cast)
            run = backend("cuda").bind(desc, DEVICE)
            for rows, n in ((256, 128), (300, 256), (272, 384)):
                x = torch.randn(rows, 2 * n if name in GATED else n).to(dtype).to(DEVICE)
                made, *_ = run(torch.randn(rows, n).to(dtype).to(DEVICE), x, **given)
                for _ in made.rowwise:
                    pass


def amax_and_scale_update() -> None:
    """Reduce every input type, cast by it, and update more states than one launch takes."""
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        x = torch.randn(shape).to(dtype).to(DEVICE)
        for own in (spec("current"), spec("rowwise")):
            desc = QuantizeDesc(dtype, own, own)
            amax = backend("cuda").bind(AmaxDesc(desc), DEVICE)(x)
            backend("cuda").bind(QuantizeByAmaxDesc.of(desc), DEVICE)(x, amax=amax)
    for algorithm in ("max", "most_recent"):
        sizes = [(1, 1), (2, 3), (1024, 3), (3000, 2), *[(16, 3)] * 70]
        histories = [torch.rand(size).to(DEVICE) for size in sizes]
        scales = [torch.ones(slots).to(DEVICE) for _, slots in sizes]
        counts = [torch.zeros(1, dtype=torch.int64).to(DEVICE) for _ in sizes]
        run = backend("cuda").bind(ScaleUpdateDesc(algorithm), DEVICE)
        run(histories, scales, [one.clone() for one in scales], counts)


def activations() -> None:
    """Activate and differentiate, by vectors and one element at a time."""
    for name, dtype in itertools.product(KERNELS, DTYPES):
        params = (7.0, 1.702, 1.0) if name == "clamped_swiglu" else ()
        for out_dtype, (rows, n) in itertools.product(DTYPES, SHAPES):
            x = torch.randn(rows, 2 * n if name in GATED else n).to(dtype).to(DEVICE)
            grad = torch.randn(rows, n).to(dtype).to(DEVICE)
            forward = ActivationDesc(name, dtype, out_dtype, params)
            backend("cuda").bind(forward, DEVICE)(x)
            backward = ActivationBackwardDesc(name, dtype, out_dtype, params)
            backend("cuda").bind(backward, DEVICE)(grad, x)


def dequantize_and_column_sums() -> None:
    """Decode both orientations of every cast, and add up rows, in vectors and one by one."""
    specs = [spec(name, element) for name in RECIPES for element in ("e4m3", "e5m2")]
    specs += [OperandSpec("e4m3", block, 448.0, "e8m0") for block in ((1, 32), (32, 32))]
    specs += [OperandSpec("e2m1", block, 6.0, "e4m3") for block in ((1, 16), (16, 16))]
    for own in specs:
        given = {"scale": torch.ones(1).to(DEVICE)} if own.delayed else {}
        cast = backend("cuda").bind(QuantizeDesc(torch.float32, own, own), DEVICE)
        for shape in SHAPES if own.scale_format == "float32" else BYTE_SCALED_SHAPES:
            operands = cast(torch.randn(shape).to(DEVICE), **given)
            for operand, dtype in itertools.product(operands, DTYPES):
                backend("cuda").bind(DequantizeDesc(own, dtype), DEVICE)(operand)
    for dtype in DTYPES:
        whole = torch.randn(130, 272).to(dtype).to(DEVICE)
        inputs = [torch.randn(shape).to(dtype).to(DEVICE) for shape in (*SHAPES, (700, 264))]
        for x in (*inputs, whole[:, 8:264], whole[1:, 1:], whole.t()):
            backend("cuda").bind(ColumnSumsDesc(dtype), DEVICE)(x)


def transposed_codes() -> None:
    """Transpose codes: whole tiles and partial ones."""
    rows_adjacent = RowsAdjacent(DEVICE, native.load())
    for rows, k in ((128, 128), (16, 16), (144, 272), (400, 48)):
        rows_adjacent(torch.zeros(k, rows, dtype=torch.uint8, device=DEVICE).t())


def fused_activations() -> None:
    """Activate, or differentiate, and cast: whole and partial tiles, both orientations and one."""
    for name, own, dtype in itertools.product(
        ("swiglu", "gelu", "erfgelu", "clamped_swiglu", "srelu"),
        (*map(spec, ("delayed", "current", "rowwise", "vector")), MX, FP4),
        (torch.bfloat16, torch.float16),
    ):
        params = (7.0, 1.702, 1.0) if name == "clamped_swiglu" else ()
        given = {"nonfinite_out": torch.zeros(1, dtype=torch.int64).to(DEVICE)}
        if own.delayed:
            given |= {"scale": torch.ones(1).to(DEVICE), "amax_out": torch.zeros(1).to(DEVICE)}
        for backward, (rows, n) in itertools.product(
            (False, True), ((10, 72), (130, 264), (256, 128))
        ):
            is_float = own.delayed and not (backward and name in GATED)
            out_dtype = torch.float32 if is_float else dtype
            producer = (ActivationBackwardDesc if backward else ActivationDesc)(
                name, dtype, out_dtype, params
            )
            both = QuantizeDesc(out_dtype, own, own)
            x = torch.randn(rows, 2 * n if name in GATED else n).to(dtype).to(DEVICE)
            grad = torch.randn(rows, n).to(dtype).to(DEVICE)
            grad[-1, -1] = torch.inf
            tensors = (grad, x) if backward else (x,)
            casts = [both, *both.halves()]
            if own in (MX, FP4):
                casts += [dataclasses.replace(both, padded=32)]
            for cast, sums in itertools.product(casts, {False, backward}):
                desc = FusedDesc(producer, dataclasses.replace(cast, sums=sums))
                run = backend("cuda").bind(desc, DEVICE)
                run(*tensors, **given)
                halves = dataclasses.replace(desc, quantize=dataclasses.replace(cast, split=True))
                if backend("cuda").unsupported(halves, DEVICE) is None:
                    pairs = {key: (value, value.clone()) for key, value in given.items()}
                    backend("cuda").bind(halves, DEVICE)(*tensors, **pairs)
    # More tiles than there are blocks of threads at once.
    x, grad = (torch.randn(2200, n).bfloat16().to(DEVICE) for n in (5888, 2944))
    for own in map(spec, ("current", "rowwise", "vector")):
        cast = QuantizeDesc(x.dtype, own, own)
        for step, tensors in ((ActivationDesc, (x,)), (ActivationBackwardDesc, (grad, x))):
            desc = FusedDesc(step("swiglu", x.dtype, x.dtype), cast)
            backend("cuda").bind(desc, DEVICE)(*tensors)


def gemm() -> None:
    """Multiply every pair of granularities: plain, with a bias, into a sum; timed once."""
    for (left, right), (m, n, k) in itertools.product(PAIRS, ((20, 48, 144), (132, 144, 272))):
        a_spec, b_spec = spec(left), spec(right)
        a, b = (
            backend("cuda")
            .bind(QuantizeDesc(torch.bfloat16, own, None), DEVICE)(
                torch.randn(rows, k).bfloat16().to(DEVICE)
            )
            .rowwise
            for own, rows in ((a_spec, m), (b_spec, n))
        )
        for out_dtype in (torch.bfloat16, torch.float32):
            run = backend("cuda").bind(GemmDesc(a_spec, b_spec, out_dtype), DEVICE)
            run(a, b)
            run(a, b, bias=torch.randn(n).bfloat16().to(DEVICE))
        desc = GemmDesc(a_spec, b_spec, torch.float32, accumulate=True)
        backend("cuda").bind(desc, DEVICE)(a, b, out=torch.zeros(m, n).to(DEVICE))


def few_rows() -> None:
    """Multiply few rows in every way that the kernel proposes, by codes and by codes alone."""
    sizes = ((1, 48, 144), (8, 16, 16), (13, 304, 1040), (30, 144, 272), (64, 2128, 528))
    pairs = (*PAIRS, (None, "current"), (None, "square"))
    for (left, right), (m, n, k) in itertools.product(pairs, sizes):
        a_spec, b_spec = None if left is None else spec(left), spec(right)
        m = m if left is None else -(-m // 4) * 4  # no rows behind those that are cast
        x, weight = (torch.randn(rows, k).bfloat16().to(DEVICE) for rows in (m, n))
        cast = [
            None if own is None else backend("cuda").bind(QuantizeDesc(x.dtype, own, None), DEVICE)
            for own in (a_spec, b_spec)
        ]
        a = Operand(x) if cast[0] is None else cast[0](x).rowwise
        b = cast[1](weight).rowwise
        bias = torch.randn(n).bfloat16().to(DEVICE)
        for _ in products_of_few_rows(GemmDesc(a_spec, b_spec, x.dtype), a, b, bias=bias):
            pass


def single_queries() -> None:
    """Attend by one query a sequence over a cache: of every layout and size of heads, by one block
    of threads a group and by clusters, with lengths of the cache and with others."""
    shapes = ((64, 8, 1), (128, 4, 4), (128, 6, 2), (256, 1, 1))
    for layout, (size, heads, groups) in itertools.product(ATTENTION_LAYOUTS, shapes):
        scale, masks = size**-0.5, {"padding": True, "window": (-1, 0), "bottom_right": True}
        desc = CachedAttentionDesc(
            torch.bfloat16, layout, heads, groups, size, size, scale, **masks
        )
        run = backend("cuda").bind(desc, DEVICE)
        for batch, capacity in ((1, 600), (3, 40), (300, 24)):
            k, v = torch.randn(2, batch, capacity, groups, size).bfloat16().to(DEVICE)
            q = torch.randn(batch, 1, heads, size).bfloat16().to(DEVICE)
            whole = {}
            if layout == "thd":
                q, k, v = (x.flatten(0, 1) for x in (q, k, v))
                whole = {"max_seqlen_q": 1, "max_seqlen_kv": capacity}
            elif layout == "sbhd":
                q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            edges = torch.arange(batch + 1, dtype=torch.int32).to(DEVICE)
            for lengths in (edges * capacity, edges * 5, -edges, edges * 2**20):
                run(q, k, v, cu_seqlens_q=edges, cu_seqlens_kv=lengths, **whole)
            run(q, k, v, cu_seqlens_q=edges * 2**20, cu_seqlens_kv=edges, **whole)


def single_queries_of_masks() -> None:
    """Attend by one query a sequence over another library's cache: with masks at every place
    relative to the words that are read, that end where their memory does, and without one."""
    for size, heads, groups in ((64, 8, 1), (128, 6, 2), (256, 1, 1)):
        for batch, capacity in ((1, 600), (3, 40), (300, 24), (2, 7)):
            q = torch.randn(batch, 1, heads, size).bfloat16().to(DEVICE)
            pair = torch.randn(2, batch, groups, capacity, size).bfloat16().to(DEVICE)
            k, v = pair.transpose(2, 3)
            for start in (None, 0, 1, 15):
                desc = SingleQueryDesc(
                    *(torch.bfloat16, "bshd", heads, groups, size, size, size**-0.5),
                    arbitrary=start is not None,
                )
                run, keywords = backend("cuda").bind(desc, DEVICE), {}
                if start is not None:
                    flat = torch.rand(start + batch * capacity) < 0.5
                    mask = flat.to(DEVICE)[start:].view(batch, 1, 1, capacity)
                    keywords = {"mask": mask}
                run(q, k, v, **keywords)


def single_queries_in_pages() -> None:
    """Attend by one query a sequence over pages and over pages of codes, of a table that names all
    of them and of tables that name others."""
    shapes = ((64, 8, 1), (128, 4, 4), (128, 6, 2), (256, 1, 1))
    for (size, heads, groups), kv, page_size in itertools.product(
        shapes, (None, spec("rowwise")), (3, 16)
    ):
        masks = {"padding": True, "window": (-1, 0), "bottom_right": True, "kv": kv}
        desc = PagedAttentionDesc(
            torch.bfloat16, "bshd", heads, groups, size, size, size**-0.5, **masks
        )
        run = backend("cuda").bind(desc, DEVICE)
        for batch, columns in ((1, 40), (3, 2), (200, 1)):
            pages = batch * columns
            shape = (pages, page_size, groups)
            if kv is None:
                k, v = torch.randn(2, *shape, size).bfloat16().to(DEVICE)
            else:
                k, v = (
                    Operand(torch.randint(120, (*shape, size)).byte().to(DEVICE), scales)
                    for scales in torch.rand(2, *shape, 1).to(DEVICE)
                )
            q = torch.randn(batch, 1, heads, size).bfloat16().to(DEVICE)
            edges = torch.arange(batch + 1, dtype=torch.int32).to(DEVICE)
            table = torch.randperm(pages).view(batch, columns).int().to(DEVICE)
            hostile = torch.full_like(table, 2**31 - 1)
            for named in (table, table - pages, table + pages, hostile, -hostile):
                for lengths in (edges * columns * page_size, edges * 2**20):
                    sizes = {"cu_seqlens_q": edges, "cu_seqlens_kv": lengths}
                    run(q, k, v, page_table=named, **sizes)


def steps_of_a_cache() -> None:
    """Make steps of a cache on the device that fit, and such that do not, in rows and in pages."""
    ones = torch.ones(2, dtype=torch.int32, device=DEVICE)
    for layout, pages in itertools.product(
        ATTENTION_LAYOUTS, ({}, {"is_paged": True, "page_size": 4})
    ):
        layer = DotProductAttention(2, 64, 1, qkv_format=layout, layer_number=1).eval()
        cache = InferenceParams(2, 16, 1, 64, torch.bfloat16, device=DEVICE, **pages)
        size = {"thd": (2,), "bshd": (2, 1), "sbhd": (1, 2)}[layout]
        qkv = [torch.randn(*size, heads, 64, device=DEVICE).bfloat16() for heads in (2, 1, 1)]
        cache.pre_step({"a": 1, "b": 1})
        with torch.no_grad():
            layer(*qkv, inference_params=cache)
            for length in (0, 15, 16, 2**31 - 1, -1, -(2**31)):
                cache.seqlens[0] = length
                for counts in (ones, ones * 2**30, -ones):
                    cache.pre_step(counts)
                    layer(*qkv, inference_params=cache)
            for page in (4, 2**31 - 1, -1) if pages else ():
                cache.seqlens[0] = 3
                cache.cache_manager.page_table[0, 0] = page  # type: ignore[attr-defined]
                cache.pre_step(ones)
                layer(*qkv, inference_params=cache)
        with contextlib.suppress(OperandError):  # which names the faults
            cache.reset()


def microscaling() -> None:
    """Cast to MXFP8 and NVFP4 as recipes do; bring scales into tiles, but multiply nothing."""
    chosen = (
        recipe.MXFP8BlockScaling(fp8_format="hybrid"),
        recipe.MXFP8BlockScaling(enable_2d_quantization=True),
        recipe.NVFP4BlockScaling(),
        recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    )
    for own, dtype in itertools.product(chosen, DTYPES):
        plan = own.plan(LayerRole("linear"), dtype)
        for tensor in (plan.input, plan.weight, plan.grad_output):
            whole = QuantizeDesc(dtype, *tensor)
            padded = dataclasses.replace(whole, padded=32)
            for desc, shape in (
                *itertools.product((whole, *whole.halves()), BYTE_SCALED_SHAPES),
                *itertools.product((padded, padded.halves()[1]), ((1, 16), (37, 34), (130, 144))),
            ):
                specs = [one for one in (desc.rowwise, desc.columnwise) if one is not None]
                given = (
                    {"rng": torch.tensor((7, 9))} if any(one.stochastic for one in specs) else {}
                )
                x = torch.randn(shape).to(dtype).to(DEVICE)
                backend("cuda").bind(desc, DEVICE)(x, **given)
        operands = [
            backend("cuda").bind(QuantizeDesc(dtype, one.rowwise, None), DEVICE)(x).rowwise
            for one, x in (
                (plan.input, torch.randn(130, 160).to(dtype).to(DEVICE)),
                (plan.weight, torch.randn(48, 160).to(dtype).to(DEVICE)),
            )
        ]
        product = GemmDesc(plan.input.rowwise, plan.weight.rowwise, torch.bfloat16)
        TiledGemm(product, DEVICE, native.load())._tiled(*operands)


def device_groups() -> None:
    """Cast and multiply groups whose offsets are on the device: aligned, ragged, astray; and cast
    those whose sizes the host knows, with zeros behind them."""
    n, k = 144, 272
    sizes = ([0, 5, 5, 300, 320], [0, 128, 256, 320, 320], [0, *range(21, 321)], [0, 0])
    for own, bounds in itertools.product(map(spec, RECIPES), sizes):
        groups, x = len(bounds) - 1, torch.randn(bounds[-1], k).bfloat16().to(DEVICE)
        desc, given = QuantizeDesc(x.dtype, own, own, True, padded=32), {}
        if own.delayed:
            given = {"scale": torch.ones(groups), "amax_out": torch.zeros(groups)}
            given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
        for each in (desc, *desc.halves()):
            backend("cuda").bind(each, DEVICE)(x, torch.tensor(bounds, device="cpu"), **given)
    for offsets in ((0, 5, 5, 300, 301), (0, 128, 256, 320, 320), (0, 900, -5, 40, 320)):
        ends = torch.tensor(offsets).to(DEVICE)
        groups, x = len(offsets) - 1, torch.randn(320, k).bfloat16().to(DEVICE)
        for left, right in PAIRS:
            a_spec, b_spec = spec(left), spec(right)
            rows, turned = (
                backend("cuda").bind(QuantizeDesc(x.dtype, own, own, True, True), DEVICE)(x, ends)
                for own in (a_spec, b_spec)
            )
            cast = backend("cuda").bind(QuantizeDesc(x.dtype, b_spec, None), DEVICE)
            weights = [cast(torch.randn(n, k).bfloat16().to(DEVICE)).rowwise for _ in range(groups)]
            for dtype in (torch.bfloat16, torch.float32):
                stacked = GroupedGemmDesc(a_spec, b_spec, dtype, offsets_on_device=True)
                backend("cuda").bind(stacked, DEVICE)(rows.rowwise, weights, ends)
            summed = dataclasses.replace(stacked, contract_groups=True)
            backend("cuda").bind(summed, DEVICE)(rows.columnwise, turned.columnwise, ends)
        for name, dtype in itertools.product(("current", "rowwise", "square"), DTYPES[:2]):
            cast = backend("cuda").bind(QuantizeDesc(dtype, spec(name), None), DEVICE)
            weights = [cast(torch.randn(n, k).to(dtype).to(DEVICE)).rowwise for _ in range(groups)]
            alone = GroupedGemmDesc(None, spec(name), dtype, offsets_on_device=True)
            backend("cuda").bind(alone, DEVICE)(Operand(x.to(dtype)), weights, ends)


def norms() -> None:
    """Normalize rows held by few and by many threads, and rows read again; backward, too."""
    for kind, dtype in itertools.product(("layernorm", "rmsnorm"), DTYPES):
        desc = NormDesc(kind, dtype, dtype, 1e-5)
        for rows, n in ((1, 1), (5, 70), (40, 264), (9, 2304), (3, 8200), (2, 16384), (2, 33000)):
            whole = torch.randn(rows, n + 1).to(dtype).to(DEVICE)
            for x in (whole[:, :n].contiguous(), whole[:, 1:]):
                given = [torch.randn(n).to(dtype).to(DEVICE) for _ in range(2)]
                given = given[: 2 if kind == "layernorm" else 1]
                _, *statistics = backend("cuda").bind(desc, DEVICE)(x, *given)
                backend("cuda").bind(AddNormDesc(desc), DEVICE)(x, x, *given)
                backward = backend("cuda").bind(NormBackwardDesc(desc), DEVICE)
                backward(x, x, given[0], *statistics)
                adding = backend("cuda").bind(NormBackwardDesc(desc, added=True), DEVICE)
                adding(x, x, given[0], *statistics, x)


def fused_norms() -> None:
    """Normalize and cast: panels of every height, in clusters of one block and of several; in two
    passes; and by the pair."""
    for kind, name, dtype in itertools.product(("layernorm", "rmsnorm"), RECIPES[:4], DTYPES[:2]):
        own, given = spec(name), {}
        if own.delayed:
            given = {"scale": torch.ones(1).to(DEVICE), "amax_out": torch.zeros(1).to(DEVICE)}
        out_dtype = torch.float32 if own.delayed else dtype
        norm = NormDesc(kind, dtype, out_dtype, 1e-5)
        whole = QuantizeDesc(out_dtype, own, own)
        count = torch.zeros(1, dtype=torch.int64).to(DEVICE)
        calls = [
            (FusedNorm(FusedDesc(norm, cast), DEVICE, native.load()), size)
            for cast in (whole, *whole.halves())
            for size in ((1, 8), (33, 264), (130, 1160), (70, 4096), (5, 70))
        ]
        if own.delayed:
            panels = ((32, 256, 1, 0), (32, 256, 3, 1), (64, 256, 2, 1))
        else:
            panels = ((128, 256, 2, 0), (128, 256, 3, 1), (128, 512, 3, 1))
        if name in ("delayed", "vector"):
            calls += [
                (FusedNorm(FusedDesc(norm, whole), DEVICE, native.load(), panel), (300, 520))
                for panel in panels
            ]
        for run, (rows, n) in calls:
            parameters = [torch.randn(n).to(dtype).to(DEVICE) for _ in range(2)]
            parameters = parameters[: 2 if kind == "layernorm" else 1]
            x = torch.randn(rows, n).to(dtype).to(DEVICE)
            run(x, *parameters, **given, nonfinite_out=count)
            x[rows // 2, n // 2] = torch.inf
            run(x, *parameters, **given, nonfinite_out=count)


def rotary() -> None:
    """Rotate heads in every layout, in vectors and one by one, whole and in parts."""
    # Sequence, batch, heads, head size, rotated elements.
    cases = (
        *((1, 1, 1, 2, 2), (5, 3, 2, 10, 6), (37, 3, 2, 33, 8), (4, 2, 9, 80, 32)),
        *((9, 2, 32, 128, 128), (2, 2, 2, 1100, 1030), (2, 1, 2, 4112, 4112), (3, 2, 2, 16, 0)),
    )
    for dtype, layout, interleaved, inverse, (length, batch, *heads, rotated) in itertools.product(
        DTYPES, ATTENTION_LAYOUTS, (False, True), (False, True), cases
    ):
        sizes = {"sbhd": (length, batch), "bshd": (batch, length), "thd": (length * batch,)}[layout]
        x = torch.randn(*sizes, *heads).to(dtype).to(DEVICE)
        freqs = torch.randn(length, 1, 1, rotated).to(DEVICE)
        # The last sequence reaches beyond the angles; in thd, tokens of no sequence are left.
        given = {"start_positions": torch.arange(batch, dtype=torch.int32).to(DEVICE)}
        if layout == "thd":
            bounds = torch.arange(batch + 1, dtype=torch.int32) * (length - 1) + 1
            given["cu_seqlens"] = bounds.to(DEVICE)
        run = backend("cuda").bind(RotaryDesc(dtype, layout, interleaved, inverse), DEVICE)
        run(x, freqs, **given)
        run(x[..., :1, :], freqs, **given)
        packed = PackedRotaryDesc(dtype, layout, interleaved, inverse)
        k, v = x[..., :1, :].contiguous(), x[..., -1:, :]
        backend("cuda").bind(packed, DEVICE)(x, freqs, k=k, v=v, **given)
    bounds = torch.arange(1100, dtype=torch.int32).to(DEVICE)
    run = backend("cuda").bind(RotaryDesc(torch.bfloat16, "thd"), DEVICE)
    run(torch.randn(1101, 1, 16).bfloat16().to(DEVICE), freqs[:, :, :, :0], cu_seqlens=bounds)
