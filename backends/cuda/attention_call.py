"""A call of attention as a graph of cuDNN takes it: operands, sequences, masks, seeds and sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AttentionDesc, CachedAttentionDesc, OperandError
from fp8core_backends.cuda.attention_bias import added, blind_rows
from fp8core_backends.cuda.attention_graph import Problem, Strides, Uid, contiguous_strides
from fp8core_backends.cuda.attention_lengths import (
    Keywords,
    OfLengths,
    Sequences,
    Unseen,
    in_rows,
    keys_outside,
    sequences_of,
    steady,
    unseen,
    whole,
)
from fp8core_backends.cuda.attention_operands import aligned, by_heads
from fp8core_backends.cuda.attention_plans import Graphs
from fp8core_backends.cuda.attention_support import KernelNames
from fp8core_backends.cuda.stream import index_of

_CPU = torch.device("cpu")
_MIX = 0x9E3779B97F4A7C15 - 2**64  # an odd number of random bits, as int64


class GraphCall(NamedTuple):
    """A call: operands that cuDNN reads, the problem but for what backward adds, and the tensors
    that both forward and backward read."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    problem: Problem
    tensors: dict[Uid, torch.Tensor]
    sequences: Sequences | None
    unseen: Unseen | None

    def scaled_by(self, logit_scale: torch.Tensor | None) -> GraphCall:
        """Return the call with a scale of logits on the device, float32 of one element; with None,
        the call as it is, with the scale of its descriptor."""
        if logit_scale is None:
            return self
        return self._replace(
            problem=self.problem._replace(reads_logit_scale=True),
            tensors=self.tensors | {Uid.LOGIT_SCALE: logit_scale},
        )


