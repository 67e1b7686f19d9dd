"""Keys and values of a cache in pages: handed over as they are, and as FP8 codes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8core import (
    DotProductAttention,
    InferenceParams,
    KVCacheManager,
    Linear,
    OperandError,
    UnsupportedError,
    clear_found_inf,
    found_inf,
    use_backend,
)
from fp8core.backend_api import (
    API_VERSION,
    Alignment,
    AttentionDesc,
    BackendSpec,
    CachedAttentionDesc,
    DequantizeDesc,
    GemmDesc,
    OpDesc,
    Operand,
    PagedAttentionDesc,
    QuantizeDesc,
)
from fp8core.chain.attention.pages import CODES
from fp8core.dispatch import plugins
from fp8core.modules.sequences.inference import restored_caches
from fp8core.torch_ops.nonfinite import counter_of
from tests.backends.cuda.cuda_cases import backend
from tests.device import DEVICE
from tests.modules.test_attention_cache import (
    GROUPS,
    K_SIZE,
    LAYOUTS,
    PAGES,
    SCHEDULES,
    cache_for,
    in_steps,
    layer_of,
    random_sequences,
    whole,
)

BF16 = torch.bfloat16
PROMPT_THEN_ONE_BY_ONE = [(6, 3), *[(1, 1)] * 4]
KEYWORDS = {"cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"}


class Gathering:
    """A backend that reads pages by the contract: gathered, then by the reference; or ``kind``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.kind: type[AttentionDesc] = PagedAttentionDesc
        self.bound: list[type[AttentionDesc]] = []

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if isinstance(desc, AttentionDesc):
            plain = type(desc) in (AttentionDesc, self.kind)
            return None if plain and not desc.low_precision else "no such attention"
        return "not attention"

    def alignment(self, desc: GemmDesc) -> Alignment:
        return Alignment()

    def bind(self, desc: Any, device: torch.device) -> Any:
        values = {f.name: getattr(desc, f.name) for f in dataclasses.fields(AttentionDesc)}
        run = backend("reference").bind(AttentionDesc(**values), device)
        self.bound.append(type(desc))
        if type(desc) is not PagedAttentionDesc:
            return run

        def paged(q: Any, k: Any, v: Any, *, page_table: torch.Tensor, **given: Any) -> Any:
            self.calls.append((k, v, page_table))
            layout = desc.layout
            assert page_table.dtype == torch.int32
            assert layout == "thd" or q.shape[layout.index("s")] == 1
            k, v = (gathered(x, page_table, desc.dtype) for x in (k, v))
            if layout == "sbhd":
                k, v = k.transpose(0, 1), v.transpose(0, 1)
            if layout == "thd":
                assert given["max_seqlen_q"] == 1
                batch, capacity = k.shape[:2]
                given["max_seqlen_kv"] = capacity
                starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * capacity
                given["cu_seqlens_kv_padded"] = starts
                k, v = k.flatten(0, 1), v.flatten(0, 1)
            return run(q, k, v, **given)

        return paged


def gathered(x: torch.Tensor | Operand, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(x, Operand):
        codes, scale_inv = (part[table.long()].flatten(1, 2) for part in x[:2])
        return of_codes(codes, scale_inv, dtype)
    return x[table.long()].flatten(1, 2)


def of_codes(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    run = backend("reference").bind(DequantizeDesc(CODES, dtype), codes.device)
    return run(Operand(codes.flatten(0, -2), scale_inv.flatten(0, -2))).view(codes.shape)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """``x [.., heads, size]`` as a cache of codes keeps it."""
    run = backend("reference").bind(QuantizeDesc(x.dtype, CODES, None), x.device)
    codes, scale_inv, _ = run(x.flatten(0, -2)).rowwise
    return of_codes(codes.view(x.shape), scale_inv.view(*x.shape[:-1], 1), x.dtype)


_backends: list[Gathering] = []
_numbers = itertools.count()


def made() -> Gathering:
    """The backend of this test, for the plug-in."""
    return _backends[-1]


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Gathering]]:
    name = f"gathering_{next(_numbers)}"  # what was bound by a name stays
    _backends.append(Gathering())
    devices = (DEVICE.type,)
    spec = BackendSpec(name, devices, f"{__name__}:made", priority=-1, api_version=API_VERSION)
    monkeypatch.setitem(plugins.load().backends, name, spec)
    yield name, _backends[-1]
    _backends.clear()


