"""Attention on CUDA: by torch's operators where they do what is asked for, else by cuDNN's graphs.

A graph is built once for a descriptor, the shapes and the strides, in each thread, and executed on
torch's current stream with a workspace from torch's allocator; nothing waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import (
    AttentionBackwardDesc,
    AttentionDesc,
    OperandError,
    UnsupportedError,
)
from fp8core_backends.cuda import attention_graph
from fp8core_backends.cuda.attention_bias import added, blind_rows, grad_of_bias
from fp8core_backends.cuda.attention_graph import Problem, Strides, Uid, contiguous_strides
from fp8core_backends.cuda.attention_lengths import (
    Keywords,
    Sequences,
    Unseen,
    in_rows,
    keys_outside,
    sequences_of,
    steady,
    unseen,
    whole,
)
from fp8core_backends.cuda.attention_operands import (
    aligned,
    by_heads,
    check_operands,
    check_rows,
    out_size,
)
from fp8core_backends.cuda.attention_support import is_plain
from fp8core_backends.cuda.attention_torch import TorchAttention, TorchAttentionBackward
from fp8core_backends.cuda.cudnn_frontend import execution
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.stream import index_of

__all__ = ["bind_attention", "bind_attention_backward"]

_MAX_PLANS = 1024  # of one descriptor in one thread
_KERNEL = "cuDNN's attention, by its frontend"

Addresses: TypeAlias = "dict[int, int]"
Gradients: TypeAlias = (
    "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]"
)


def bind_attention(desc: AttentionDesc, device: torch.device) -> Callable[..., Any]:
    """Return the callable of forward."""
    return (TorchAttention if is_plain(desc) else GraphAttention)(desc, device)


def bind_attention_backward(
    desc: AttentionBackwardDesc, device: torch.device
) -> Callable[..., Any]:
    """Return the callable of backward."""
    plain = is_plain(desc.attention)
    return (TorchAttentionBackward if plain else GraphAttentionBackward)(desc, device)


class _Plan(NamedTuple):
    """A graph that is ready, and the bytes of its workspace."""

    graph: Any
    workspace_bytes: int


class _Plans(threading.local):
    """The graphs of one thread: cuDNN's plans are not promised to serve several at once."""

    def __init__(self) -> None:
        self.by_problem: dict[Problem, _Plan] = {}


class _Graphs:
    """The graphs of one operation on one device."""

    __slots__ = ("_add", "_desc", "_empty", "_index", "_plans")

    def __init__(self, add: Callable[..., None], desc: AttentionDesc, index: int) -> None:
        self._add, self._desc, self._index = add, desc, index
        self._empty = allocator(index)
        self._plans = _Plans()

    def run(self, problem: Problem, tensors: dict[Uid, torch.Tensor]) -> None:
        """Execute the graph of ``problem``, on the current device."""
        cudnn, handle = execution(self._index)
        plan = self._plans.by_problem.get(problem)
        if plan is None:
            plan = self._build(cudnn, handle, problem)
        workspace = self._empty((max(plan.workspace_bytes, 1),), (1,), torch.uint8)
        addresses = {int(uid): tensor.data_ptr() for uid, tensor in tensors.items()}
        plan.graph.execute(addresses, workspace.data_ptr(), handle)

    def _build(self, cudnn: Any, handle: int, problem: Problem) -> _Plan:
        desc, types = self._desc, cudnn.data_type
        is_half = desc.dtype == torch.float16
        graph = cudnn.pygraph(
            name=desc.op,
            io_data_type=types.HALF if is_half else types.BFLOAT16,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle,
        )
        try:
            self._add(cudnn, graph, desc, problem)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UnsupportedError(f"{desc} with {problem}: cuDNN refuses it: {reason}") from None
        plan = _Plan(graph, graph.get_workspace_size())
        plans = self._plans.by_problem
        if len(plans) >= _MAX_PLANS:  # ragged sizes without end
            plans.clear()
        plans[problem] = plan
        return plan


