"""What stands in for cuDNN's attention on the CPU: it reads and writes a graph's tensors by
strides, offsets and lengths, as cuDNN does, and leaves NaN wherever cuDNN promises nothing.

Weights of zero are multiplied with whatever lies behind the end of a sequence, NaN included.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fp8core.backend_api import (
    Alignment,
    AttentionBackwardDesc,
    AttentionDesc,
    GemmDesc,
    OpDesc,
    PagedAttentionDesc,
)
from fp8core_backends.cuda import (
    attention,
    attention_backward,
    attention_call,
    attention_forward,
    attention_lengths,
    attention_plans,
    attention_support,
    attention_torch,
    cudnn_frontend,
)
from fp8core_backends.cuda.attention_graph import Problem, Strides, Uid, contiguous_strides

CPU = torch.device("cpu")
F64 = torch.float64
Tensors = dict[Uid, torch.Tensor]


class _Sequence:
    """Views of one sequence's operands, ``[heads, s, d]``, in the graph's own terms."""

    def __init__(self, desc: AttentionDesc, problem: Problem, tensors: Tensors, at: int) -> None:
        self.desc, self.problem, self.tensors, self.at = desc, problem, tensors, at
        lengths = [
            int(tensors[uid][at]) if problem.has_lengths else whole
            for uid, whole in ((Uid.LENGTHS_Q, problem.s_q), (Uid.LENGTHS_KV, problem.s_kv))
        ]
        self.length_q, self.length_kv = lengths
        assert 0 <= self.length_q <= problem.s_q
        assert 0 <= self.length_kv <= problem.s_kv
        if Uid.SCALE_S in tensors:  # cuDNN's kernel may not end with an empty sequence
            assert min(lengths) > 0
        is_ragged = desc.layout == "thd"
        self.rows_q = self.length_q if is_ragged else problem.s_q
        self.rows_kv = self.length_kv if is_ragged else problem.s_kv
        reads_scale = problem.reads_logit_scale
        assert reads_scale == (Uid.LOGIT_SCALE in tensors)
        self.scale = float(tensors[Uid.LOGIT_SCALE]) if reads_scale else desc.scale

    def view(self, uid: Uid, strides: Strides, heads: int, rows: int, size: int) -> torch.Tensor:
        tensor = self.tensors[uid]
        start = self.at * strides[0]
        if self.desc.layout == "thd":
            names = {Uid.SUM: "STATS", Uid.MAX_LOGIT: "STATS"}
            start = int(self.tensors[Uid[f"STARTS_{names.get(uid, uid.name)}"]][self.at])
        if not rows:
            return tensor.new_empty(heads, 0, size)
        last = start + (heads - 1) * strides[1] + (rows - 1) * strides[2] + size
        assert tensor.data_ptr() % 16 == 0 or uid not in (Uid.Q, Uid.K, Uid.V)
        assert start >= 0
        assert (
            tensor.storage_offset() + last <= tensor.untyped_storage().nbytes() // tensor.itemsize
        )
        return tensor.as_strided((heads, rows, size), strides[1:], tensor.storage_offset() + start)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        desc, problem = self.desc, self.problem
        q = self.view(Uid.Q, problem.q, desc.heads, self.rows_q, desc.head_dim)
        k = self.view(Uid.K, problem.k, desc.groups, self.rows_kv, desc.head_dim)
        v = self.view(Uid.V, problem.v, desc.groups, self.rows_kv, desc.head_dim_v)
        scales = (Uid.SCALE_INV_Q, Uid.SCALE_INV_K, Uid.SCALE_INV_V)
        q, k, v = (self.values(x, uid) for x, uid in zip((q, k, v), scales, strict=True))
        repeats = desc.heads // desc.groups
        return q, k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)

    def values(self, x: torch.Tensor, scale_inv: Uid) -> torch.Tensor:
        if scale_inv not in self.tensors:
            return x.double()
        return x.view(torch.float8_e4m3fn).double() * self.tensors[scale_inv].double().view(())

    def statistics(self, uid: Uid) -> torch.Tensor:
        heads, length = self.desc.heads, self.problem.s_q
        strides = (heads * length, length, 1, 1)
        if self.desc.layout == "thd":
            strides = (length * heads, 1, heads, 1)
        return self.view(uid, strides, heads, self.rows_q, 1)[..., 0]

    def logits(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        desc = self.desc
        logits = self.scale * (q @ k.mT)
        if self.problem.bias is not None:
            sizes, strides, _ = self.problem.bias
            bias = self.tensors[Uid.BIAS].as_strided(sizes, strides)
            logits = logits + bias.double()[self.at if sizes[0] > 1 else 0]
        i, j = torch.arange(self.rows_q)[:, None], torch.arange(self.rows_kv)
        hidden = (i >= self.length_q) | (j >= self.length_kv)
        shift = self.length_kv - self.length_q if desc.bottom_right else 0
        left, right = desc.window
        if right >= 0:
            hidden = hidden | (j > i + shift + right)
        if left >= 0:
            hidden = hidden | (j + left + 1 <= i + shift)
        return logits.masked_fill(hidden, -torch.inf)

    def kept(self, shape: torch.Size) -> torch.Tensor:
        p = self.desc.dropout
        if not p:
            return torch.ones((), dtype=F64)
        generator = torch.Generator().manual_seed(int(self.tensors[Uid.SEED]) + self.at)
        return (torch.rand(shape, generator=generator) >= p).double() / (1 - p)


def _codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale.double().view(())).clamp(-448, 448).float().to(torch.float8_e4m3fn)


def forward(desc: AttentionDesc, problem: Problem, tensors: Tensors) -> None:
    is_quantized = desc.low_precision
    assert is_quantized == (Uid.SCALE_S in tensors)
    assert problem.s_q > 1 or not (is_quantized or Uid.SINK in tensors)
    for at in range(problem.batch):
        one = _Sequence(desc, problem, tensors, at)
        q, k, v = one.operands()
        logits = one.logits(q, k)
        sums, largest = logits.logsumexp(-1), logits.new_full(logits.shape[:-1], -torch.inf)
        if logits.shape[-1]:
            largest = logits.amax(-1)
        if Uid.SINK in tensors:
            sums = torch.logaddexp(sums, tensors[Uid.SINK].double()[:, None])
        weights = (logits - sums[..., None]).exp()  # NaN where nothing is seen
        weights = weights * one.kept(weights.shape)
        if is_quantized:
            amax = tensors[Uid.AMAX_S][:1]
            amax.copy_(torch.cat((amax, weights.nan_to_num(0).flatten().float())).max())
            weights = _codes(weights, tensors[Uid.SCALE_S]).double()
            weights = weights * tensors[Uid.SCALE_INV_S].double()
        out = weights @ v
        if is_quantized:
            out = _codes(out, tensors[Uid.SCALE_OUT]).view(torch.uint8)
        size = desc.head_dim_v
        one.view(Uid.OUT, problem.out, desc.heads, one.rows_q, size).copy_(out)
        if desc.max_logit:
            one.statistics(Uid.MAX_LOGIT).copy_(largest)
            one.statistics(Uid.SUM).copy_((logits - largest[..., None]).exp().sum(-1))
        else:
            one.statistics(Uid.STATS).copy_(sums.masked_fill(sums == -torch.inf, torch.nan))


def backward(desc: AttentionDesc, problem: Problem, tensors: Tensors) -> None:
    assert (problem.s_q, problem.s_kv) != (1, 1)
    for at in range(problem.batch):
        one = _Sequence(desc, problem, tensors, at)
        q, k, v = one.operands()
        size = desc.head_dim_v
        grad = one.view(Uid.GRAD_OUT, problem.out, desc.heads, one.rows_q, size).double()
        out = one.view(Uid.OUT, problem.out, desc.heads, one.rows_q, size).double()
        weights = (one.logits(q, k) - one.statistics(Uid.STATS).double()[..., None]).exp()
        kept = one.kept(weights.shape)
        row_sums = (grad * out).sum(-1, keepdim=True)
        grad_logits = weights * ((grad @ v.mT) * kept - row_sums)
        if problem.bias_grad:
            tensors[Uid.GRAD_BIAS][at].copy_(grad_logits)
        grads = (
            (Uid.GRAD_Q, one.scale * grad_logits @ k, problem.s_q),
            (Uid.GRAD_K, one.scale * grad_logits.mT @ q, problem.s_kv),
            (Uid.GRAD_V, (weights * kept).mT @ grad, problem.s_kv),
        )
        for uid, value, length in grads:
            heads = desc.heads if uid is Uid.GRAD_Q else desc.groups
            dims = (problem.batch, heads, length, value.shape[-1])
            strides = contiguous_strides(desc.layout, dims)
            shared = value.unflatten(
                0, (heads, desc.heads // heads if uid is not Uid.GRAD_Q else 1)
            ).sum(1)
            one.view(uid, strides, heads, value.shape[1], value.shape[2]).copy_(shared)


def torch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, scale: float
) -> tuple[Any, ...]:
    """Stand in for torch's operator; the result has the memory order of the queries."""
    weights, sums = _plain(q, k, given[3], scale)
    out = weights @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    like = torch.empty_like(q[..., :1].expand(*q.shape[:-1], v.shape[-1]))
    return like.copy_(out), sums.float()[..., None], None, None, 0, 0, None, None, None


