"""What the ranks of the tests of context parallelism run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fp8core
from fp8core.chain.sequence_chunks import Chunks
from fp8core.collectives import of_group
from fp8core.distributed import gather_from_cp_ranks, get_batch_on_this_cp_rank
from fp8core.modules.layers.operation import DropPath, SampleSplit
from fp8core.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.distributed.programs import raised
from tests.ranks import device

SEED = 3
HEADS, GROUPS, DIM = 8, 4, 16
LENGTH, BATCH = 32, 2
# Sequences in thd, with the padding that makes each a multiple of 8 tokens.
STARTS, USED = (0, 16, 24, 48), (13, 8, 19)
WRONG_STARTS = {
    "starts within a chunk": [0, 18, 24, 48],
    "starts behind the end": [0, 16, 24, 52],
    "starts that descend": [0, 24, 16, 48],
    "starts in two dimensions": [[0, 48]],
}


class Case(NamedTuple):
    """A call: the layer's arguments, and how tokens are laid out."""

    layout: str = "sbhd"
    mask: str = "causal"
    dtype: torch.dtype = torch.float32
    layer: Mapping[str, Any] = MappingProxyType({})
    recipe: Any = None
    has_lengths: bool = False


CASES = {
    "causal": Case(),
    "bshd": Case("bshd"),
    "no_mask": Case(mask="no_mask"),
    "padding": Case("bshd", "padding", has_lengths=True),
    "padding_causal": Case("sbhd", "padding_causal", has_lengths=True),
    "thd": Case("thd", "padding", has_lengths=True),
    "thd_causal": Case("thd", "padding_causal", has_lengths=True),
    "two_sizes": Case(layer={"kv_channels": (16, 24)}),
    "learnable": Case(layer={"softmax_type": "learnable"}),
    "softcap": Case(layer={"softcap": 2.0}),
    "bfloat16": Case(dtype=torch.bfloat16),
    "current": Case(
        dtype=torch.bfloat16,
        recipe=Float8CurrentScaling(fp8_dpa=True, fp8_dpa_backward="dequantized"),
    ),
    "float64": Case(dtype=torch.float64),
    "float64_thd": Case("thd", "padding_causal", torch.float64, has_lengths=True),
    "delayed": Case(
        dtype=torch.bfloat16,
        recipe=DelayedScaling(fp8_dpa=True, fp8_dpa_backward="fp8"),
    ),
    "window": Case(layer={"window_size": (5, 0)}),
}
WAYS = ("p2p", "all_gather", "a2a")
TWO = [(name, way) for name in CASES for way in WAYS if (name, way) != ("window", "p2p")]
FOUR = [
    (name, way) for name in ("causal", "thd_causal", "padding_causal") for way in (*WAYS, "a2a+p2p")
]


