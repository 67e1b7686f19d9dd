"""Attention as a graph of NVIDIA's cuDNN frontend: its tensors, its operation, and its plan.

Inside, queries, keys and values are ``[b, heads, s, d]`` whatever the layout is. In thd the
sequences are ragged: each has an offset, in elements, into the rows of all.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AttentionDesc

Strides = tuple[int, int, int, int]
_NUMBER = [1, 1, 1, 1]  # the sizes, and the strides, of a number


class Uid(IntEnum):
    """The names of a graph's tensors: the keys of the addresses that it is executed with."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    STATS = 5
    MAX_LOGIT = 6
    SUM = 27
    GRAD_OUT = 7
    GRAD_Q = 8
    GRAD_K = 9
    GRAD_V = 10
    BIAS = 11
    GRAD_BIAS = 12
    SINK = 13
    SEED = 14
    OFFSET = 15
    LENGTHS_Q = 16
    LENGTHS_KV = 17
    STARTS_Q = 18
    STARTS_K = 19
    STARTS_V = 20
    STARTS_OUT = 21
    STARTS_STATS = 22
    STARTS_GRAD_OUT = 23
    STARTS_GRAD_Q = 24
    STARTS_GRAD_K = 25
    STARTS_GRAD_V = 26
    SCALE_INV_Q = 28
    SCALE_INV_K = 29
    SCALE_INV_V = 30
    SCALE_INV_S = 31
    SCALE_S = 32
    SCALE_OUT = 33
    AMAX_S = 34
    AMAX_OUT = 35
    LOGIT_SCALE = 36


class Problem(NamedTuple):
    """Sizes and strides that a graph depends on, besides the descriptor; a key of the plans.

    ``s_q`` and ``s_kv`` are, in thd, lengths that no sequence exceeds, and in its backward
    ``rows_q`` and ``rows_kv`` numbers of rows that are not exceeded; else both numbers are 0.
    Strides are in elements, in the order ``[b, heads, s, d]``. ``bias`` has sizes, strides and
    dtype, None without one. With ``reads_logit_scale`` the scale of the logits is the tensor
    ``LOGIT_SCALE``, and the descriptor's is not used.
    """

    batch: int
    s_q: int
    s_kv: int
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    has_lengths: bool
    rows_q: int = 0
    rows_kv: int = 0
    bias: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None
    bias_grad: bool = False
    deterministic: bool = False
    reads_logit_scale: bool = False


def forward(cudnn: Any, graph: Any, desc: AttentionDesc, problem: Problem) -> None:
    """Add the forward operation to ``graph``, which computes ``OUT``, and ``STATS`` unless the
    descriptor asks for the largest logit: then cuDNN gives ``MAX_LOGIT``, the largest of each row,
    and ``SUM``, of the exponentials of logits less that one, in place of the statistics.
    """
    tensors = _Tensors(cudnn, graph, desc, problem)
    out, stats = graph.sdpa(
        *(tensors.operand(uid) for uid in (Uid.Q, Uid.K, Uid.V)),
        generate_stats=not desc.max_logit,
        name="attention",
        **tensors.options(),
        **tensors.forward_options(),
    )
    tensors.forward_results(out, stats)


def quantized_forward(cudnn: Any, graph: Any, desc: AttentionDesc, problem: Problem) -> None:
    """Add the forward operation of quantized operands to ``graph``, as :func:`forward` does.

    The result is quantized, too. ``AMAX_S`` and ``AMAX_OUT`` are those of the weights and of the
    result, each before its scale.
    """
    tensors = _Tensors(cudnn, graph, desc, problem)
    scales = {
        "descale_q": Uid.SCALE_INV_Q,
        "descale_k": Uid.SCALE_INV_K,
        "descale_v": Uid.SCALE_INV_V,
        "descale_s": Uid.SCALE_INV_S,
        "scale_s": Uid.SCALE_S,
        "scale_o": Uid.SCALE_OUT,
    }
    options = tensors.options()
    for side in ("left", "right"):  # this operation has other names for them
        bound = options.pop(f"diagonal_band_{side}_bound", None)
        if bound is not None:
            options[f"{side}_bound"] = bound
    out, stats, *amaxes = graph.sdpa_fp8(
        *(tensors.operand(uid) for uid in (Uid.Q, Uid.K, Uid.V)),
        generate_stats=not desc.max_logit,
        name="attention",
        **{name: tensors.number(uid) for name, uid in scales.items()},
        **options,
        **tensors.forward_options(),
    )
    tensors.forward_results(out, stats)
    for amax, uid in zip(amaxes, (Uid.AMAX_S, Uid.AMAX_OUT), strict=True):
        amax.set_uid(int(uid)).set_output(True).set_dim(_NUMBER).set_stride(_NUMBER)
        amax.set_data_type(cudnn.data_type.FLOAT)


