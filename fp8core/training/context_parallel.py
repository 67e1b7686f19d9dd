"""Batches for layers with a context-parallel group: which tokens of each sequence a rank holds.

Each sequence is cut into ``2 * size`` chunks, of which rank r holds chunk r and chunk
``2 * size - 1 - r``, so that a causal mask leaves all ranks the same work::

    fp8core.TransformerLayer.set_context_parallel_group(group, None, None, "p2p")
    mine = get_batch_on_this_cp_rank({"tokens": tokens, "labels": labels}, group)   # [b, s / size]

The names are those of Megatron-LM and Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

import torch
import torch.distributed as dist

from fp8core.chain.sequence_chunks import Chunks, partition
from fp8core.collectives import of_group
from fp8core.errors import OperandError

Tensor = torch.Tensor


@overload
def get_batch_on_this_cp_rank(
    batch: Tensor,
    cp_group: dist.ProcessGroup,
    seq_dim: int = ...,
    cu_seqlens_padded: Tensor | None = ...,
) -> Tensor: ...


@overload
def get_batch_on_this_cp_rank(
    batch: Mapping[str, Tensor | None],
    cp_group: dist.ProcessGroup,
    seq_dim: int = ...,
    cu_seqlens_padded: Tensor | None = ...,
) -> dict[str, Tensor | None]: ...


def get_batch_on_this_cp_rank(
    batch: Tensor | Mapping[str, Tensor | None],
    cp_group: dist.ProcessGroup,
    seq_dim: int = 1,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor | dict[str, Tensor | None]:
    """Return this rank's tokens of ``batch``, a tensor or several by name; None stays None.

    Args:
        batch: whole sequences along ``seq_dim``, the same on all ranks.
        cp_group: the group that the layers were given.
        seq_dim: the dimension of the tokens: 1 in ``[b, s]``, 0 in ``[s, b]`` and in thd.
        cu_seqlens_padded: in thd, where sequences begin, int32 ``[b + 1]``.

    Raises:
        OperandError: ``2 * size`` does not divide the length of a sequence.
    """
    if isinstance(batch, torch.Tensor):
        return _of_rank(batch, cp_group, seq_dim, cu_seqlens_padded)
    return {
        name: None if x is None else _of_rank(x, cp_group, seq_dim, cu_seqlens_padded)
        for name, x in batch.items()
    }


def gather_from_cp_ranks(
    x: Tensor,
    cp_group: dist.ProcessGroup,
    seq_dim: int = 1,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """Return whole sequences from the tokens of all ranks: the inverse of
    ``get_batch_on_this_cp_rank``. Nothing is differentiated.

    Raises:
        OperandError: ranks have other sizes, dtypes or ``cu_seqlens_padded``, or these do not fit,
            as in :func:`thd_get_partitioned_indices`; raised on every rank.
    """
    communicator = of_group(cp_group)
    local = x.detach().movedim(seq_dim, 0).contiguous()
    bounds = _shown(cu_seqlens_padded)
    communicator.agree(f"{local.dtype} {list(local.shape)}{bounds}", "tokens to gather")
    if cu_seqlens_padded is not None:
        total_tokens, size = len(local) * communicator.size, communicator.size
        _check_chunks("gather_from_cp_ranks", cu_seqlens_padded, total_tokens, size)
    parts = communicator.gather(local, "tokens").wait()
    parts = parts.view(communicator.size, *local.shape)
    layout = "sbhd" if cu_seqlens_padded is None else "thd"
    whole = Chunks(layout, communicator.size, cu_seqlens_padded).whole(parts)
    return whole.movedim(0, seq_dim)


def thd_get_partitioned_indices(
    cu_seqlens_padded: Tensor, total_tokens: int, size: int, rank: int
) -> Tensor:
    """Return which of ``total_tokens`` tokens in thd ``rank`` of ``size`` ranks holds, int64
    ``[total_tokens / size]``.

    Args:
        cu_seqlens_padded: where sequences begin, int32 ``[b + 1]``, each with its padding.

    Raises:
        OperandError: ``2 * size`` does not divide the tokens, or, where the host can read them, the
            length of a sequence; or those do not lie among the tokens.

    >>> thd_get_partitioned_indices(torch.tensor([0, 8, 12]), 12, 2, 1).tolist()
    [2, 3, 4, 5, 9, 10]
    """
    if not 0 <= rank < size:
        raise OperandError(f"thd_get_partitioned_indices: rank {rank} of {size} ranks.")
    _check_chunks("thd_get_partitioned_indices", cu_seqlens_padded, total_tokens, size)
    return partition(cu_seqlens_padded, total_tokens, size, rank)


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and labels ``[t]`` with each sequence padded at its end to a multiple of
    ``divisibility_factor``, which is ``2 * size``, and where sequences then begin; the input is
    ``[t]`` or ``[1, t]``.

    Waits for the device, as sizes follow from ``cu_seqlens``, integers ``[b + 1]``.

    Raises:
        OperandError: sizes that do not fit.
    """
    owner = "pad_thd_sequences_for_cp"
    lengths, starts = _padded(owner, cu_seqlens, divisibility_factor)
    ids, targets = (x.squeeze(0) if x.dim() == 2 else x for x in (input_ids, labels))
    num_tokens = int(cu_seqlens[-1])
    if not ids.shape == targets.shape == (num_tokens,):
        raise OperandError(
            f"{owner}: tokens {list(input_ids.shape)} and labels "
            f"{list(labels.shape)} of sequences that end at {num_tokens}; expected [{num_tokens}] "
            f"or [1, {num_tokens}] of both."
        )
    shift = torch.repeat_interleave(starts[:-1] - cu_seqlens[:-1], lengths)
    to = torch.arange(num_tokens, device=shift.device) + shift
    total = int(starts[-1])
    ids = ids.new_full((total,), padding_token_id).index_copy(0, to, ids)
    targets = targets.new_full((total,), padding_label_id).index_copy(0, to, targets)
    return ids, targets, starts.to(cu_seqlens.dtype)


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Return the position of each token in its sequence, padding included, where
    ``pad_thd_sequences_for_cp`` pads the sequences.

    Waits for the device, as sizes follow from ``cu_seqlens``, integers ``[b + 1]``.

    Raises:
        OperandError: no such sequences, or a factor below 1.

    >>> generate_positional_ids_for_cp(torch.tensor([0, 3, 5]), 4).tolist()
    [0, 1, 2, 3, 0, 1, 2, 3]
    """
    _, starts = _padded("generate_positional_ids_for_cp", cu_seqlens, divisibility_factor)
    begins = torch.repeat_interleave(starts[:-1], starts.diff())
    return (torch.arange(len(begins), device=starts.device) - begins).to(dtype)


def _padded(owner: str, cu_seqlens: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the lengths of sequences, and where they begin once each is padded to a multiple of
    ``factor``, int64 ``[b]`` and ``[b + 1]``."""
    check_bounds(owner, cu_seqlens)
    offsets = cu_seqlens.tolist()
    if not isinstance(factor, int) or factor < 1 or offsets != sorted([0, *offsets[1:]]):
        raise OperandError(
            f"{owner}: cu_seqlens {offsets}, divisibility_factor={factor!r}; expected offsets that "
            f"ascend from 0, and a positive integer."
        )
    lengths = cu_seqlens.diff().long()
    padded = (lengths + factor - 1) // factor * factor
    return lengths, torch.nn.functional.pad(padded.cumsum(0), (1, 0))


