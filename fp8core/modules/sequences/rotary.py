"""The rotation of queries and keys by the angles of their positions."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from typing_extensions import override

from fp8core.backend_api import ATTENTION_LAYOUTS
from fp8core.chain import run as chain
from fp8core.chain.alone import is_transformed, needs_node
from fp8core.chain.call import Call
from fp8core.chain.sequence_chunks import Chunks
from fp8core.chain.series import Chain
from fp8core.chain.simple import RotaryLink, RotaryShape
from fp8core.chain.unwrap import PLAIN, as_readable, unwrap
from fp8core.context import recompute
from fp8core.errors import OperandError, UnsupportedError, checked_choice, elsewhere
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound
from fp8core.modules.calls.inputs import check_input, check_is_whole, check_kind
from fp8core.modules.calls.parameters import refuse_arguments
from fp8core.modules.memo import replay
from fp8core.modules.run import note, run_links
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.private import is_transform_active
from fp8core.torch_ops.repeats import sameness_to


class Spans(NamedTuple):
    """The first positions of the sequences, int32 ``[b]``, and where these lie among the tokens, or
    sums of their lengths, int32 ``[b + 1]``; None where the call does not say."""

    starts: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    def check(self, label: str, layout: str, t: torch.Tensor, positions: int) -> None:
        """Refuse a token at a position that is not below ``positions``, and sequences that do not
        lie among the tokens, where the host knows the values without waiting for a device."""
        if self.cu_seqlens is None:
            _check_end(label, t.shape[layout.index("s")], positions)
            if self.starts is None:
                return
        if t.device.type == "cpu" and not (is_captured(t) or is_transform_active()):
            self._check_values(label, layout, t, positions)

    def _check_values(self, label: str, layout: str, t: torch.Tensor, positions: int) -> None:
        if self.cu_seqlens is None:
            lengths = [t.shape[layout.index("s")]] * t.shape[layout.index("b")]
        else:
            bounds = self.cu_seqlens.tolist()
            lengths = [after - before for before, after in itertools.pairwise(bounds)]
            is_thd = layout == "thd"
            last = bounds[-1] if is_thd else max(lengths, default=0)
            limit = t.shape[0 if is_thd else layout.index("s")]
            if bounds[0] < 0 or last > limit or min(lengths, default=0) < 0:
                rule = "bounds that rise from 0 to at most that" if is_thd else "no longer sequence"
                raise OperandError(
                    f"{label}: cu_seqlens {bounds} of {limit} tokens; expected {rule}."
                )
        starts = [0] * len(lengths) if self.starts is None else self.starts.tolist()
        if min(starts, default=0) < 0:
            raise OperandError(
                f"{label}: start_positions {starts} has one below 0; expected the number of tokens "
                f"before each sequence."
            )
        _check_end(label, max(map(operator.add, lengths, starts), default=0), positions)


def _check_end(label: str, end: int, positions: int) -> None:
    if end > positions:
        raise OperandError(
            f"{label}: a sequence reaches position {end - 1}, but freqs has the angles of "
            f"{positions} positions; ask RotaryPositionEmbedding for at least {end}."
        )


def spans_of(
    label: str,
    layout: str,
    t: torch.Tensor,
    starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Spans:
    """Return the sequences of a call, their numbers as int32.

    Raises:
        OperandError: numbers of another kind or on another device, or not one for each sequence.
    """
    if cu_seqlens is None and layout == "thd":
        raise OperandError(
            f"{label}: cu_seqlens is None for tensor_format='thd'; expected int32 [b + 1], where "
            f"its sequences begin and end."
        )
    batch = 0 if layout == "thd" else t.shape[layout.index("b")]
    if cu_seqlens is not None:
        cu_seqlens = _integers(label, "cu_seqlens", cu_seqlens, t)
        batch = cu_seqlens.shape[0] - 1 if layout == "thd" else batch
        if cu_seqlens.shape[0] != batch + 1 or batch < 0:
            raise OperandError(
                f"{label}: cu_seqlens has {cu_seqlens.shape[0]} entries; expected one more than "
                f"there are sequences."
            )
    if starts is not None:
        starts = _integers(label, "start_positions", starts, t)
        if starts.shape[0] != batch:
            raise OperandError(
                f"{label}: start_positions has {starts.shape[0]} entries; expected one for each of "
                f"the {batch} sequences."
            )
    return Spans(starts, cu_seqlens)


def _integers(label: str, name: str, value: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return a vector of integers as int32."""
    if not isinstance(value, torch.Tensor):
        raise OperandError(f"{label}: {name} is {type(value).__name__}; expected a torch.Tensor.")
    if not torch.compiler.is_compiling():
        value = as_readable(unwrap(value, name), t.device, f"{label}: {name}")
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        raise OperandError(
            f"{label}: {name} is {value.dtype} {list(value.shape)}; expected a vector of int32."
        )
    if value.dtype == torch.int64:  # beyond int32 is beyond all angles, and must not wrap around
        limits = torch.iinfo(torch.int32)
        value = value.clamp(limits.min, limits.max)
    return value.to(torch.int32)