def backward(cudnn: Any, graph: Any, desc: AttentionDesc, problem: Problem) -> None:
    """Add the backward operation to ``graph``, which computes ``GRAD_Q``, ``GRAD_K`` and
    ``GRAD_V``, contiguous in the layout, and ``GRAD_BIAS`` if the problem asks for it.

    The statistics hold the sink already, so that backward does not read it.
    """
    tensors = _Tensors(cudnn, graph, desc, problem)
    batch, s_q, s_kv = problem.batch, problem.s_q, problem.s_kv
    options = tensors.options()
    if problem.bias_grad:
        # Of each batch and head: cuDNN's sums of several have the dtype of the result.
        length = desc.heads * s_q * s_kv
        options["dBias"] = tensors.plain(
            Uid.GRAD_BIAS,
            (batch, desc.heads, s_q, s_kv),
            (length, s_q * s_kv, s_kv, 1),
            tensors.dtype(desc.dtype),
        ).set_output(True)
    if desc.layout == "thd":
        options["max_total_seq_len_q"] = problem.rows_q
        options["max_total_seq_len_kv"] = problem.rows_kv
    grads = graph.sdpa_backward(
        *(tensors.operand(uid) for uid in (Uid.Q, Uid.K, Uid.V, Uid.OUT, Uid.GRAD_OUT)),
        tensors.plain(
            Uid.STATS,
            (batch, desc.heads, s_q, 1),
            _statistics_strides(desc, problem),
            cudnn.data_type.FLOAT,
            tensors.starts(Uid.STARTS_STATS),
        ),
        use_deterministic_algorithm=problem.deterministic,
        name="attention_backward",
        **options,
    )
    sides = (
        (Uid.GRAD_Q, Uid.STARTS_GRAD_Q, desc.heads, s_q, desc.head_dim),
        (Uid.GRAD_K, Uid.STARTS_GRAD_K, desc.groups, s_kv, desc.head_dim),
        (Uid.GRAD_V, Uid.STARTS_GRAD_V, desc.groups, s_kv, desc.head_dim_v),
    )
    for grad, (uid, starts, heads, length, size) in zip(grads, sides, strict=True):
        dims = (batch, heads, length, size)
        tensors.result(grad, uid, dims, contiguous_strides(desc.layout, dims), starts)


def contiguous_strides(layout: str, dims: tuple[int, int, int, int]) -> Strides:
    """Return the strides, in the order of ``dims [b, heads, s, d]``, of a tensor that is contiguous
    in the layout."""
    batch, heads, length, size = dims
    row = heads * size
    if layout == "sbhd":
        return (row, size, batch * row, 1)
    return (length * row, size, row, 1)


def operand_type(cudnn: Any, desc: AttentionDesc) -> Any:
    """Return cuDNN's name of the dtype of queries, keys and values."""
    types = cudnn.data_type
    if desc.low_precision:
        return types.FP8_E4M3
    return types.HALF if desc.dtype == torch.float16 else types.BFLOAT16


def _statistics_strides(desc: AttentionDesc, problem: Problem) -> Strides:
    """Return the strides of statistics ``[b, heads, s, 1]``; in thd, of ``[t, heads]``."""
    heads, length = desc.heads, problem.s_q
    if desc.layout == "thd":
        return (length * heads, 1, heads, 1)
    return (heads * length, length, 1, 1)