class Tensors(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor


def tensors_of(case: Case) -> Tensors:
    """The whole sequences."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = case.layer.get("kv_channels", (DIM, DIM))
    tokens = {
        "sbhd": (LENGTH, BATCH),
        "bshd": (BATCH, LENGTH),
        "thd": (STARTS[-1],),
    }[case.layout]

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*tokens, *size, generator=generator).to(case.dtype)

    return Tensors(
        normal(HEADS, sizes[0]),
        normal(GROUPS, sizes[0]),
        normal(GROUPS, sizes[1]),
        normal(HEADS * sizes[1]),
    )


def keywords_of(case: Case) -> dict[str, Any]:
    if not case.has_lengths:
        return {}
    if case.layout != "thd":
        lengths = torch.tensor([0, LENGTH - 9, LENGTH - 9 + 14], dtype=torch.int32)
        return {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    used = torch.tensor([0, *USED]).cumsum(0).int()
    starts = torch.tensor(STARTS, dtype=torch.int32)
    return {
        "cu_seqlens_q": used,
        "cu_seqlens_kv": used,
        "cu_seqlens_q_padded": starts,
        "cu_seqlens_kv_padded": starts,
    }


def layer_of(case: Case) -> fp8core.DotProductAttention:
    arguments = {"kv_channels": DIM, "num_gqa_groups": GROUPS} | dict(case.layer)
    layer = fp8core.DotProductAttention(
        HEADS, qkv_format=case.layout, attn_mask_type=case.mask, device=device(), **arguments
    )
    if layer.softmax_offset is not None:
        with torch.no_grad():
            layer.softmax_offset.copy_(torch.linspace(-1, 1, HEADS))
    return layer


def attend(case: Case, tensors: Tensors, **options: Any) -> dict[str, torch.Tensor]:
    """Run forward and backward of ``tensors``."""
    layer = layer_of(case)
    if options:
        layer.set_context_parallel_group(**options)
    for _ in range(2 if isinstance(case.recipe, DelayedScaling) else 1):  # scales of a step before
        layer.zero_grad()
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        with fp8core.autocast(recipe=case.recipe, enabled=case.recipe is not None):
            out = layer(*leaves, **keywords_of(case))
        out.backward(tensors.grad)
    names = ("q", "k", "v")
    results = {"out": out.detach()} | {
        name: leaf.grad for name, leaf in zip(names, leaves, strict=True)
    }
    if layer.softmax_offset is not None:
        results["offset"] = layer.softmax_offset.grad
    return results


def chunks_of(case: Case, size: int) -> Chunks:
    starts = torch.tensor(STARTS, dtype=torch.int32) if case.layout == "thd" else None
    return Chunks(case.layout, size, starts)


def expected(case: Case) -> dict[str, torch.Tensor]:
    """What one process computes."""
    return attend(case, tensors_of(case))


def of_rank(case: Case, size: int, rank: int) -> Tensors:
    chunks = chunks_of(case, size)
    return Tensors(*(chunks.parts(x)[rank] for x in tensors_of(case)))


def block() -> fp8core.TransformerLayer:
    torch.manual_seed(SEED)
    return fp8core.TransformerLayer(
        64,
        128,
        4,
        num_gqa_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        device=device(),
    )


def block_input() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, 64, generator=torch.Generator().manual_seed(SEED))


def run_block(layer: fp8core.TransformerLayer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer with rotary embeddings; the gradients of its parameters are a rank's share."""
    freqs = fp8core.RotaryPositionEmbedding(16, device=device())(LENGTH)
    leaf = x.clone().requires_grad_()
    y = layer(leaf, rotary_pos_emb=freqs)
    (y * y).sum().backward()
    weight = layer.self_attention.layernorm_qkv.weight
    return {"out": y.detach(), "grad": leaf.grad, "weight": weight.grad}


def dropped(group: dist.ProcessGroup, rank: int, way: str) -> dict[str, float]:
    """The products of the result and its gradient, and of the values and theirs: equal over all
    ranks if backward drops what forward dropped, as the result is linear in the values."""
    case = Case(layer={"attention_dropout": 0.5}, dtype=torch.float64)
    torch.manual_seed(SEED)
    mine = of_rank(case, 2, rank)
    results = attend(case, mine, cp_group=group, cp_comm_type=way)
    without = attend(case._replace(layer={}), mine, cp_group=group, cp_comm_type=way)
    return {
        "out": float((results["out"] * mine.grad).sum()),
        "v": float((results["v"] * mine.v).sum()),
        "differs": float((results["out"] - without["out"]).abs().max()),
    }


def largest(group: dist.ProcessGroup, rank: int, way: str) -> torch.Tensor:
    case = Case(layer={"return_max_logit": True})
    layer = layer_of(case)
    layer.set_context_parallel_group(group, cp_comm_type=way)
    return layer(*of_rank(case, 2, rank)[:3])[1]


def compiled(group: dist.ProcessGroup, rank: int, way: str) -> bool:
    """Whether a graph without a break gives the bits of eager."""
    layer = layer_of(CASES["causal"])
    layer.set_context_parallel_group(group, cp_comm_type=way)
    mine = of_rank(CASES["causal"], 2, rank)
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in mine[:3]]
        out = call(*leaves)
        out.backward(mine.grad)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return all(map(torch.equal, *found))