class Rotary(LowPrecisionModule):
    """Rotates the heads of a tensor by the angles of their positions, as one operation of a
    backend; a layer with rotary embedding has a Rotary inside, so that ``fp8core.explain`` lists
    the operation.

    Args:
        tensor_format: the order of the dimensions: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        interleaved: as in :class:`~fp8core.RotaryPositionEmbedding`.
        name: the layer's name in messages.
    """

    kind = "rotary"
    shape_fields = ("tensor_format", "interleaved")

    def __init__(
        self, tensor_format: str = "sbhd", interleaved: bool = False, name: str | None = None
    ) -> None:
        super().__init__(name)
        self.tensor_format = _checked_format("Rotary", tensor_format)
        self.interleaved = interleaved

    @override
    def link_shapes(self) -> tuple[RotaryShape]:
        return (RotaryShape(self.tensor_format, self.interleaved),)

    def _describe(self) -> list[str]:
        return [f"tensor_format={self.tensor_format!r}", f"interleaved={self.interleaved}"]

    def forward(
        self,
        t: torch.Tensor,
        freqs: torch.Tensor,
        start_positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``t``, rotated; the arguments are those of :func:`apply_rotary_pos_emb`."""
        sources = [
            freqs,
            *(tensor for tensor in (start_positions, cu_seqlens) if tensor is not None),
        ]
        options = (start_positions is None, cu_seqlens is None)
        memo = None if torch.compiler.is_compiling() else self._bindings.memo
        if memo is not None:
            again = replay(self, memo, t, sources, options)
            if again is not None:
                return again
        dtype = check_input(self, t, None, None)
        layout, label = self.tensor_format, self.label
        check_is_whole(label, "t", t)
        if t.dim() != len(layout) or 0 in t.shape[-2:]:
            raise OperandError(
                f"{label}: t is {list(t.shape)}; expected {', '.join(layout)}, none of h and d 0."
            )
        _check_freqs(label, t, freqs)
        spans = spans_of(label, layout, t, start_positions, cu_seqlens)
        spans.check(label, layout, t, freqs.shape[0])
        freqs = freqs if freqs.dtype == torch.float32 else freqs.float()
        bound = bind(self, t.device, dtype)
        tensors = (spans.starts, spans.cu_seqlens if layout == "thd" else None)
        call = Call(tensors=tensors, sizes=t.shape)
        y: torch.Tensor = run_links(self, bound, bound.parts[0], t.flatten(-2), [freqs], call)
        is_unchanged = spans.starts is start_positions and spans.cu_seqlens is cu_seqlens
        # On a CPU the host reads positions, to refuse those that have no angle.
        if is_unchanged and sources[0] is freqs and (len(sources) == 1 or not t.is_cpu):
            self._note(bound, t, sources, options, call)
        return y.view(t.shape)

    def rotated_parts(
        self, parts: Sequence[torch.Tensor], freqs: torch.Tensor, spans: Spans
    ) -> torch.Tensor | None:
        """Return queries, keys and values ``[.., heads of all, head size]``, the first two rotated,
        in one launch, without gradients; None of a call that is none, or that :meth:`forward` has
        to check."""
        query, *rest = parts
        tensors = [*rest, freqs, *(tensor for tensor in spans if tensor is not None)]
        if needs_node(query, *tensors) or is_captured(query) or is_transformed():
            return None
        if recompute.current() is not None or not PLAIN.issuperset(map(type, (query, *tensors))):
            return None
        options, memo = (*(tensor is None for tensor in spans), len(parts)), self._bindings.memo
        if memo is not None:
            again = replay(self, memo, query, tensors, options)
            if again is not None:
                return again
        link = self.link_of(query, freqs, spans)
        if link is None or link.rotate_parts is None:
            return None
        run, has_starts = link.rotate_parts, spans.starts is not None
        reads_bounds = self.tensor_format == "thd"

        def rotate(q: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
            starts = tensors[3] if has_starts else None
            return run(q, *tensors[:3], starts, tensors[-1] if reads_bounds else None)

        y = rotate(query, *tensors)
        is_same = sameness_to((query, *tensors))
        if is_same is not None and not query.is_cpu:  # where the host reads positions
            prepared = chain.Prepared(is_same, torch.Tensor.data_ptr, rotate)
            bound = bind(self, query.device, query.dtype)
            note(self, bound, prepared, len(tensors), arguments=options)
        return y

    def link_of(self, t: torch.Tensor, freqs: torch.Tensor, spans: Spans) -> RotaryLink | None:
        """Return the rotation of tensors like ``t``; None for tensors that :meth:`forward` has to
        convert, or refuses."""
        is_plain = freqs.dtype == torch.float32 and type(freqs) in PLAIN
        if not is_plain or freqs.requires_grad or freqs.device != t.device or not freqs.numel():
            return None
        try:
            _check_freqs(self.label, t, freqs)
            converted = spans_of(self.label, self.tensor_format, t, *spans)
            if not all(map(operator.is_, converted, spans)):
                return None
            spans.check(self.label, self.tensor_format, t, freqs.shape[0])
        except OperandError:  # which forward raises, by the name that it has there
            return None
        (link,) = bind(self, t.device, t.dtype).links
        assert isinstance(link, RotaryLink)
        return link

    def _note(
        self,
        bound: Bound,
        t: torch.Tensor,
        sources: Sequence[torch.Tensor],
        options: tuple[bool, bool],
        call: Call,
    ) -> None:
        """Note the links of a call for calls with tensors of the same sizes and strides; with
        gradients of one at the first positions alone."""
        is_differentiated = torch.is_grad_enabled()
        if torch.compiler.is_compiling() or (is_differentiated and len(sources) > 1):
            return
        is_same = sameness_to((t, *sources))
        is_plain = PLAIN.issuperset(map(type, (t, *sources)))
        if is_same is None or not is_plain or not isinstance(bound.parts[0], Chain):
            return
        run = chain.prepared_run(bound.parts[0], t.flatten(-2), sources[:1], call)
        if run is None:
            return
        (link,) = bound.links
        assert isinstance(link, RotaryLink)
        has_starts, reads_bounds = not options[0], self.tensor_format == "thd"

        def rotate(t: torch.Tensor, freqs: torch.Tensor, *spans: torch.Tensor) -> torch.Tensor:
            if is_differentiated:
                return run(t.flatten(-2), freqs).view(t.shape)
            starts = spans[0] if has_starts else None
            return link.rotate(t, freqs, starts, spans[-1] if reads_bounds else None)

        prepared = chain.Prepared(is_same, torch.Tensor.data_ptr, rotate)
        note(self, bound, prepared, len(sources), arguments=options)


def rotary_link(
    tensor_format: str, interleaved: bool, t: torch.Tensor, freqs: torch.Tensor
) -> RotaryLink | None:
    """Return the rotation of tensors like ``t``, from position 0 on, as a part of another link;
    None for angles that a call has to convert, or refuses."""
    return _rotary(tensor_format, interleaved, t).link_of(t, freqs, Spans(None, None))


def rotated_parts(
    tensor_format: str,
    interleaved: bool,
    parts: Sequence[torch.Tensor],
    freqs: torch.Tensor,
    spans: Spans,
) -> torch.Tensor | None:
    """Return what :meth:`Rotary.rotated_parts` does."""
    return _rotary(tensor_format, interleaved, parts[0]).rotated_parts(parts, freqs, spans)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Return queries or keys rotated by the angles of their positions, in the dtype of ``t``.

    Computed in float32 (float64 from float64) and rounded once; differentiable with respect to
    ``t``.

    Args:
        t: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``, as ``tensor_format`` says; any
            strides.
        freqs: angles of positions 0 and up, ``[positions, 1, 1, r]``, as
            :class:`~fp8core.RotaryPositionEmbedding` makes them; the first r of the d elements of a
            head are rotated, r even.
        tensor_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        start_positions: integers ``[b]`` on the device of ``t``: the position of the first token of
            each sequence; None stands for 0.
        interleaved: as in :class:`~fp8core.RotaryPositionEmbedding`.
        fused: has no effect, as a backend always computes it as one operation.
        cu_seqlens: integers ``[b + 1]`` on the device of ``t``, for ``"thd"``: where sequences
            begin and end among the tokens; tokens of no sequence become zeros. In the other formats
            their differences are lengths: tokens behind them need no angle, and get NaN without.
        cp_size, cp_rank: of a context-parallel group, whose ranks hold two chunks of each sequence
            each; ``freqs`` and ``cu_seqlens`` are those of whole sequences.

    On an accelerator the values of ``start_positions`` and ``cu_seqlens`` are not read by the host:
    a token at a position that ``freqs`` lacks gets NaN there, and an error on the CPU.

    Raises:
        OperandError: shapes, dtypes or devices that do not fit, or a position that ``freqs`` lacks.
        UnsupportedError: angles that require a gradient.
    """
    owner = "apply_rotary_pos_emb"
    layer = _rotary(_checked_format(owner, tensor_format), bool(interleaved), t)
    if cp_size != 1 or cp_rank:
        spans = start_positions, cu_seqlens
        if start_positions is not None and tensor_format != "thd":
            return _rotate_halves(layer, t, freqs, spans, cp_size, cp_rank)
        chunks = _of_chunks(owner, t, freqs, tensor_format, spans, cp_size, cp_rank)
        freqs, start_positions, cu_seqlens = chunks
    y: torch.Tensor = layer(t, freqs, start_positions, cu_seqlens)
    return y


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value of a packed projection, the first two rotated.

    Args:
        qkv: ``[s, b, g, n]`` or ``[b, s, g, n]``; for each of the g groups of heads, the queries of
            its heads, its key and its value, one after the other.
        q_freqs, k_freqs: angles for the queries and for the keys, as ``freqs`` of
            :func:`apply_rotary_pos_emb`.
        qkv_split_arg_list: three integers: how many of the n elements are queries, key and value.
            The first is a multiple of the second, which is the size of a head.
        tensor_format: ``"sbhd"`` or ``"bshd"``.
        start_positions, interleaved, cp_size, cp_rank: as of :func:`apply_rotary_pos_emb`.
        cu_seqlens: not offered.

    Returns the query ``[s, b, h, d]``, with ``h = g * queries / d`` heads, the key ``[s, b, g, d]``
    and the value ``[s, b, g, d_v]``, a view of ``qkv``; batch first in ``"bshd"``.

    Raises:
        OperandError: sizes that do not fit.
        UnsupportedError: ``"thd"``, start positions over ranks, or ``cu_seqlens``.
    """
    owner = "apply_fused_qkv_rotary_pos_emb"
    if cu_seqlens is not None:
        refuse_arguments(apply_fused_qkv_rotary_pos_emb, locals(), ("cu_seqlens",))
    if _checked_format(owner, tensor_format) == "thd":
        raise UnsupportedError(
            f"{owner}(tensor_format='thd') is not offered; split the tensor and call "
            f"apply_rotary_pos_emb for query and key."
        )
    check_kind(owner, "qkv", qkv)
    sizes = list(qkv_split_arg_list)
    is_split = len(sizes) == 3 and min(sizes) > 0 and sizes[0] % sizes[1] == 0
    if qkv.dim() != 4 or not is_split or sum(sizes) != qkv.shape[-1]:
        raise OperandError(
            f"{owner}: qkv {list(qkv.shape)} with qkv_split_arg_list={sizes}; expected four "
            f"dimensions, and sizes of queries, key and value that add up to the last one, the "
            f"first a multiple of the second."
        )
    query, key, value = torch.split(qkv, sizes, dim=-1)
    if cp_size != 1 or cp_rank:
        spans = start_positions, None
        q_freqs, k_freqs = (
            _of_chunks(owner, qkv, freqs, tensor_format, spans, cp_size, cp_rank)[0]
            for freqs in (q_freqs, k_freqs)
        )
    layer = _rotary(tensor_format, bool(interleaved), key)
    heads = query.view(*query.shape[:-1], sizes[0] // sizes[1], sizes[1])
    rotated = _rotate_groups(layer, heads, q_freqs, start_positions)
    return rotated, layer(key, k_freqs, start_positions), value


def _rotate_groups(
    layer: Rotary, query: torch.Tensor, freqs: torch.Tensor, starts: torch.Tensor | None
) -> torch.Tensor:
    """Return ``query [.., .., groups, heads of a group, d]`` rotated, with its heads in one
    dimension.

    In sbhd the groups of a sequence count as sequences, as their rows are adjacent: no queries are
    copied. In bshd the heads of one token are brought together first.
    """
    first, second, groups, share, size = query.shape
    is_each = isinstance(starts, torch.Tensor) and tuple(starts.shape) == (second,)
    if layer.tensor_format != "sbhd" or groups == 1 or not (starts is None or is_each):
        y: torch.Tensor = layer(query.reshape(first, second, groups * share, size), freqs, starts)
        return y
    each = None if starts is None else starts.repeat_interleave(groups)
    y = layer(query.flatten(1, 2), freqs, each)
    return y.view(first, second, groups * share, size)


def _rotate_halves(
    layer: Rotary,
    t: torch.Tensor,
    freqs: torch.Tensor,
    spans: tuple[torch.Tensor | None, torch.Tensor | None],
    *ranks: int,
) -> torch.Tensor:
    """Return ``t`` rotated, the two chunks of each sequence that a rank of a context-parallel group
    has, where whole sequences have start positions; in sbhd and bshd."""
    owner, dim = layer.label, layer.tensor_format.index("s")
    length = _whole_length(owner, t, layer.tensor_format, *ranks)
    starts, (size, rank) = spans_of(owner, layer.tensor_format, t, *spans).starts, ranks
    assert starts is not None
    chunk = length // (2 * size)
    firsts = (starts.long() + number * chunk for number in (rank, 2 * size - 1 - rank))
    halves = torch.split(t, chunk, dim) if chunk else (t, t)
    rotated = [layer(x, freqs, first) for x, first in zip(halves, firsts, strict=True)]
    return torch.cat(rotated, dim)


def _whole_length(owner: str, t: torch.Tensor, layout: str, size: int, rank: int) -> int:
    """Return how many tokens a sequence has of which each of ``size`` ranks has those of ``t``; of
    thd, whose sequences say it, how many all have."""
    if not 0 <= rank < size:
        raise OperandError(
            f"{owner}(cp_size={size}, cp_rank={rank}): expected a rank of the group."
        )
    length = size * t.shape[0 if layout == "thd" else layout.index("s")]
    if length % (2 * size) and layout != "thd":
        raise OperandError(
            f"{owner}: t {list(t.shape)} on each of {size} ranks: expected two chunks of equal "
            f"length of each sequence."
        )
    return length


def _of_chunks(
    owner: str,
    t: torch.Tensor,
    freqs: torch.Tensor,
    layout: str,
    spans: tuple[torch.Tensor | None, torch.Tensor | None],
    *ranks: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the angles, the start positions and the cu_seqlens of the two chunks of each sequence
    that a rank of a context-parallel group has; start positions in thd alone."""
    size, rank = ranks
    length = _whole_length(owner, t, layout, *ranks)
    check_kind(owner, "freqs", freqs)
    if layout != "thd":
        if spans[0] is not None:
            raise UnsupportedError(
                f"{owner}(cp_size={size}, start_positions=a tensor) is not offered: split the "
                f"tensor and call apply_rotary_pos_emb for query and key."
            )
        if freqs.shape[0] < length:
            raise OperandError(
                f"{owner}: t {list(t.shape)} on each of {size} ranks, freqs {list(freqs.shape)}: "
                f"expected angles of {length} positions."
            )
        return Chunks("sbhd", size).parts(freqs[:length])[rank], None, None
    starts, cu_seqlens = spans_of(owner, layout, t, *spans)
    assert cu_seqlens is not None
    is_readable = t.device.type == "cpu" and not (is_captured(t) or is_transform_active())
    if is_readable and any(bound % (2 * size) for bound in cu_seqlens.tolist()):
        raise OperandError(
            f"{owner}: cu_seqlens {cu_seqlens.tolist()} over {size} ranks: expected multiples of "
            f"{2 * size}, two chunks of equal length of each sequence."
        )
    chunks = cu_seqlens.diff() // (2 * size)
    begins = cu_seqlens // size
    ends = torch.stack((begins[:-1] + chunks, begins[1:]), 1).flatten()
    positions = torch.stack((rank * chunks, (2 * size - 1 - rank) * chunks), 1)
    if starts is not None:
        positions = positions.long() + starts[:, None]
    return freqs, positions.flatten(), torch.nn.functional.pad(ends, (1, 0))


def _rotary(tensor_format: str, interleaved: bool, t: torch.Tensor) -> Rotary:
    """Return the layer that keeps what the function has bound for tensors like ``t``: one for the
    heads of queries, and another for the fewer ones of keys, as a layer has a memo of one call."""
    slot = 0
    if not torch.compiler.is_compiling() and isinstance(t, torch.Tensor) and t.dim() > 1:
        slot = min(t.shape[-2].bit_length(), _SLOTS - 1)
    return _LAYERS[tensor_format, interleaved, slot]


def _checked_format(owner: str, tensor_format: str) -> str:
    return checked_choice(owner, "tensor_format", tensor_format, ATTENTION_LAYOUTS)


def _check_freqs(label: str, t: torch.Tensor, freqs: torch.Tensor) -> None:
    check_kind(label, "freqs", freqs)
    check_is_whole(label, "freqs", freqs)
    if freqs.requires_grad:
        raise UnsupportedError(
            f"{label}: freqs requires a gradient, which is not offered; pass freqs.detach()."
        )
    if freqs.device != t.device:
        raise elsewhere(f"{label}: freqs", freqs.device, "t", t.device)
    if freqs.dim() != 4 or tuple(freqs.shape[1:3]) != (1, 1):
        raise OperandError(
            f"{label}: freqs is {list(freqs.shape)}; expected [positions, 1, 1, r], as "
            f"RotaryPositionEmbedding makes it."
        )
    size = freqs.shape[3]
    if size % 2 or not 0 < size <= t.shape[-1]:
        raise OperandError(
            f"{label}: freqs {list(freqs.shape)} rotates {size} of the {t.shape[-1]} elements of a "
            f"head; expected an even number of them, as they are rotated in pairs."
        )


_SLOTS = 9
_LAYERS = {
    (layout, interleaved, slot): Rotary(layout, interleaved, "apply_rotary_pos_emb")
    for layout in ATTENTION_LAYOUTS
    for interleaved in (False, True)
    for slot in range(_SLOTS)
}