@pytest.mark.parametrize("format", [None, "e4m3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_single_queries_get_the_pages_as_they_lie(
    layout: str, format: str | None, gathering: tuple[str, Gathering]
) -> None:
    """With the bits of copies; prompts get copies."""
    name, own = gathering
    sequences = random_sequences(PROMPT_THEN_ONE_BY_ONE, BF16)
    layer, results = layer_of(layout), []
    for chosen in ("reference", name):
        cache = cache_for("pages", BF16, storage_format=format)
        with use_backend(chosen):
            results.append(in_steps(layer, cache, sequences, PROMPT_THEN_ONE_BY_ONE))
    for plain, paged in zip(*results, strict=True):
        assert torch.equal(plain, paged)
    assert len(own.calls) == 4
    held = cache.cache_manager.cache[1]
    for k, v, table in own.calls:
        if format is not None:
            assert (k.scale_inv.data_ptr(), v.scale_inv.data_ptr()) == tuple(
                part.data_ptr() for part in held[2:]
            )
            k, v = k.data, v.data
        assert (k.data_ptr(), v.data_ptr()) == (held[0].data_ptr(), held[1].data_ptr())
        assert tuple(table.shape) == (2, 4)
    assert len({table.data_ptr() for _, _, table in own.calls}) == 1


@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_codes_are_those_of_each_head_of_a_token(schedule: str, layout: str, kind: str) -> None:
    """The results are those of whole sequences whose keys and values were rounded so."""
    sequences = random_sequences(SCHEDULES[schedule], BF16)
    layer, cache = layer_of(layout), cache_for(kind, BF16, storage_format="e4m3")
    outputs = in_steps(layer, cache, sequences, SCHEDULES[schedule])
    for got, (q, k, v) in zip(outputs, sequences, strict=True):
        want = whole(layer, (q, rounded(k), rounded(v)))
        torch.testing.assert_close(got, want, atol=2**-7, rtol=2**-7)
        assert not torch.equal(rounded(k), k)


def test_codes_of_large_and_of_small_tokens_are_equally_accurate() -> None:
    """Half a unit of e4m3's three bits, or of its smallest value, 2^-9 of the 448 of amax."""
    cache = cache_for("rows", BF16, storage_format="e4m3")
    k, v = (torch.randn(2, 8, GROUPS, size, device=DEVICE) for size in (K_SIZE, 6))
    k, v = (
        (x * 2.0 ** (torch.arange(8, device=DEVICE) * 5 - 20)[:, None, None]).to(BF16)
        for x in (k, v)
    )
    cache.pre_step({0: 8, 1: 8})
    got = cache.step(1, k, v, "bshd")
    for x, kept in ((k, got.k_cache[:, :8]), (v, got.v_cache[:, :8])):
        x, kept = x.double(), kept.double()
        smallest = 2.0**-10 / 448 * x.abs().amax(-1, keepdim=True)
        # The value is rounded to bfloat16 again.
        assert ((kept - x).abs() <= x.abs() * (2.0**-4 + 2.0**-8) + smallest * 1.01).all()


@pytest.mark.parametrize(("deviation", "decibels"), [(0.5, 30), (1, 28), (2, 25)])
def test_results_of_codes_are_as_near_as_the_page_says(deviation: float, decibels: int) -> None:
    heads, groups, size, tokens = 8, 2, 128, 128
    layer = DotProductAttention(heads, size, groups, qkv_format="bshd", layer_number=1).eval()
    q, k, v = (torch.randn(2, tokens, n, size).to(DEVICE) for n in (heads, groups, groups))
    q, k, v = (x.to(BF16) for x in (q * deviation, k, v))
    cache = InferenceParams(2, tokens, groups, size, BF16, storage_format="e4m3", device=DEVICE)
    cache.pre_step({0: tokens, 1: tokens})
    with torch.no_grad(), use_backend("reference"):
        exact = layer(q.double(), k.double(), v.double())[:, -64:]
        got = layer(q, k, v, inference_params=cache)[:, -64:].double()
    noise = (got - exact).square().sum()
    assert 10 * torch.log10(exact.square().sum() / noise) > decibels


def test_a_cache_of_codes_takes_about_half_the_memory() -> None:
    sizes = (2, 64, 4, 128, BF16)
    plain, codes = (InferenceParams(*sizes, storage_format=one) for one in (None, "e4m3"))
    for cache in (plain, codes):
        cache.allocate_memory(1)
    num_bytes = [
        sum(part.numel() * part.itemsize for part in cache.cache_manager.cache[1])
        for cache in (plain, codes)
    ]
    assert num_bytes[1] / num_bytes[0] == (128 + 4) / 256


@pytest.mark.parametrize("kind", PAGES)
def test_what_a_sequence_leaves_in_codes_reaches_no_other(kind: str) -> None:
    layer, cache = layer_of("bshd"), cache_for(kind, BF16, storage_format="e4m3")
    ((q, k, v), (q2, k2, v2)) = random_sequences([(4, 4)], BF16)
    k[2], v[1] = torch.nan, torch.inf
    got = in_steps(layer, cache, ((q, k, v), (q2, k2, v2)), [(4, 4)])
    assert got[0].isnan().any()
    assert torch.isfinite(got[1]).all()
    cache.pre_step({"b": 4, "c": 2})  # both take over what the first two had
    with torch.no_grad():
        y = layer(*(x[None].repeat(2, 1, 1, 1) for x in (q2, k2, v2)), inference_params=cache)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("kind", PAGES)
def test_codes_saturate_and_count_as_those_of_every_cast(kind: str) -> None:
    """Of tokens alone: what is behind those of a sequence has no meaning."""

    def is_found() -> bool:
        return bool(found_inf(model))

    model, cache = Linear(16, 16, device=DEVICE), cache_for(kind, BF16, storage_format="e4m3")
    k, v = (torch.full((2, 2, GROUPS, size), 2.0, device=DEVICE).to(BF16) for size in (K_SIZE, 6))
    clear_found_inf(model)
    in_training = counter_of(k.device).clone()
    k[0, 1], v[0, 1] = torch.inf, torch.nan
    cache.pre_step({"a": 1, "b": 2})
    cache.step(1, k, v, "bshd")
    cache.pre_step(torch.tensor([1, 2], device=DEVICE), 2)
    cache.step(1, k, v, "bshd")
    with restored_caches():
        cache.pre_step(torch.tensor([2, 2], device=DEVICE), 2)
        cache.step(1, k, v, "bshd")
    assert not is_found()
    k[1, 0, 1, 2], k[1, 0, 1, 3], v[0, 0] = torch.inf, -torch.inf, torch.nan
    for bad, numbers in ((k, {"a": 1, "b": 1}), (v, torch.tensor([1, 1], device=DEVICE))):
        clear_found_inf(model)
        cache.pre_step(numbers, None if bad is k else 2)
        given = (k, torch.ones_like(v)) if bad is k else (torch.ones_like(k), v)
        got = cache.step(1, *given, "bshd")
        assert is_found()
    keys, values = got.k_cache, got.v_cache
    assert keys[1, 4, 1, :4].tolist() == [2, 2, 448, -448]
    assert keys[:, :4].eq(2)[[0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 2, 3]].all()
    assert values[0, 3].isnan().all()
    assert values[1, 5].eq(2).all()
    assert torch.equal(counter_of(k.device), in_training)


@pytest.mark.parametrize("kind", PAGES)
def test_codes_move_with_their_sequences_and_with_copies(kind: str) -> None:
    def step(cache: InferenceParams, counts: dict[str, int]) -> torch.Tensor:
        torch.manual_seed(max(counts.values()))
        longest = max(counts.values())
        qkv = [
            torch.randn(1, longest, heads, size).repeat(len(counts), 1, 1, 1).to(BF16)
            for heads, size in ((4, K_SIZE), (GROUPS, K_SIZE), (GROUPS, 6))
        ]
        cache.pre_step(counts)
        with torch.no_grad():
            return layer(*[x.to(DEVICE) for x in qkv], inference_params=cache)

    layer = layer_of("bshd")
    cache, alone = (cache_for(kind, BF16, storage_format="e4m3") for _ in range(2))
    step(cache, {"a": 5, "b": 5})
    step(alone, {"b": 5})
    kept = pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)
    moved = step(cache, {"b": 1})
    assert torch.equal(moved, step(alone, {"b": 1}))
    for other in kept:
        assert other.storage_format == "e4m3"
        assert torch.equal(step(other, {"b": 1}), moved)