def check_bounds(owner: str, cu_seqlens: object) -> None:
    """Raise OperandError unless ``cu_seqlens`` is a vector of integers with at least one."""
    kind: object = type(cu_seqlens).__name__
    if isinstance(cu_seqlens, Tensor):
        kind = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        if cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.dim() == 1 <= len(
            cu_seqlens
        ):
            return
    raise OperandError(f"{owner}: cu_seqlens is {kind}; expected int32 or int64 [b + 1].")


def _check_chunks(owner: str, cu_seqlens_padded: Tensor, total_tokens: int, size: int) -> None:
    """Raise OperandError unless sequences that begin there lie among ``total_tokens`` tokens, and
    are of two chunks for each of ``size`` ranks; offsets on a device are not read."""
    check_bounds(owner, cu_seqlens_padded)
    starts = cu_seqlens_padded.tolist() if cu_seqlens_padded.device.type == "cpu" else []
    if starts and (starts != sorted([0, *starts[1:]]) or starts[-1] > total_tokens):
        raise OperandError(
            f"{owner}: cu_seqlens {starts} of {total_tokens} tokens; expected "
            f"offsets that ascend from 0 to at most {total_tokens}."
        )
    if total_tokens % (2 * size) or any(start % (2 * size) for start in starts):
        raise OperandError(
            f"{owner}: {total_tokens} tokens, sequences that begin at "
            f"{starts or 'offsets on a device'}, over {size} ranks: expected multiples of "
            f"{2 * size}, two chunks of each sequence a rank. Pad them by "
            f"pad_thd_sequences_for_cp(divisibility_factor={2 * size})."
        )


def _shown(cu_seqlens: object) -> str:
    """Return offsets as ranks compare them; of those on a device, how many there are."""
    if not isinstance(cu_seqlens, Tensor):
        return "" if cu_seqlens is None else f", cu_seqlens {type(cu_seqlens).__name__}"
    is_read = cu_seqlens.device.type == "cpu"
    starts = cu_seqlens.tolist() if is_read else list(cu_seqlens.shape)
    return f", cu_seqlens {cu_seqlens.dtype} {starts}"


def _of_rank(
    x: Tensor, group: dist.ProcessGroup, dim: int, cu_seqlens_padded: Tensor | None
) -> Tensor:
    communicator = of_group(group)
    size, rank = communicator.size, communicator.rank
    if cu_seqlens_padded is not None:
        where = thd_get_partitioned_indices(cu_seqlens_padded, x.shape[dim], size, rank)
        return x.index_select(dim, where.to(x.device))
    if x.shape[dim] % (2 * size):
        raise OperandError(
            f"get_batch_on_this_cp_rank: {list(x.shape)} has {x.shape[dim]} tokens in dimension "
            f"{dim}, which {size} ranks do not divide into two chunks each. Pad sequences to a "
            f"multiple of {2 * size} tokens, or say which dimension they are in: seq_dim."
        )
    chunks = x.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)
