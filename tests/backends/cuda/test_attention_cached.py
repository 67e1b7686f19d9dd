"""Attention over a cache of one query a sequence: the kernel, and what its call is given."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    AttentionDesc,
    CachedAttentionDesc,
    DequantizeDesc,
    Operand,
    OperandError,
    OperandSpec,
    PagedAttentionDesc,
    QuantizeDesc,
    SingleQueryDesc,
)
from fp8core.chain.attention.pages import CODES
from fp8core_backends.cuda import attention_cached
from fp8core_backends.cuda.attention import bind_attention
from fp8core_backends.cuda.attention_cached import (
    CachedAttention,
    PagedAttention,
    SingleQueryAttention,
    paged_problem,
    single_query_problem,
)
from fp8core_backends.cuda.attention_forward import GraphAttention
from fp8core_backends.cuda.attention_lengths import Keywords, sequences_of
from fp8core_backends.cuda.attention_support import KernelNames
from tests.backends.cuda.cuda_cases import DEVICE, backend

CPU = torch.device("cpu")
LAYOUTS = ("sbhd", "bshd", "thd")
WINDOWS = (((-1, -1), False), ((-1, 0), True), ((20, 0), True), ((3, 5), False))
NAMES = KernelNames("cuDNN", ())


def descriptor(layout: str = "bshd", **changes: Any) -> CachedAttentionDesc:
    values: dict[str, Any] = {
        **{"dtype": torch.bfloat16, "layout": layout, "heads": 4, "groups": 2},
        **{"head_dim": 64, "head_dim_v": 64, "scale": 0.125, "padding": True},
    }
    return CachedAttentionDesc(**values | changes)


def call(
    desc: AttentionDesc, device: torch.device, lengths: tuple[int, ...], capacity: int
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Operands of a step in which the last of several sequences has no query, and the keywords."""
    batch = len(lengths)
    pair = torch.randn(batch, capacity, 2, desc.groups, desc.head_dim, device=device)
    k, v = pair.to(desc.dtype).unbind(2)
    queries = torch.tensor([1] * (batch - 1) + [int(batch == 1)])
    edges, edges_kv = (
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        for counts in (queries, torch.tensor(lengths))
    )
    keywords: dict[str, Any] = {"cu_seqlens_q": edges, "cu_seqlens_kv": edges_kv}
    if desc.layout == "thd":
        q = torch.randn(batch + 3, desc.heads, desc.head_dim, device=device).to(desc.dtype)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        starts = torch.arange(1, batch + 2, dtype=torch.int32, device=device)
        starts_kv = torch.arange(batch + 1, dtype=torch.int32, device=device) * capacity
        keywords |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts_kv}
        return (q, k, v), keywords | {"max_seqlen_q": 1, "max_seqlen_kv": capacity}
    q = torch.randn(batch, 1, desc.heads, desc.head_dim, device=device).to(desc.dtype)
    if desc.layout == "sbhd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return (q, k, v), keywords


def check(run: Callable[..., Any], desc: CachedAttentionDesc, device: torch.device) -> None:
    """Compare calls with the reference's in float64."""
    values = {field.name: getattr(desc, field.name) for field in fields(AttentionDesc)}
    exact = AttentionDesc(**values | {"dtype": torch.float64})
    for lengths, capacity in (((37,), 37), ((5, 130, 0, 64, 9), 130), ((1, 1100, 700), 1100)):
        operands, keywords = call(desc, device, lengths, capacity)
        out, stats, largest = run(*operands, **keywords)
        reference = backend("reference").bind(exact, device)
        want, want_stats, _ = reference(*(x.double() for x in operands), **keywords)
        assert largest is None
        assert (out.shape, out.dtype) == (want.shape, desc.dtype)
        assert (stats.shape, stats.dtype) == (want_stats.shape, torch.float32)
        # Weights are rounded to the dtype, which the sum that divides them is not.
        wide = [x.double() for x in operands]
        size, *_ = reference(*wide[:2], wide[2].abs(), **keywords)
        bound = torch.finfo(desc.dtype).eps * size + 1e-5
        assert ((out.double() - want).abs() <= bound).all()
        torch.testing.assert_close(stats.double(), want_stats, rtol=1e-5, atol=1e-4)