class GraphOperation:
    """Base of forward and backward: descriptor, device, names of kernels, graphs by problem."""

    __slots__ = (
        "_index",
        "_int64",
        "_steps",
        "desc",
        "device",
        "graphs",
        "kernel",
        "other_kernels",
    )

    def __init__(
        self,
        desc: AttentionDesc,
        device: torch.device,
        names: KernelNames,
        add: Callable[..., None],
    ) -> None:
        self._index = index = index_of(device)
        self._steps: OfLengths[_Step] = OfLengths()
        self.desc = desc
        self.device = torch.device("cuda", index)
        self.graphs = Graphs(add, desc, index)
        self.kernel, self.other_kernels = names
        self._int64: dict[str, Any] = {"dtype": torch.int64, "device": self.device}

    def sizes(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int]:
        """Return the batch and the lengths of queries and keys of a dense layout."""
        layout = self.desc.layout
        batch, _, length_q, _ = by_heads(q, layout).shape
        return batch, length_q, by_heads(k, layout).shape[2]

    def prepare(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lengths: Keywords,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        rng: torch.Tensor | None,
        *,
        in_backward: bool,
    ) -> GraphCall:
        """Return the call, its operands aligned and without what lies behind sequences.

        Queries of zeros follow those of each sequence where cuDNN refuses a single one, and with a
        cache up to a steady number.
        """
        desc = self.desc
        q, k, v = operands
        if desc.layout == "thd":
            return self._ragged(operands, lengths, rng, in_backward=in_backward)
        batch, length_q, length_kv = self.sizes(q, k)
        total = added(desc, (batch, desc.heads, length_q, length_kv), bias, mask, self.device)
        is_single = length_q == 1 and (
            length_kv == 1 if in_backward else _refuses_single_query(desc)
        )
        rows_q = 2 if is_single else length_q
        if isinstance(desc, CachedAttentionDesc) and length_q > 1:
            rows_q = steady(length_q)  # prompts have any length
        sequences, hidden = self._hidden(q, k, lengths, rows_q, mask, is_single=is_single)
        if rows_q > length_q:
            q, length_q = with_rows(q, desc.layout, rows_q), rows_q
        if desc.padding:
            assert sequences is not None
            assert hidden is not None
            q, k, v = self._cleaned((q, k, v), sequences, hidden, in_backward=in_backward)
        q, k, v = (aligned(x) for x in (q, k, v))
        views = [by_heads(x, desc.layout) for x in (q, k, v)]
        out = contiguous_strides(desc.layout, (batch, desc.heads, length_q, desc.head_dim_v))
        problem = Problem(
            batch,
            length_q,
            length_kv,
            strides_of(views[0]),
            strides_of(views[1]),
            strides_of(views[2]),
            out,
            has_lengths=sequences is not None,
            bias=None if total is None else (tuple(total.shape), total.stride(), total.dtype),
        )
        tensors = {Uid.Q: q, Uid.K: k, Uid.V: v}
        if sequences is not None:
            of_queries, of_keys = sequences.lengths_q, sequences.lengths_kv
            if desc.low_precision and not in_backward:
                # cuDNN 9.19's FP8 kernel did not end with an empty sequence among long ones. One
                # query, one key of zeros: the query is blind, so that its result is replaced.
                of_queries, of_keys = of_queries.clamp(min=1), of_keys.clamp(min=1)
            tensors |= {Uid.LENGTHS_Q: of_queries, Uid.LENGTHS_KV: of_keys}
        if total is not None:
            tensors[Uid.BIAS] = total
        return GraphCall(q, k, v, problem, tensors | self._seed(rng), sequences, hidden)

    def _hidden(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        lengths: Keywords,
        rows_q: int,
        mask: torch.Tensor | None,
        *,
        is_single: bool,
    ) -> tuple[Sequences | None, Unseen | None]:
        """Return the sequences of a dense call of ``rows_q`` queries each, None where cuDNN needs
        none, and its queries that see no key."""
        desc = self.desc
        batch, length_q, length_kv = self.sizes(q, k)
        sequences, hidden = None, None
        if desc.padding:
            sequences, hidden, *_ = self._step(q, k, lengths, rows_q)
        elif is_single or _some_see_nothing(desc, length_q, length_kv):
            # cuDNN takes such sizes of sequences with lengths alone.
            sequences = whole(batch, length_q, length_kv, self.device)
            hidden = unseen(desc, sequences, rows_q)
        if desc.arbitrary and mask is not None:
            blind = blind_rows(mask, batch)
            hidden = Unseen(blind, None) if hidden is None else hidden.of_mask(blind)
        return sequences, hidden

    def _ragged(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lengths: Keywords,
        rng: torch.Tensor | None,
        *,
        in_backward: bool,
    ) -> GraphCall:
        desc = self.desc
        q, k, _ = operands
        sequences, hidden, padded, offsets = self._step(q, k, lengths, len(q))
        q, k, v = self._cleaned(operands, sequences, hidden, in_backward=in_backward)
        q, k, v = (aligned(x) for x in (q, k, v))
        longest_q, longest_kv = lengths.max_seqlen_q, lengths.max_seqlen_kv
        assert longest_q is not None
        assert longest_kv is not None
        size_q, size_kv = steady(longest_q), steady(longest_kv)
        batch = len(padded.lengths_q)
        starts_q, starts_kv = padded.starts_q, padded.starts_kv
        assert starts_q is not None
        assert starts_kv is not None
        row_out = desc.heads * desc.head_dim_v
        problem = Problem(
            batch,
            size_q,
            size_kv,
            _row_strides(q, size_q),
            _row_strides(k, size_kv),
            _row_strides(v, size_kv),
            (size_q * row_out, desc.head_dim_v, row_out, 1),
            has_lengths=True,
            rows_q=steady(len(q)) if in_backward else 0,
            rows_kv=steady(len(k)) if in_backward else 0,
        )
        tensors = {
            Uid.Q: q,
            Uid.K: k,
            Uid.V: v,
            Uid.LENGTHS_Q: padded.lengths_q,
            Uid.LENGTHS_KV: padded.lengths_kv,
            Uid.STARTS_Q: offsets.of(starts_q, q.stride(0)),
            Uid.STARTS_K: offsets.of(starts_kv, k.stride(0)),
            Uid.STARTS_V: offsets.of(starts_kv, v.stride(0)),
            Uid.STARTS_OUT: offsets.of(starts_q, row_out),
            Uid.STARTS_STATS: offsets.of(starts_q, desc.heads),
        }
        if in_backward:
            tensors |= {
                Uid.STARTS_GRAD_OUT: tensors[Uid.STARTS_OUT],
                Uid.STARTS_GRAD_Q: offsets.of(starts_q, desc.heads * desc.head_dim),
                Uid.STARTS_GRAD_K: offsets.of(starts_kv, desc.groups * desc.head_dim),
                Uid.STARTS_GRAD_V: offsets.of(starts_kv, desc.groups * desc.head_dim_v),
            }
        return GraphCall(q, k, v, problem, tensors | self._seed(rng), padded, hidden)

    def _step(self, q: torch.Tensor, k: torch.Tensor, lengths: Keywords, rows: int) -> _Step:
        """Return what follows from the lengths of a call with padding and ``rows`` queries of a
        sequence, in thd of all: with a cache, once for the layers of a step."""
        desc = self.desc

        def compute() -> _Step:
            sequences = padded = sequences_of(desc, q, k, lengths)
            if desc.layout == "thd":
                padded = sequences.padded(_power_of_two(len(sequences.lengths_q)))
            return _Step(sequences, unseen(desc, sequences, rows), padded, _Offsets())

        if not isinstance(desc, CachedAttentionDesc):
            return compute()
        sizes = (*q.shape[:2], *k.shape[:2], rows)
        return self._steps.of(lengths, sizes, self._index, compute)

    def _cleaned(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sequences: Sequences,
        hidden: Unseen,
        *,
        in_backward: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the operands with zeros in the rows of no sequence, whose products with weights of
        zero must not be NaN; in forward those of the values alone."""
        layout = self.desc.layout
        q, k, v = operands
        if isinstance(self.desc, CachedAttentionDesc):  # finite, as its contract says
            return q, k, v
        rows = len(k) if layout == "thd" else by_heads(k, layout).shape[2]
        outside = in_rows(keys_outside(sequences, rows), layout)
        v = v.masked_fill(outside, 0)
        if in_backward:
            q, k = q.masked_fill(in_rows(hidden.blind, layout), 0), k.masked_fill(outside, 0)
        return q, k, v

    def _seed(self, rng: torch.Tensor | None) -> dict[Uid, torch.Tensor]:
        """Return seed and offset on the device; none without dropout."""
        desc = self.desc
        if not desc.dropout:
            return {}
        is_right = rng is not None and rng.dtype == torch.int64 and tuple(rng.shape) == (2,)
        if rng is None or not is_right or rng.device not in (self.device, _CPU):
            shown = None if rng is None else f"{rng.dtype} {list(rng.shape)} on {rng.device}"
            raise OperandError(
                f"{desc}: rng is {shown}; expected torch.int64 [2] on the CPU or {self.device}."
            )
        # Seed and offset in one number, as cuDNN counts offsets in steps of its generator.
        if rng.device == self.device:
            seed = torch.add(rng[1:], rng[:1], alpha=_MIX)
        else:
            first, second = rng.tolist()
            seed = torch.full((1,), _wrapped(first * _MIX + second), **self._int64)
        return {Uid.SEED: seed, Uid.OFFSET: torch.zeros(1, **self._int64)}

    def sink(self, softmax_offset: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sink of each head, float32 ``[heads]``; None in a vanilla softmax."""
        desc = self.desc
        if desc.softmax == "vanilla":
            return None
        if desc.softmax == "off-by-one":
            return torch.zeros(desc.heads, dtype=torch.float32, device=self.device)
        x = softmax_offset
        if x is None or tuple(x.shape) != (desc.heads,) or x.device != self.device:
            shown = None if x is None else f"{list(x.shape)} on {x.device}"
            raise OperandError(
                f"{desc}: softmax_offset is {shown}; expected [{desc.heads}] on {self.device}."
            )
        return x.detach().float().contiguous()

    def is_empty(self, q: torch.Tensor, k: torch.Tensor, lengths: Keywords) -> bool:
        """Whether there is no query or no key."""
        if not (q.numel() and k.numel()):
            return True
        return lengths.max_seqlen_q == 0 or lengths.max_seqlen_kv == 0


class _Step(NamedTuple):
    """The sequences of a call, its queries that see no key, and in thd the sequences and others
    that are empty, and their offsets."""

    sequences: Sequences
    hidden: Unseen
    padded: Sequences
    offsets: _Offsets


class _Offsets:
    """Offsets of sequences in elements, computed once for each length of a row."""

    __slots__ = ("_starts",)

    def __init__(self) -> None:
        self._starts: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, starts: torch.Tensor, row: int) -> torch.Tensor:
        """Return ``starts``, in rows, in elements of rows of ``row`` elements."""
        key = (id(starts), row)
        if key not in self._starts:
            self._starts[key] = starts * row
        return self._starts[key]