def test_the_step_of_a_cache_of_codes_returns_values() -> None:
    cache = cache_for("pages", BF16, storage_format="e4m3")
    k, v = (torch.randn(2, 5, GROUPS, size, device=DEVICE).to(BF16) for size in (K_SIZE, 6))
    cache.pre_step({0: 5, 1: 5})
    got = cache.step(1, k, v, "bshd")
    assert got.k_cache.dtype == BF16
    assert torch.equal(got.k_cache[:, :5], rounded(k))
    assert torch.equal(got.v_cache[:, :5], rounded(v))
    keys, values = cache.convert_paged_to_nonpaged(1)
    assert torch.equal(keys[:, :5], rounded(k))
    assert torch.equal(values[:, :5], rounded(v))


def test_gradients_through_a_cache_of_codes_are_refused_as_without() -> None:
    layer, cache = layer_of("bshd"), cache_for("pages", BF16, storage_format="e4m3")
    q, k, v = (
        torch.randn(2, 1, heads, size, device=DEVICE).to(BF16).requires_grad_()
        for heads, size in ((4, K_SIZE), (GROUPS, K_SIZE), (GROUPS, 6))
    )
    cache.pre_step({0: 1, 1: 1})
    y = layer(q, k, v, inference_params=cache)
    with pytest.raises(UnsupportedError, match="backward through a KV cache"):
        y.sum().backward()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", PAGES)