def refused(group: dist.ProcessGroup, across: dist.ProcessGroup, rank: int) -> dict[str, str]:
    """The errors of calls that a group does not offer, on this rank."""
    layer = layer_of(CASES["causal"])
    layer.set_context_parallel_group(group, cp_comm_type="a2a")
    q, k, v, _ = of_rank(CASES["causal"], 2, rank)
    fresh = layer_of(CASES["causal"])
    fresh.set_context_parallel_group(group)
    errors = {
        "odd": raised(lambda: layer(q[:-1], k[:-1], v[:-1])),
        "odd on one": raised(lambda: fresh(*(x[: -1 if rank == 0 else None] for x in (q, k, v)))),
        "differing": raised(lambda: layer(*((q, k, v) if rank else (q[:-2], k[:-2], v[:-2])))),
    }
    packed = CASES["thd_causal"]
    ring = layer_of(packed)
    ring.set_context_parallel_group(group)
    starts = torch.tensor([0, 14, 22, 48], dtype=torch.int32)
    given = keywords_of(packed) | {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    tensors = of_rank(packed, 2, rank)[:3]
    errors["cut"] = raised(lambda: ring(*tensors, **given))
    few = fp8core.DotProductAttention(3, DIM, qkv_format="sbhd", cp_group=group, cp_comm_type="a2a")
    errors["heads"] = raised(lambda: few(q[:, :, :3], q[:, :, :3], q[:, :, :3]))
    windowed = layer_of(CASES["window"])
    windowed.set_context_parallel_group(group)
    errors["window"] = raised(lambda: windowed(q, k, v))
    errors["alibi"] = raised(
        lambda: ring(*tensors, core_attention_bias_type="alibi", **keywords_of(packed))
    )
    errors["ranks"] = raised(lambda: layer.set_context_parallel_group(group, [7, 8]))
    both = layer_of(CASES["delayed"])
    both.set_context_parallel_group([group, across], cp_comm_type="a2a+p2p")

    def attend_delayed() -> None:
        with fp8core.autocast(recipe=CASES["delayed"].recipe):
            both(*(x.bfloat16() for x in (q, k, v)))

    errors["delayed"] = raised(attend_delayed)
    errors["hierarchy"] = raised(
        lambda: layer.set_context_parallel_group(group, cp_comm_type="a2a+p2p")
    )
    return errors


def recipes(group: dist.ProcessGroup, rank: int, way: str) -> dict[str, str]:
    """The errors of calls under a recipe that differs between the ranks."""
    mine = of_rank(CASES["current"], 2, rank)
    current = Float8CurrentScaling(fp8_dpa=True, fp8_dpa_backward="dequantized")
    e5m2 = Float8CurrentScaling(
        fp8_dpa=True, fp8_dpa_backward="dequantized", fp8_format=Format.E5M2
    )
    pairs = {"one rank alone": (current, None), "formats": (current, e5m2)}
    return {
        name: raised(
            lambda pair=pair: attend(
                CASES["current"]._replace(recipe=pair[rank]),
                mine,
                cp_group=group,
                cp_comm_type=way,
            )
        )
        for name, pair in pairs.items()
    }


def kept_samples(pair: dist.ProcessGroup, rank: int, way: str, layout: str) -> list[list[bool]]:
    """By sample, which of this rank's tokens a layer with dropped paths keeps; each rank draws
    other numbers. ``way``: its tokens are shared by context or by sequence parallelism."""
    spread = {
        "context": {},
        "sequence": {"tp_group": pair, "sequence_parallel": True, "set_parallel_mode": True},
    }
    layer = fp8core.TransformerLayer(
        64,
        128,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        drop_path_rate=0.5,
        parallel_attention_mlp=True,
        self_attn_mask_type="padding" if layout == "thd" else "no_mask",
        attn_input_format=layout,
        device=device(),
        **spread[way],
    )
    if way == "context":
        layer.set_context_parallel_group(pair, None, None, "p2p")
    # Eight samples of four or eight tokens.
    starts = torch.tensor([0, 8, 12, 20, 24, 32, 36, 44, 48], dtype=torch.int32)
    sample = torch.bucketize(torch.arange(48), starts[1:], right=True)
    given: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": 8}
    if layout != "thd":
        sample, given = torch.arange(8).expand(4, 8), {}
    if way == "context":
        packed = starts if layout == "thd" else None
        sample = get_batch_on_this_cp_rank(sample, pair, 0, packed)
    else:
        sample = sample.chunk(2)[rank]
    torch.manual_seed(rank)
    x = torch.randn(*sample.shape, 64)
    is_kept = (layer(x, **given) != x).all(-1)
    return [is_kept[sample == at].tolist() for at in range(8)]


def other_samples(pair: dist.ProcessGroup, rank: int) -> str:
    """The error where ranks that share samples have other numbers of them."""
    split = SampleSplit((of_group(pair).group_name,))
    return raised(lambda: DropPath(0.5, "sbhd")(torch.ones(2, 3 + rank, 4), None, split))


def without_tokens(group: dist.ProcessGroup, way: str) -> list[int]:
    """The shape of the gradient of an input that has no tokens."""
    layer = layer_of(CASES["causal"])
    layer.set_context_parallel_group(group, cp_comm_type=way)
    leaves = [x[:0].clone().requires_grad_() for x in of_rank(CASES["causal"], 2, 0)[:3]]
    layer(*leaves).sum().backward()
    assert leaves[0].grad is not None
    return list(leaves[0].grad.shape)


def helpers(group: dist.ProcessGroup) -> dict[str, Any]:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    batch = get_batch_on_this_cp_rank({"tokens": tokens, "mask": None}, group)
    packed, starts = torch.arange(STARTS[-1]), torch.tensor(STARTS)
    mine = get_batch_on_this_cp_rank(packed, group, 0, starts)
    others = {name: torch.tensor(wrong) for name, wrong in WRONG_STARTS.items()}
    other_here = starts.clone()
    other_here[1:-1] += 4 * dist.get_rank(group)
    others["starts of one rank"] = other_here
    return {
        **{
            name: raised(partial(gather_from_cp_ranks, mine, group, 0, wrong))
            for name, wrong in others.items()
        },
        "batch": batch["tokens"],
        "whole": gather_from_cp_ranks(batch["tokens"], group),
        "packed": mine,
        "whole packed": gather_from_cp_ranks(mine, group, 0, starts),
        "odd": raised(lambda: get_batch_on_this_cp_rank(tokens[:, :-2], group)),
        "differing": raised(
            lambda: gather_from_cp_ranks(tokens[: 1 + dist.get_rank(group)], group)
        ),
    }


def work(rank: int) -> dict[str, Any]:
    """Every case by every way over two ranks, and some over four."""
    limit = timedelta(seconds=60)
    pairs = [dist.new_group(ranks, timeout=limit) for ranks in ((0, 1), (2, 3))]
    across = [dist.new_group(ranks, timeout=limit) for ranks in ((0, 2), (1, 3))]
    pair = pairs[rank // 2]
    found: dict[str, Any] = {}
    for way in ("p2p", "all_gather", "a2a"):
        found[f"no tokens {way}"] = without_tokens(pair, way)
    for name, way in TWO:
        mine = of_rank(CASES[name], 2, rank % 2)
        found[f"2 {way} {name}"] = attend(CASES[name], mine, cp_group=pair, cp_comm_type=way)
    for name, way in FOUR:
        mine = of_rank(CASES[name], 4, rank)
        group: Any = [pair, across[rank % 2]] if way == "a2a+p2p" else dist.group.WORLD
        found[f"4 {way} {name}"] = attend(CASES[name], mine, cp_group=group, cp_comm_type=way)
    traffic = of_group(pair).traffic
    for way in WAYS:
        traffic.clear()
        attend(
            CASES["no_mask"],
            of_rank(CASES["no_mask"], 2, rank % 2),
            cp_group=pair,
            cp_comm_type=way,
        )
        found[f"bytes {way}"] = {purpose: count.bytes for (_, purpose), count in traffic}
        found[f"dropped {way}"] = dropped(pair, rank % 2, way)
        if way != "all_gather" and rank < 2:
            found[f"compiled {way}"] = compiled(pair, rank % 2, way)
        found[f"recipes {way}"] = recipes(pair, rank % 2, way)
        found[f"largest {way}"] = largest(pair, rank % 2, way)
    for way in ("context", "sequence"):
        for layout in ("thd", "sbhd"):
            found[f"kept {way} {layout}"] = kept_samples(pair, rank % 2, way, layout)
    found["other samples"] = other_samples(pair, rank % 2)
    layer = block()
    layer.set_context_parallel_group(pair, None, None, "p2p")
    x = get_batch_on_this_cp_rank(block_input(), pair)
    found["block"] = run_block(layer, x)
    found["refused"] = refused(pair, across[rank % 2], rank % 2)
    found["helpers"] = helpers(pair)
    return found