def at(address: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """Return the tensor at ``address``."""
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    memory = (ctypes.c_uint8 * (last * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)


class SingleQuery:
    """Stands for the kernel: it reads and writes at the addresses of its call."""

    def __init__(self, dtype: torch.dtype, *values: Any) -> None:
        self.dtype = dtype
        self.heads, self.groups, self.size, self.scale, *self.window, self.is_at_the_end, _ = values

    def __call__(self, arguments: tuple[int, ...], stream: int) -> None:
        q, k, v = arguments[:4], arguments[4:8], arguments[8:12]
        batch, capacity, edges_q, edges_kv, out, stats, *more = arguments[12:]
        ragged, pages = more[:2] if more and more[0] else (), more[2:]
        pages, mask = pages[:11] if pages and pages[0] else (), pages[11:]
        edges = [
            at(x, torch.int32, (batch + 1,), (1,)).tolist()
            if x
            else range(0, size * batch + 1, size)
            for x, size in ((edges_q, 1), (edges_kv, capacity))
        ]
        starts, rows = list(range(batch)), batch
        if ragged:
            starts, rows = at(ragged[0], torch.int32, (batch + 1,), (1,)).tolist(), ragged[1]
        for i in range(batch):
            row = starts[i]
            if ragged and edges[0][i + 1] == edges[0][i]:
                continue
            query = at(q[0], self.dtype, (rows, self.heads, self.size), (q[1], q[3], 1))[row]
            if pages:
                keys, values = (
                    self.in_pages(x, i, capacity, pages, which) for which, x in enumerate((k, v))
                )
            else:
                keys, values = (
                    at(x[0], self.dtype, (batch, capacity, self.groups, self.size), (*x[1:], 1))[i]
                    for x in (k, v)
                )
            lengths = [x[i + 1] - x[i] for x in edges]
            if mask:
                address, stride = mask
                excluded = at(address, torch.bool, (batch, capacity), (stride, 1))[i]
                keys, values = keys[~excluded], values[~excluded]
                lengths[1] = len(keys)
            values, sums = self.attend(query, keys, values, lengths)
            size = (row + 1, self.heads, self.size)
            at(out, self.dtype, size, (self.heads * self.size, self.size, 1))[row] = values
            at(stats, torch.float32, size[:2], (self.heads, 1))[row] = sums

    def in_pages(
        self, rows: tuple[int, ...], sequence: int, capacity: int, pages: Any, which: int
    ) -> torch.Tensor:
        """Return the keys or values of a sequence ``[capacity, groups, size]``."""
        table, page_size, num_pages, *scales = pages
        columns = capacity // page_size
        own = at(table + 4 * columns * sequence, torch.int32, (columns,), (1,)).long()
        size = (num_pages, page_size, self.groups)
        stored = torch.uint8 if scales else self.dtype
        kept = at(rows[0], stored, (*size, self.size), (*rows[1:], 1))[own.clamp(0, num_pages - 1)]
        if scales:
            address, *strides = scales[4 * which : 4 * which + 4]
            scale = at(address, torch.float32, size, tuple(strides))[own.clamp(0, num_pages - 1)]
            kept = (kept.view(torch.float8_e4m3fn).float() * scale[..., None]).to(self.dtype)
        is_page = ((own >= 0) & (own < num_pages))[:, None, None, None]
        return torch.where(is_page, kept, 0).flatten(0, 1)

    def attend(self, q: Any, k: Any, v: Any, lengths: list[int]) -> tuple[Any, Any]:
        left, right = self.window
        position = lengths[1] - 1 if self.is_at_the_end else 0
        begin = 0 if left < 0 else max(0, position - left)
        end = lengths[1] if right < 0 else min(lengths[1], position + right + 1)
        seen = slice(begin, end if lengths[0] else begin)
        keys, values = (
            x[seen].double().repeat_interleave(self.heads // self.groups, 1) for x in (k, v)
        )
        logits = torch.einsum("hd,khd->hk", q.double(), keys) * self.scale
        weights = logits.softmax(1)
        out = torch.einsum("hk,khd->hd", weights, values)
        return out.to(self.dtype), logits.logsumexp(1).float()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Binds a descriptor on the CPU, with a stand-in of the kernel."""
    native = SimpleNamespace(
        SingleQuery=SingleQuery,
        InputType=SimpleNamespace(
            __members__={"bfloat16": torch.bfloat16, "float16": torch.float16}
        ),
    )

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype).fill_(math.nan)

    monkeypatch.setattr(attention_cached, "raw_stream", lambda index: 0)
    monkeypatch.setattr(attention_cached, "allocator", lambda index: empty)

    def bind(desc: AttentionDesc) -> Any:
        cuda, run = torch.device("cuda", 0), None
        if isinstance(desc, PagedAttentionDesc):
            run = PagedAttention(desc, cuda, native)
        if isinstance(desc, SingleQueryDesc):
            run = SingleQueryAttention(desc, cuda, native)
        run = run or CachedAttention(desc, cuda, NAMES, native)
        run.device = CPU
        return run

    return bind


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("window", "at_the_end"), WINDOWS)
def test_the_kernel_is_given_the_rows_of_a_layout(
    layout: str, window: tuple[int, int], at_the_end: bool, bound: Callable[..., Any]
) -> None:
    desc = descriptor(layout, window=window, bottom_right=at_the_end)
    check(bound(desc), desc, CPU)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_go_to_cudnn(
    layout: str, bound: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(GraphAttention, "__call__", lambda *tensors, **words: calls.append(words))
    desc = descriptor(layout)
    (q, k, v), keywords = call(desc, CPU, (5, 7), 8)
    run = bound(desc)
    run(q, k, v, **keywords)
    assert calls == []
    if layout == "thd":
        keywords["max_seqlen_q"] = 2
    else:
        q = torch.cat((q, q), dim=layout.index("s"))
    run(q, k, v, **keywords)
    assert calls == [{"cu_seqlens_q_padded": None, **keywords}]


def test_lengths_of_another_form_are_refused(bound: Callable[..., Any]) -> None:
    desc = descriptor()
    operands, keywords = call(desc, CPU, (5, 7), 8)
    wrong = {"cu_seqlens_kv": keywords["cu_seqlens_kv"].long()}
    with pytest.raises(OperandError, match=r"expected torch\.int32 \[3\]"):
        bound(desc)(*operands, **keywords | wrong)


def test_a_cache_whose_capacity_is_missing_goes_to_what_refuses_it(
    bound: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_lengths(run: CachedAttention, q: Any, k: Any, v: Any, **words: Any) -> None:
        lengths = [words.get(name) for name in Keywords._fields]
        sequences_of(run.desc, q, k, Keywords(*lengths))

    monkeypatch.setattr(GraphAttention, "__call__", read_lengths)
    desc = descriptor("thd")
    operands, keywords = call(desc, CPU, (5, 7), 8)
    del keywords["max_seqlen_kv"]
    with pytest.raises(OperandError, match="max_seqlen_kv are missing"):
        bound(desc)(*operands, **keywords)


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 96, "head_dim_v": 96}, {"head_dim_v": 128}, {"softmax": "off-by-one"}],
    ids=str,
)
def test_other_attention_is_cudnn_s_alone(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = lambda desc: (False, NAMES)  # noqa: E731  the machine has no cuDNN
    monkeypatch.setattr("fp8core_backends.cuda.attention._kernels", names)
    native = SimpleNamespace(SingleQuery=pytest.fail)
    run = bind_attention(descriptor(**changes), torch.device("cuda", 0), native)
    assert type(run) is GraphAttention


def paged(
    desc: CachedAttentionDesc, operands: Any, keywords: dict[str, Any], page_size: int, kv: Any
) -> tuple[PagedAttentionDesc, Any, dict[str, Any], Any]:
    """A call with keys and values in pages that lie in any order among others, and the operands of
    the same call without pages."""
    q, k, v = operands
    device, batch = q.device, len(keywords["cu_seqlens_q"]) - 1
    if desc.layout == "sbhd":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    k, v = (x.reshape(batch, -1, page_size, *x.shape[-2:]) for x in (k, v))
    columns = k.shape[1]
    table = torch.randperm(batch * columns + 3)[: batch * columns].to(device)
    pages, plain = [], []
    for x in (k, v):
        pool = x.new_full((batch * columns + 3, *x.shape[2:]), torch.nan)  # of other sequences
        pool[table] = x.flatten(0, 1)
        if kv is not None:
            run = backend("reference").bind(QuantizeDesc(desc.dtype, kv, None), device)
            operand = run(pool.flatten(0, -2)).rowwise
            values = backend("reference").bind(DequantizeDesc(kv, desc.dtype), device)(operand)
            scales = operand.scale_inv.view(*pool.shape[:-1], 1)
            pages.append(Operand(operand.data.view(pool.shape), scales))
            x = values.view(pool.shape)[table].view(x.shape)
        else:
            pages.append(pool)
        x = x.flatten(1, 2)
        x = x.transpose(0, 1) if desc.layout == "sbhd" else x
        plain.append(x.flatten(0, 1) if desc.layout == "thd" else x)
    values = {field.name: getattr(desc, field.name) for field in fields(desc)}
    more = {"page_table": table.view(batch, columns).int()}
    return PagedAttentionDesc(**values, kv=kv), (q, *pages), keywords | more, (q, *plain)


CALLS = (((36,), 36), ((5, 130, 0, 64, 9), 132), ((1, 1100, 700), 1104))
"""Lengths of sequences, and a capacity of pages of 1, 2, 3 and 4 keys."""


@pytest.mark.parametrize("kv", [None, CODES], ids=["bfloat16", "codes"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("window", "at_the_end"), WINDOWS)
def test_the_kernel_is_given_the_pages(
    layout: str, window: tuple[int, int], at_the_end: bool, kv: Any, bound: Callable[..., Any]
) -> None:
    plain = descriptor(layout, window=window, bottom_right=at_the_end)
    for (lengths, capacity), page_size in zip(CALLS, (3, 4, 2), strict=True):
        operands, keywords = call(plain, CPU, lengths, capacity)
        desc, pages, given, rows = paged(plain, operands, keywords, page_size, kv)
        for ours, theirs in zip(
            bound(desc)(*pages, **given), bound(plain)(*rows, **keywords), strict=True
        ):
            assert ours is theirs or torch.equal(ours, theirs)


WRONG_PAGES: dict[str, Any] = {
    "int64": lambda q, k, v, table: (q, k, v, table.long()),
    "one dimension": lambda q, k, v, table: (q, k, v, table[0]),
    "other batch": lambda q, k, v, table: (q, k, v, table[:1]),
    "no columns": lambda q, k, v, table: (q, k, v, table[:, :0]),
    "two queries": lambda q, k, v, table: (torch.cat((q, q), 1), k, v, table),
    "other heads": lambda q, k, v, table: (q, k[..., :1, :], v, table),
    "other dtype": lambda q, k, v, table: (q, k, v.half(), table),
    "scales": lambda q, k, v, table: (q, Operand(k, torch.ones(*k.shape[:-1], 1)), v, table),
    "bytes": lambda q, k, v, table: (q, k.view(torch.uint8)[..., ::2], v, table),
}


@pytest.mark.parametrize("name", WRONG_PAGES)
def test_pages_of_another_form_are_refused(name: str, bound: Callable[..., Any]) -> None:
    plain = descriptor()
    operands, keywords = call(plain, CPU, (5, 7), 8)
    desc, pages, given, _ = paged(plain, operands, keywords, 4, None)
    *changed, given["page_table"] = WRONG_PAGES[name](*pages, given["page_table"])
    with pytest.raises(OperandError, match=r"k and v \[pages, page size, 2, 64\]"):
        bound(desc)(*changed, **given)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kv": CODES}, None),
        ({"kv": OperandSpec("e5m2", (1, 0), 57344.0)}, "codes are e4m3"),
        ({"kv": OperandSpec("e4m3", (0, 0), 448.0)}, "codes are e4m3"),
        ({"head_dim": 96, "head_dim_v": 96}, "heads of 96"),
        ({"softmax": "off-by-one"}, "no sink"),
        ({"padding": False}, "sequences with lengths"),
        ({"dtype": torch.float32}, "no attention of torch.float32"),
        ({"groups": 3}, "no multiple"),
    ],
    ids=str,
)
def test_pages_that_no_kernel_reads_are_denied(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    values = {field.name: getattr(descriptor(), field.name) for field in fields(AttentionDesc)}
    problem = paged_problem(PagedAttentionDesc(**values | changes), torch.device("cuda", 0))
    assert problem is None if reason is None else reason in str(problem)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("kv", [None, CODES], ids=["16 bits", "codes"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_have_the_bits_of_rows(layout: str, head_dim: int, kv: Any) -> None:
    """Codes those of their values, rounded to the dtype."""
    for dtype, (heads, groups) in itertools.product(
        (torch.bfloat16, torch.float16), ((8, 8), (12, 4), (10, 1))
    ):
        shape = {"heads": heads, "groups": groups, "head_dim": head_dim, "head_dim_v": head_dim}
        for window, at_the_end in WINDOWS:
            masks = {"window": window, "bottom_right": at_the_end}
            plain = descriptor(layout, dtype=dtype, scale=head_dim**-0.5, **shape, **masks)
            for (lengths, capacity), page_size in zip(CALLS, (1, 4, 3), strict=True):
                operands, keywords = call(plain, DEVICE, lengths, capacity)
                desc, pages, given, rows = paged(plain, operands, keywords, page_size, kv)
                got = backend("cuda").bind(desc, DEVICE)(*pages, **given)
                want = backend("cuda").bind(plain, DEVICE)(*rows, **keywords)
                for ours, theirs in zip(got[:2], want[:2], strict=True):
                    assert torch.equal(ours, theirs)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("kv", [None, CODES], ids=["bfloat16", "codes"])
def test_pages_outside_of_the_pool_are_zeros(kv: Any) -> None:
    """compute-sanitizer sees that nothing is read there."""
    plain = descriptor(window=(-1, 0), bottom_right=True)
    operands, keywords = call(plain, DEVICE, (40, 36), 40)
    keywords["cu_seqlens_q"] = torch.arange(3, dtype=torch.int32, device=DEVICE)
    desc, pages, given, (q, k, v) = paged(plain, operands, keywords, 4, kv)
    for number in (13 + 10, 2**31 - 1, -1, -(2**31)):  # the pool has 23 pages
        k[0, 8:12], v[0, 8:12] = 0, 0
        given["page_table"][0, 2] = number
        got = backend("cuda").bind(desc, DEVICE)(*pages, **given)
        want = backend("cuda").bind(plain, DEVICE)(q, k, v, **keywords)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.needs_accelerator("cuda")
def test_a_captured_step_reads_the_pages_of_its_replay() -> None:
    plain = descriptor("bshd", window=(-1, 0), bottom_right=True)
    operands, keywords = call(plain, DEVICE, (40, 40), 64)
    desc, pages, given, _ = paged(plain, operands, keywords, 4, None)
    run = backend("cuda").bind(desc, DEVICE)
    run(*pages, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, stats, _ = run(*pages, **given)
    given["page_table"].copy_(given["page_table"].flip(0).clone())
    graph.replay()
    want, want_stats, _ = run(*pages, **given)
    assert torch.equal(out, want)
    assert torch.equal(stats, want_stats)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (4, 2), (32, 8), (12, 4), (10, 1), (64, 4)])
def test_attention_is_the_reference_s(layout: str, head_dim: int, heads: int, groups: int) -> None:
    shape = {"heads": heads, "groups": groups, "head_dim": head_dim, "head_dim_v": head_dim}
    for dtype in (torch.bfloat16, torch.float16):
        for window, at_the_end in WINDOWS:
            masks = {"window": window, "bottom_right": at_the_end}
            desc = descriptor(layout, dtype=dtype, scale=head_dim**-0.5, **shape, **masks)
            check(backend("cuda").bind(desc, DEVICE), desc, DEVICE)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_that_are_not_those_of_the_cache_stay_inside(layout: str) -> None:
    """compute-sanitizer sees where they lead."""
    desc = descriptor(layout, window=(-1, 0), bottom_right=True)
    operands, keywords = call(desc, DEVICE, (40, 40), 40)
    run = backend("cuda").bind(desc, DEVICE)
    for edges in ((0, 2**30, -5), (7, 3, 2**31 - 1), (-(2**31), 2**31 - 1, 0)):
        hostile = torch.tensor(edges, dtype=torch.int32, device=DEVICE)
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"):
            if name in keywords:
                run(*operands, **keywords | {name: hostile})
    torch.cuda.synchronize()


@pytest.mark.needs_accelerator("cuda")
def test_a_captured_step_reads_the_lengths_of_its_replay() -> None:
    desc = descriptor("bshd", window=(-1, 0), bottom_right=True)
    operands, keywords = call(desc, DEVICE, (40, 40), 64)
    run = backend("cuda").bind(desc, DEVICE)
    run(*operands, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, stats, _ = run(*operands, **keywords)
    keywords["cu_seqlens_kv"].copy_(torch.tensor((0, 3, 64), device=DEVICE))
    graph.replay()
    want, want_stats, _ = run(*operands, **keywords)
    assert torch.equal(out, want)
    assert torch.equal(stats, want_stats)


def masked_descriptor(layout: str = "bshd", **changes: Any) -> SingleQueryDesc:
    values = {
        field.name: getattr(descriptor(layout), field.name) for field in fields(AttentionDesc)
    }
    return SingleQueryDesc(**values | {"padding": False, "arbitrary": True} | changes)


def foreign_cache(
    desc: SingleQueryDesc, device: torch.device, batch: int, capacity: int
) -> list[torch.Tensor]:
    """Operands whose keys and values lie as transformers' caches have them, heads before tokens."""
    q = torch.randn(batch, 1, desc.heads, desc.head_dim, device=device).to(desc.dtype)
    k, v = torch.randn(2, batch, desc.groups, capacity, desc.head_dim, device=device).to(desc.dtype)
    operands = [q, k.transpose(1, 2), v.transpose(1, 2)]
    return [x.transpose(0, 1) for x in operands] if desc.layout == "sbhd" else operands


def masks(batch: int, capacity: int, device: torch.device) -> dict[str, torch.Tensor | None]:
    """Masks by name, True where a key is excluded; the last sequence of the first sees no key."""
    keys = torch.arange(capacity, device=device)
    ends = torch.arange(batch, device=device)[:, None] * capacity // batch
    behind = (keys > ends) | (keys >= capacity - 3)
    behind[-1] = batch > 1
    gaps = torch.rand(batch, capacity, device=device) < 0.7
    one = (keys > capacity // 2)[None]
    wide = torch.zeros(batch, 2 * capacity + 3, dtype=torch.bool, device=device)
    wide[:, 3 : 3 + capacity] = gaps
    return {
        **{"behind": behind, "before": keys < ends, "gaps": gaps, "one for all": one},
        **{"expanded": one.expand(batch, -1), "rows of others": wide[:, 3 : 3 + capacity]},
        **{"every other": wide.repeat_interleave(2, 1)[:, ::2][:, 3 : 3 + capacity]},
        "none": None,
    }


def check_masks(bind: Callable[..., Any], desc: SingleQueryDesc, device: torch.device) -> None:
    """Compare calls with the reference's in float64, and with those of other strides."""
    for batch, capacity in ((1, 5), (3, 130), (2, 1100)):
        operands = foreign_cache(desc, device, batch, capacity)
        for mask in masks(batch, capacity, device).values():
            asked = replace(desc, arbitrary=mask is not None)
            keywords = {} if mask is None else {"mask": mask[:, None, None]}
            out, stats, largest = bind(asked)(*operands, **keywords)
            values = {field.name: getattr(asked, field.name) for field in fields(AttentionDesc)}
            exact = AttentionDesc(**values | {"dtype": torch.float64})
            reference = backend("reference").bind(exact, device)
            wide = [x.double() for x in operands]
            want, want_stats, _ = reference(*wide, **keywords)
            assert largest is None
            assert (out.shape, out.dtype) == (want.shape, desc.dtype)
            size, *_ = reference(*wide[:2], wide[2].abs(), **keywords)
            bound = torch.finfo(desc.dtype).eps * size + 1e-5
            assert ((out.double() - want).abs() <= bound).all()
            torch.testing.assert_close(stats.double(), want_stats, rtol=1e-5, atol=1e-4)
            whole = [x.contiguous() for x in operands]
            assert torch.equal(bind(asked)(*whole, **keywords)[0], out)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_the_kernel_is_given_another_library_s_cache_and_mask(
    layout: str, bound: Callable[..., Any]
) -> None:
    check_masks(bound, masked_descriptor(layout), CPU)


WRONG_MASKS: dict[str, Any] = {
    "missing": lambda mask: None,
    "numbers": lambda mask: mask.float(),
    "of another batch": lambda mask: mask[:1].expand(3, -1, -1, -1),
    "of heads": lambda mask: mask.expand(-1, 4, -1, -1),
    "of another capacity": lambda mask: mask[..., :7],
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_masks_of_another_form_are_refused(name: str, bound: Callable[..., Any]) -> None:
    desc = masked_descriptor()
    operands = foreign_cache(desc, CPU, 2, 8)
    mask = WRONG_MASKS[name](torch.zeros(2, 1, 1, 8, dtype=torch.bool))
    with pytest.raises(OperandError, match=r"expected torch\.bool \[2 or 1, 1, 1, 8\]"):
        bound(desc)(*operands, mask=mask)


def test_another_library_s_cache_has_one_query_and_keys(bound: Callable[..., Any]) -> None:
    desc = masked_descriptor(arbitrary=False)
    q, k, v = foreign_cache(desc, CPU, 2, 8)
    for wrong in ((torch.cat((q, q), 1), k, v), (q, k[:, :0], v[:, :0]), (q[:0], k[:0], v[:0])):
        with pytest.raises(OperandError, match="one query a sequence, and a key"):
            bound(desc)(*wrong)
    with pytest.raises(OperandError, match="expected None"):
        bound(desc)(q, k, v, mask=torch.zeros(2, 1, 1, 8, dtype=torch.bool))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"arbitrary": False}, None),
        ({"layout": "thd"}, "thd without padding"),
        ({"padding": True}, "an arbitrary mask excludes padding"),
        ({"padding": True, "arbitrary": False}, "what padding would"),
        ({"head_dim": 96, "head_dim_v": 96}, "heads of 96"),
        ({"bias": "post_scale"}, "no bias"),
        ({"dropout": 0.1}, "no dropout"),
        ({"dtype": torch.float32}, "no attention of torch.float32"),
    ],
    ids=str,
)
def test_another_library_s_cache_that_no_kernel_reads_is_denied(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    problem = single_query_problem(masked_descriptor(**changes), torch.device("cuda", 0))
    assert problem is None if reason is None else reason in str(problem)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_exclude_keys_on_the_device(layout: str, head_dim: int) -> None:
    for dtype, (heads, groups) in itertools.product(
        (torch.bfloat16, torch.float16), ((8, 8), (12, 4), (10, 1))
    ):
        shape = {"heads": heads, "groups": groups, "head_dim": head_dim, "head_dim_v": head_dim}
        desc = masked_descriptor(layout, dtype=dtype, scale=head_dim**-0.5, **shape)
        check_masks(lambda asked: backend("cuda").bind(asked, DEVICE), desc, DEVICE)


@pytest.mark.needs_accelerator("cuda")
def test_a_mask_of_a_prefix_has_the_bits_of_its_length() -> None:
    """At every place of the mask relative to the words that the kernel reads."""
    plain = descriptor()
    values = {field.name: getattr(plain, field.name) for field in fields(AttentionDesc)}
    desc = SingleQueryDesc(**values | {"padding": False, "arbitrary": True})
    for start, length in itertools.product(range(17), (1, 15, 16, 17, 63, 64, 65, 200)):
        operands, keywords = call(plain, DEVICE, (length,), 200)
        mask = torch.ones(start + 200, dtype=torch.bool, device=DEVICE)[start:]
        mask[:length] = False
        got = backend("cuda").bind(desc, DEVICE)(*operands, mask=mask[None, None, None])
        want = backend("cuda").bind(plain, DEVICE)(*operands, **keywords)
        for ours, theirs in zip(got[:2], want[:2], strict=True):
            assert torch.equal(ours, theirs)