class _Call(NamedTuple):
    """One call: operands that cuDNN reads, the problem but for what backward adds, and the tensors
    that forward and backward read alike."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    problem: Problem
    tensors: dict[Uid, torch.Tensor]
    sequences: Sequences | None
    unseen: Unseen | None


class _GraphOperation:
    """What forward and backward share."""

    __slots__ = ("_desc", "_device", "_graphs", "kernel")

    def __init__(self, desc: AttentionDesc, device: torch.device, add: Callable[..., None]) -> None:
        index = index_of(device)
        self._desc = desc
        self._device = torch.device("cuda", index)
        self._graphs = _Graphs(add, desc, index)
        self.kernel = _KERNEL

    def _sizes(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int]:
        """Return the batch and the lengths of queries and keys of a dense layout."""
        layout = self._desc.layout
        batch, _, length_q, _ = by_heads(q, layout).shape
        return batch, length_q, by_heads(k, layout).shape[2]

    def _prepare(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lengths: Keywords,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        rng: torch.Tensor | None,
        *,
        in_backward: bool,
    ) -> _Call:
        desc = self._desc
        q, k, v = operands
        sequences = sequences_of(desc, q, k, lengths) if desc.padding else None
        if desc.layout == "thd":
            assert sequences is not None
            return self._ragged(operands, sequences, lengths, rng, in_backward=in_backward)
        batch, length_q, length_kv = self._sizes(q, k)
        if sequences is None and _some_see_nothing(desc, length_q, length_kv):
            # cuDNN takes such sizes of sequences with lengths alone.
            sequences = whole(batch, length_q, length_kv, self._device)
        hidden = None
        if sequences is not None:
            hidden = unseen(desc, sequences, length_q)
        elif desc.arbitrary and mask is not None:
            hidden = Unseen(blind_rows(mask, batch), None)
        full = (batch, desc.heads, length_q, length_kv)
        total = added(desc, full, bias, mask, self._device)
        if desc.padding:
            assert sequences is not None
            assert hidden is not None
            q, k, v = self._cleaned(operands, sequences, hidden, in_backward=in_backward)
        q, k, v = (aligned(x) for x in (q, k, v))
        views = [by_heads(x, desc.layout) for x in (q, k, v)]
        out = contiguous_strides(desc.layout, (batch, desc.heads, length_q, desc.head_dim_v))
        problem = Problem(
            batch,
            length_q,
            length_kv,
            _strides(views[0]),
            _strides(views[1]),
            _strides(views[2]),
            out,
            has_lengths=sequences is not None,
            bias=None if total is None else (tuple(total.shape), total.stride(), total.dtype),
        )
        tensors = {Uid.Q: q, Uid.K: k, Uid.V: v}
        if sequences is not None:
            tensors |= {
                Uid.LENGTHS_Q: sequences.lengths_q,
                Uid.LENGTHS_KV: sequences.lengths_kv,
            }
        if total is not None:
            tensors[Uid.BIAS] = total
        return _Call(q, k, v, problem, tensors | self._seed(rng), sequences, hidden)

    def _ragged(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sequences: Sequences,
        lengths: Keywords,
        rng: torch.Tensor | None,
        *,
        in_backward: bool,
    ) -> _Call:
        desc = self._desc
        hidden = unseen(desc, sequences, len(operands[0]))
        q, k, v = self._cleaned(operands, sequences, hidden, in_backward=in_backward)
        q, k, v = (aligned(x) for x in (q, k, v))
        longest_q, longest_kv = lengths.max_seqlen_q, lengths.max_seqlen_kv
        assert longest_q is not None
        assert longest_kv is not None
        size_q, size_kv = steady(longest_q), steady(longest_kv)
        sequences = sequences.padded(_power_of_two(len(sequences.lengths_q)))
        batch = len(sequences.lengths_q)
        starts_q, starts_kv = sequences.starts_q, sequences.starts_kv
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
            rows_q=steady(len(q)),
            rows_kv=steady(len(k)),
        )
        offsets = _Offsets()
        tensors = {
            Uid.Q: q,
            Uid.K: k,
            Uid.V: v,
            Uid.LENGTHS_Q: sequences.lengths_q,
            Uid.LENGTHS_KV: sequences.lengths_kv,
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
        return _Call(q, k, v, problem, tensors | self._seed(rng), sequences, hidden)

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
        layout = self._desc.layout
        q, k, v = operands
        rows = len(k) if layout == "thd" else by_heads(k, layout).shape[2]
        outside = in_rows(keys_outside(sequences, rows), layout)
        v = v.masked_fill(outside, 0)
        if in_backward:
            q, k = q.masked_fill(in_rows(hidden.blind, layout), 0), k.masked_fill(outside, 0)
        return q, k, v

    def _seed(self, rng: torch.Tensor | None) -> dict[Uid, torch.Tensor]:
        """Return seed and offset on the device; none without dropout."""
        desc = self._desc
        if not desc.dropout:
            return {}
        is_right = rng is not None and rng.dtype == torch.int64 and tuple(rng.shape) == (2,)
        if rng is None or not is_right or rng.device.type != "cpu":
            shown = None if rng is None else f"{rng.dtype} {list(rng.shape)} on {rng.device}"
            raise OperandError(f"{desc}: rng is {shown}; expected torch.int64 [2] on the CPU.")
        seed, offset = rng.tolist()
        # One number of both, as cuDNN counts offsets in steps of its generator.
        mixed = (seed * 0x9E3779B97F4A7C15 + offset) & (2**63 - 1)
        return {
            uid: torch.full((1,), value, dtype=torch.int64, device=self._device)
            for uid, value in ((Uid.SEED, mixed), (Uid.OFFSET, 0))
        }

    def _sink(self, softmax_offset: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sink of each head, float32 ``[heads]``; None in a vanilla softmax."""
        desc = self._desc
        if desc.softmax == "vanilla":
            return None
        if desc.softmax == "off-by-one":
            return torch.zeros(desc.heads, dtype=torch.float32, device=self._device)
        x = softmax_offset
        if x is None or tuple(x.shape) != (desc.heads,) or x.device != self._device:
            shown = None if x is None else f"{list(x.shape)} on {x.device}"
            raise OperandError(
                f"{desc}: softmax_offset is {shown}; expected [{desc.heads}] on {self._device}."
            )
        return x.detach().float().contiguous()

    def _is_empty(self, q: torch.Tensor, k: torch.Tensor, lengths: Keywords) -> bool:
        """Whether there is no query or no key."""
        if not (q.numel() and k.numel()):
            return True
        return lengths.max_seqlen_q == 0 or lengths.max_seqlen_kv == 0