class _Tensors:
    """The tensors of one graph."""

    __slots__ = ("_cudnn", "_desc", "_graph", "_problem", "_starts", "_types")

    def __init__(self, cudnn: Any, graph: Any, desc: AttentionDesc, problem: Problem) -> None:
        self._cudnn, self._graph = cudnn, graph
        self._desc, self._problem = desc, problem
        self._starts: dict[Uid, Any] = {}
        self._types = {
            torch.bfloat16: cudnn.data_type.BFLOAT16,
            torch.float16: cudnn.data_type.HALF,
            torch.float32: cudnn.data_type.FLOAT,
        }

    def dtype(self, dtype: torch.dtype) -> Any:
        """Return cuDNN's name of a dtype."""
        return self._types[dtype]

    def number(self, uid: Uid) -> Any:
        """Return a float32 tensor of one element."""
        return self.plain(uid, tuple(_NUMBER), tuple(_NUMBER), self._cudnn.data_type.FLOAT)

    def plain(
        self,
        uid: Uid,
        dims: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: Any,
        starts: Any = None,
    ) -> Any:
        """Return a tensor of these sizes and strides; ``starts`` are its ragged offsets."""
        return self._graph.tensor(
            dim=list(dims),
            stride=list(strides),
            data_type=dtype,
            ragged_offset=starts,
            name=uid.name,
            uid=int(uid),
        )

    def starts(self, uid: Uid) -> Any:
        """Return the offsets of sequences, int64 ``[b + 1]`` in elements; None but in thd."""
        if self._desc.layout != "thd":
            return None
        if uid not in self._starts:
            dims = (self._problem.batch + 1, 1, 1, 1)
            offsets = self.plain(uid, dims, (1, 1, 1, 1), self._cudnn.data_type.INT64)
            self._starts[uid] = offsets
        return self._starts[uid]

    def operand(self, uid: Uid) -> Any:
        """Return queries, keys, values, or what has the form of the result."""
        desc, problem = self._desc, self._problem
        heads, length, size, strides, starts = {
            Uid.Q: (desc.heads, problem.s_q, desc.head_dim, problem.q, Uid.STARTS_Q),
            Uid.K: (desc.groups, problem.s_kv, desc.head_dim, problem.k, Uid.STARTS_K),
            Uid.V: (desc.groups, problem.s_kv, desc.head_dim_v, problem.v, Uid.STARTS_V),
            Uid.OUT: (desc.heads, problem.s_q, desc.head_dim_v, problem.out, Uid.STARTS_OUT),
            Uid.GRAD_OUT: (
                *(desc.heads, problem.s_q, desc.head_dim_v, problem.out),
                Uid.STARTS_GRAD_OUT,
            ),
        }[uid]
        dims = (problem.batch, heads, length, size)
        dtype = operand_type(self._cudnn, desc)
        return self.plain(uid, dims, strides, dtype, self.starts(starts))

    def result(
        self, tensor: Any, uid: Uid, dims: tuple[int, ...], strides: tuple[int, ...], starts: Uid
    ) -> None:
        """Make ``tensor`` one that the graph writes."""
        tensor.set_uid(int(uid)).set_output(True).set_dim(list(dims)).set_stride(list(strides))
        offsets = self.starts(starts)
        if offsets is not None:
            tensor.set_ragged_offset(offsets)

    def forward_options(self) -> dict[str, Any]:
        """Return the arguments of forward alone: the sink, and what the largest logit needs."""
        desc, wide = self._desc, self._cudnn.data_type.FLOAT
        options: dict[str, Any] = {}
        if desc.max_logit:
            starts = self.starts(Uid.STARTS_STATS)
            dims = (self._problem.batch, desc.heads, self._problem.s_q, 1)
            strides = _statistics_strides(desc, self._problem)
            for name, uid in (("score_max", Uid.MAX_LOGIT), ("score_sum_exp", Uid.SUM)):
                of_rows = self.plain(uid, dims, strides, wide, starts)
                options[name] = of_rows.set_output(True)
        if desc.softmax != "vanilla":
            strides = (desc.heads, 1, 1, 1)
            options["sink_token"] = self.plain(Uid.SINK, (1, desc.heads, 1, 1), strides, wide)
        return options

    def forward_results(self, out: Any, stats: Any) -> None:
        """Make the result, and the statistics unless the largest logit is asked for, ones that the
        graph writes."""
        desc, problem = self._desc, self._problem
        sizes = (problem.batch, desc.heads, problem.s_q)
        self.result(out, Uid.OUT, (*sizes, desc.head_dim_v), problem.out, Uid.STARTS_OUT)
        out.set_data_type(operand_type(self._cudnn, desc))
        if not desc.max_logit:
            strides = _statistics_strides(desc, problem)
            self.result(stats, Uid.STATS, (*sizes, 1), strides, Uid.STARTS_STATS)
            stats.set_data_type(self._cudnn.data_type.FLOAT)

    def options(self) -> dict[str, Any]:
        """Return the arguments that forward and backward share."""
        cudnn, desc, problem = self._cudnn, self._desc, self._problem
        left, right = desc.window
        alignment = cudnn.diagonal_alignment
        reads_scale = problem.reads_logit_scale
        options: dict[str, Any] = {
            "attn_scale": self.number(Uid.LOGIT_SCALE) if reads_scale else desc.scale
        }
        if desc.window != (-1, -1):
            is_end = desc.bottom_right
            options["diagonal_alignment"] = alignment.BOTTOM_RIGHT if is_end else alignment.TOP_LEFT
        if left >= 0:  # cuDNN's bound is the first distance that is not seen
            options["diagonal_band_left_bound"] = left + 1
        if right >= 0:
            options["diagonal_band_right_bound"] = right
        if problem.has_lengths:
            options["use_padding_mask"] = True
            dims, int32 = (problem.batch, 1, 1, 1), cudnn.data_type.INT32
            options["seq_len_q"] = self.plain(Uid.LENGTHS_Q, dims, (1, 1, 1, 1), int32)
            options["seq_len_kv"] = self.plain(Uid.LENGTHS_KV, dims, (1, 1, 1, 1), int32)
        if problem.bias is not None:
            sizes, strides, dtype = problem.bias
            options["bias"] = self.plain(Uid.BIAS, sizes, strides, self._types[dtype])
        if desc.dropout:
            number, int64 = (1, 1, 1, 1), cudnn.data_type.INT64
            seed, offset = (
                self.plain(uid, number, number, int64) for uid in (Uid.SEED, Uid.OFFSET)
            )
            options["dropout"] = (desc.dropout, seed, offset)
        return options