def test_compiled_steps_store_codes(kind: str, on_device: bool) -> None:
    def on_host(qkv: list[torch.Tensor], cache: InferenceParams) -> torch.Tensor:
        y: torch.Tensor = layer(*qkv, inference_params=cache)
        return y

    def with_pre_step(qkv: list[torch.Tensor], cache: InferenceParams) -> torch.Tensor:
        cache.pre_step(ones)
        return on_host(qkv, cache)

    torch._dynamo.reset()
    ones = torch.ones(2, dtype=torch.int32, device=DEVICE)
    layer, sequences = layer_of("bshd"), random_sequences([(2, 2), (1, 1)], BF16)
    results = []
    for compiles in (False, True):
        cache = cache_for(kind, BF16, storage_format="e4m3")
        results.append([])
        for span in (slice(0, 2), slice(2, 3)):
            step = with_pre_step if on_device and span.start else on_host
            run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiles else step
            if step is on_host:
                cache.pre_step({0: span.stop - span.start, 1: span.stop - span.start})
            qkv = [torch.stack([one[part][span] for one in sequences]) for part in range(3)]
            with torch.no_grad():
                results[-1].append(run(qkv, cache))
        parts = cache.cache_manager.cache[1]
        results[-1] += [part.flatten(0, 1)[:3] for part in parts]
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, atol=2**-8, rtol=2**-8)


@pytest.mark.parametrize("kind", [CachedAttentionDesc, PagedAttentionDesc])
def test_compiled_steps_read_a_cache_by_operators_or_copies(
    kind: type[AttentionDesc], gathering: tuple[str, Gathering]
) -> None:
    """A graph has an operator of attention that reads rows, and none of one that reads pages."""
    torch._dynamo.reset()
    name, own = gathering
    own.kind = kind
    layer, sequences = layer_of("bshd"), random_sequences([(2, 2), (1, 1)], BF16)
    results: list[list[torch.Tensor]] = []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        cache, results = cache_for("pages", BF16), [*results, []]
        for span in (slice(0, 2), slice(2, 3)):
            cache.pre_step({0: span.stop - span.start, 1: span.stop - span.start})
            qkv = [torch.stack([one[part][span] for one in sequences]) for part in range(3)]
            with torch.no_grad(), use_backend(name):
                results[-1].append(run(*qkv, inference_params=cache))
        if run is layer:
            assert {*own.bound} == {AttentionDesc, kind}
            own.bound.clear()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, atol=2**-8, rtol=2**-8)
    assert {*own.bound} == ({kind} if kind is CachedAttentionDesc else {AttentionDesc})


class Custom(KVCacheManager):
    def __init__(self, **sizes: Any) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"storage_format": "e5m2"}, "expected None or 'e4m3'"),
        ({"storage_format": "e4m3", "dtype": torch.float64}, "bfloat16, float16 and float32"),
        ({"storage_format": "e4m3", "custom_cache_manager": Custom}, "leave out either"),
    ],
)
def test_codes_that_are_not_offered_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        cache_for("rows", **{"dtype": BF16, **options})


@pytest.mark.parametrize("kind", PAGES)
def test_steps_on_the_device_store_codes(kind: str) -> None:
    """With the bits of steps on the host, and faults that are named."""
    layer, (prompts, steps) = layer_of("bshd"), ([(3, 2)], [(1, 1)] * 13)
    host, device = (cache_for(kind, BF16, storage_format="e4m3") for _ in range(2))
    sequences = random_sequences(prompts, BF16)
    for cache in (host, device):
        in_steps(layer, cache, sequences, prompts)
    more = random_sequences(steps, BF16)
    ones = torch.ones(2, dtype=torch.int32, device=DEVICE)
    for at in range(13):
        qkv = [torch.stack([one[part][at : at + 1] for one in more]) for part in range(3)]
        results = []
        for cache, counts in ((host, {0: 1, 1: 1}), (device, ones)):
            cache.pre_step(counts)
            with torch.no_grad():
                results.append(layer(*qkv, inference_params=cache))
        torch.testing.assert_close(*results, atol=2**-9, rtol=2**-8)  # sums of other lengths
    for ours, theirs in zip(
        host.cache_manager.cache[1], device.cache_manager.cache[1], strict=True
    ):
        assert torch.equal(ours[: len(theirs)], theirs)
    device.pre_step(ones)
    with torch.no_grad():
        y = layer(*qkv, inference_params=device)
    assert not y[0].any()
    assert y[1].any()
    with pytest.raises(OperandError, match="sequence 0 of 16 tokens is full"):
        _ = device.sequences