class GraphAttention(_GraphOperation):
    """``(out, stats, max_logit)``; see AttentionDesc."""

    __slots__ = ()

    def __init__(self, desc: AttentionDesc, device: torch.device) -> None:
        super().__init__(desc, device, attention_graph.forward)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        softmax_offset: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        rng: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Attend; see the backend API."""
        desc = self._desc
        check_operands(desc, q, k, v, self._device)
        lengths = Keywords(
            *(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
            *(max_seqlen_q, max_seqlen_kv),
        )
        with torch.cuda.device(self._device):
            sink = self._sink(softmax_offset)
            if self._is_empty(q, k, lengths):
                return self._of_nothing(q, k, lengths, sink)
            call = self._prepare((q, k, v), lengths, bias, mask, rng, in_backward=False)
            return self._attend(q, call, sink)

    def _attend(
        self, q: torch.Tensor, call: _Call, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        desc = self._desc
        # In thd cuDNN writes the rows of sequences alone.
        out = (torch.zeros if desc.layout == "thd" else torch.empty)(
            out_size(desc, q), dtype=desc.dtype, device=self._device
        )
        stats = torch.empty(self._statistics(q), dtype=torch.float32, device=self._device)
        tensors = call.tensors | {Uid.OUT: out}
        largest = None
        if sink is not None:
            tensors[Uid.SINK] = sink
        if desc.max_logit:
            largest = torch.empty_like(stats)
            tensors |= {Uid.MAX_LOGIT: largest, Uid.SUM: stats}
        else:
            tensors[Uid.STATS] = stats
        self._graphs.run(call.problem, tensors)
        if largest is not None:
            stats = stats.log_().add_(largest)
        if call.unseen is not None:
            blind, outside = call.unseen
            out.masked_fill_(in_rows(blind, desc.layout), 0)
            stats = _without_keys(stats, blind, outside, sink, desc.layout)
            if largest is not None:
                largest.masked_fill_(blind, -torch.inf)
        if largest is None:
            return out, stats, None
        by_head = largest if desc.layout == "thd" else largest.transpose(0, 1).flatten(1).t()
        return out, stats, by_head.amax(0)

    def _statistics(self, q: torch.Tensor) -> tuple[int, ...]:
        layout = self._desc.layout
        return tuple(q.shape[:-1] if layout == "thd" else by_heads(q, layout).shape[:-1])

    def _of_nothing(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        lengths: Keywords,
        sink: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the result without queries or keys."""
        desc = self._desc
        size = self._statistics(q)
        stats = q.new_full(size, -torch.inf, dtype=torch.float32)
        if sink is not None and stats.numel():
            hidden = None
            if desc.padding:
                sequences = sequences_of(desc, q, k, lengths)
                rows = len(q) if desc.layout == "thd" else size[2]
                hidden = unseen(desc, sequences, rows).outside
            blind = torch.ones((), dtype=torch.bool, device=self._device)
            stats = _without_keys(stats, blind, hidden, sink, desc.layout)
        largest = q.new_full((desc.heads,), -torch.inf, dtype=torch.float32)
        return q.new_zeros(out_size(desc, q)), stats, largest if desc.max_logit else None