def torch_backward(*given: Any, scale: float) -> tuple[torch.Tensor, ...]:
    """Stand in for torch's operator of backward."""
    grad, q, k, v, out, stats = (one.double() for one in given[:6])
    repeats = q.shape[1] // k.shape[1]
    weights, _ = _plain(q, k, given[14], scale)
    keys, values = (x.repeat_interleave(repeats, 1) for x in (k, v))
    row_sums = (grad * out).sum(-1, keepdim=True)
    grad_logits = scale * weights * (grad @ values.mT - row_sums)
    assert stats.shape == (*q.shape[:-1], 1)
    grads = [grad_logits @ keys]
    for one in (grad_logits.mT @ q, weights.mT @ grad):
        grads.append(one.unflatten(1, (-1, repeats)).sum(2))
    return tuple(one.to(given[1].dtype) for one in grads)


def _plain(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = scale * (q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
    if causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1), logits.logsumexp(-1)


class StandIn:
    """A backend on the CPU: the CUDA backend's attention, with cuDNN stood in for."""

    def __init__(self, monkeypatch: Any) -> None:
        class Here:  # of torch.cuda.device
            def __init__(self, device: torch.device) -> None:
                assert device.type == "cpu"

            def __enter__(self) -> None: ...

            def __exit__(self, *error: object) -> None: ...

        monkeypatch.setattr(torch.cuda, "device", Here)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        for module in (attention_call, attention_torch):
            monkeypatch.setattr(module, "index_of", lambda device: 0)
        monkeypatch.setattr(attention_torch, "cudnn_attention", torch_forward)
        monkeypatch.setattr(attention_torch, "cudnn_attention_backward", torch_backward)
        monkeypatch.setattr(cudnn_frontend, "missing", lambda: None)

        class Device:
            """``torch.device("cuda", 0)`` in those modules is the CPU."""

            def __call__(self, *name: object) -> torch.device:
                return CPU

        here = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
        here.device = Device()
        for module in (attention_call, attention_forward, attention_backward, attention_torch):
            monkeypatch.setattr(module, "torch", here)
        steps = {"forward": forward, "quantized_forward": forward, "backward": backward}

        def build(graphs: Any, cudnn: Any, handle: int, problem: Problem) -> SimpleNamespace:
            def execute(tensors: Tensors, empty: Any, handle: int) -> None:
                steps[graphs._add.__name__](graphs._desc, problem, tensors)

            return SimpleNamespace(execute=execute)

        monkeypatch.setattr(attention_plans, "execution", lambda index: (None, 0))
        monkeypatch.setattr(attention_plans, "allocator", lambda index: None)
        monkeypatch.setattr(attention_lengths, "raw_stream", lambda index: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(attention_plans.Graphs, "_build", build)

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if isinstance(desc, AttentionBackwardDesc):
            return attention_support.attention_backward_problem(desc, device)
        if isinstance(desc, PagedAttentionDesc):
            return "no native library"
        if isinstance(desc, AttentionDesc):
            return attention_support.attention_problem(desc, device)
        return "not attention"

    def alignment(self, desc: GemmDesc) -> Alignment:
        return Alignment()

    def bind(self, desc: OpDesc, device: torch.device) -> Any:
        if isinstance(desc, AttentionDesc):
            return attention.bind_attention(desc, device)
        assert isinstance(desc, AttentionBackwardDesc)
        return attention.bind_attention_backward(desc, device)