def _refuses_single_query(desc: AttentionDesc) -> bool:
    """Whether cuDNN has no forward of a single query for each head and sequence. A backward of a
    single query and a single key does not exist."""
    return desc.low_precision or desc.softmax != "vanilla"


def with_rows(rows: torch.Tensor, layout: str, count: int) -> torch.Tensor:
    """Return ``count`` rows of queries of each sequence, zeros behind those of ``rows``."""
    at, size = layout.index("s"), list(rows.shape)
    size[at] = count - size[at]
    return torch.cat((rows, rows.new_zeros(size)), at)


def first_rows(rows: torch.Tensor, layout: str, count: int) -> torch.Tensor:
    """Return the rows of the first ``count`` queries of each sequence, contiguous."""
    return rows.narrow(layout.index("s"), 0, count).contiguous()


def _some_see_nothing(desc: AttentionDesc, length_q: int, length_kv: int) -> bool:
    """Whether a window leaves a query of sequences of these lengths no key, or cuDNN refuses it."""
    left, right = desc.window
    is_refused = (right >= 0 and desc.bottom_right) or left >= 0
    return is_refused and length_q > length_kv


def strides_of(x: torch.Tensor) -> Strides:
    """Return the strides of a view ``[b, heads, s, d]``; of a dimension of one element, which
    addresses nothing, those of a contiguous tensor, so that they are aligned."""
    _, heads, length, size = x.shape
    regular = (heads * length * size, length * size, size, 1)
    b, h, s, d = (
        of if count == 1 else stride
        for count, stride, of in zip(x.shape, x.stride(), regular, strict=True)
    )
    return (b, h, s, d)


def _row_strides(x: torch.Tensor, length: int) -> Strides:
    """Return the strides of rows ``[t, heads, d]`` as those of sequences of ``length`` rows."""
    row, head, _ = x.stride()
    return (length * row, x.shape[2] if x.shape[1] == 1 else head, row, 1)


def _wrapped(number: int) -> int:
    """Return the int64 of the last 64 bits of ``number``, as tensors compute it."""
    return (number + 2**63) % 2**64 - 2**63


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