class GraphAttentionBackward(_GraphOperation):
    """The gradients; see AttentionBackwardDesc."""

    __slots__ = ("_bias_grad",)

    def __init__(self, desc: AttentionBackwardDesc, device: torch.device) -> None:
        super().__init__(desc.attention, device, attention_graph.backward)
        self._bias_grad = desc.bias_grad

    def __call__(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        softmax_offset: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        rng: torch.Tensor | None = None,
    ) -> Gradients:
        """Return the gradients; see the backend API."""
        desc = self._desc
        check_operands(desc, q, k, v, self._device)
        check_rows(desc, q, grad_out, out, stats)
        lengths = Keywords(
            *(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
            *(max_seqlen_q, max_seqlen_kv),
        )
        with torch.cuda.device(self._device):
            if self._is_empty(q, k, lengths):
                return self._of_nothing((q, k, v), bias)
            self._refuse_one_key(q, k)
            call = self._prepare((q, k, v), lengths, bias, mask, rng, in_backward=True)
            # With lengths, cuDNN writes the rows of sequences alone.
            new = torch.empty if call.sequences is None else torch.zeros
            grads = [new(x.shape, dtype=x.dtype, device=self._device) for x in (q, k, v)]
            grad_bias: torch.Tensor | None = None
            finite = stats
            if call.unseen is not None:
                # Weights of such rows are exp(.. - inf) = 0, and exp(.. + inf) = inf with -inf.
                finite = stats.masked_fill(stats == -torch.inf, torch.inf)
                grad_out = grad_out.masked_fill(in_rows(call.unseen.blind, desc.layout), 0)
            grad_out, out = (_contiguous(x) for x in (grad_out, out))
            tensors = call.tensors | {
                Uid.GRAD_OUT: grad_out,
                Uid.OUT: out,
                Uid.STATS: _contiguous(finite),
                Uid.GRAD_Q: grads[0],
                Uid.GRAD_K: grads[1],
                Uid.GRAD_V: grads[2],
            }
            problem = call.problem._replace(
                bias_grad=self._bias_grad,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
            if self._bias_grad:
                full = (problem.batch, desc.heads, problem.s_q, problem.s_kv)
                tensors[Uid.GRAD_BIAS] = q.new_zeros(full)
            self._graphs.run(problem, tensors)
            if self._bias_grad:
                assert bias is not None
                grad_bias = grad_of_bias(desc, tensors[Uid.GRAD_BIAS], bias)
            grad_offset = self._grad_of_sink(grad_out, out, stats, softmax_offset)
        return grads[0], grads[1], grads[2], grad_bias, grad_offset

    def _of_nothing(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
    ) -> Gradients:
        """Return the gradients without queries or keys."""
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in operands)
        grad_bias = None
        if self._bias_grad:
            assert bias is not None
            grad_bias = bias.new_zeros(bias.shape)
        is_learned = self._desc.softmax == "learnable"
        wide = torch.float32
        offset = grad_q.new_zeros(self._desc.heads, dtype=wide) if is_learned else None
        return grad_q, grad_k, grad_v, grad_bias, offset

    def _refuse_one_key(self, q: torch.Tensor, k: torch.Tensor) -> None:
        if self._desc.layout != "thd" and self._sizes(q, k)[1:] == (1, 1):
            raise UnsupportedError(
                f"{self._desc}: cuDNN has no backward of one query and one key. "
                f"use_backend('reference') for such sequences has."
            )

    def _grad_of_sink(
        self,
        grad_out: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
        softmax_offset: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return the gradient of a learned sink, float32 ``[heads]``."""
        desc = self._desc
        if desc.softmax != "learnable":
            return None
        sink = self._sink(softmax_offset)
        assert sink is not None
        row_sums = (grad_out.float() * out.float()).sum(-1)
        by_rows = stats
        if desc.layout == "sbhd":
            by_rows = stats.permute(2, 0, 1)
        elif desc.layout == "bshd":
            by_rows = stats.transpose(1, 2)
        weights = torch.exp(sink - by_rows).masked_fill(by_rows == -torch.inf, 0)
        return -(weights * row_sums).flatten(0, -2).sum(0)


class _Offsets:
    """Offsets of sequences in elements, computed once for each length of a row."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, starts: torch.Tensor, row: int) -> torch.Tensor:
        """Return ``starts``, in rows, in elements of rows of ``row`` elements."""
        key = (id(starts), row)
        if key not in self._known:
            self._known[key] = starts * row
        return self._known[key]


def _some_see_nothing(desc: AttentionDesc, length_q: int, length_kv: int) -> bool:
    """Whether a window leaves a query of sequences of these lengths no key, or cuDNN refuses it."""
    left, right = desc.window
    is_refused = (right >= 0 and desc.bottom_right) or left >= 0
    return is_refused and length_q > length_kv


def _without_keys(
    stats: torch.Tensor,
    blind: torch.Tensor,
    outside: torch.Tensor | None,
    sink: torch.Tensor | None,
    layout: str,
) -> torch.Tensor:
    """Return the statistics with -inf, or the sink alone, for the queries that see no key, and -inf
    for those of no sequence."""
    if sink is None:
        return stats.masked_fill_(blind, -torch.inf)
    of_head = sink if layout == "thd" else sink[:, None]
    stats = torch.where(blind, of_head, stats)
    return stats if outside is None else stats.masked_fill_(outside, -torch.inf)


def _strides(x: torch.Tensor) -> Strides:
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


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return aligned(x.contiguous())


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
