"""The angles by which rotary position embedding turns the elements of a head."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import torch

from fp8core.errors import OperandError
from fp8core.modules.calls.parameters import check_size, resolve_device


class RotaryPositionEmbedding(torch.nn.Module):
    """Makes the angles by which :func:`~fp8core.apply_rotary_pos_emb` rotates queries and keys.

    Position ``p`` rotates pair ``i`` of the r rotated elements by
    ``p * rotary_base ** (-2 * i / r)``. The factors are the buffer ``inv_freq``, which stays
    float32 when the module is converted to another dtype.

    Source: Su et al., RoFormer, section 3.2.2 (arXiv 2104.09864); position interpolation: Chen et
    al. (arXiv 2306.15595).

    Args:
        dim: the size of a head.
        rotary_percent: the share of ``dim`` that is rotated.
        seq_len_interpolation_factor: positions are divided by it; needs
            ``pretrained_max_position_embeddings``.
        pretrained_max_position_embeddings: the length that the model was trained for. Sequences
            that are longer than it times the factor are squeezed into this length.
        rotary_base: the base of the powers.
        interleaved: pairs are neighbours, ``(0, 1), (2, 3)``, else halves apart.
        device: of the factors; None takes the selected backend's.

    Raises:
        OperandError: a number of rotated elements that is odd or below 2, or a size or factor that
            is not positive.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        size = _rotated_size(dim, rotary_percent)
        _check_positive("rotary_base", rotary_base)
        factor, trained = seq_len_interpolation_factor, pretrained_max_position_embeddings
        if factor is not None:
            _check_positive("seq_len_interpolation_factor", factor)
            if trained is None:
                raise OperandError(
                    f"RotaryPositionEmbedding(seq_len_interpolation_factor={factor!r}) needs "
                    f"pretrained_max_position_embeddings, the length that the model was trained "
                    f"for; it is None."
                )
        if trained is not None:
            _check_positive("pretrained_max_position_embeddings", trained)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        even = torch.arange(0, size, 2, dtype=torch.float32, device=resolve_device(device))
        self.register_buffer("inv_freq", 1.0 / (rotary_base ** (even / size)))

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return the angles of the positions ``offset`` to ``offset + max_seq_len - 1``.

        float32 ``[max_seq_len, 1, 1, r]``, with r the number of rotated elements. An ``offset`` is
        a position, before interpolation.

        Raises:
            OperandError: one of them is no integer of at least 0.
        """
        _check_count("max_seq_len", max_seq_len)
        _check_count("offset", offset)
        factors = self.inv_freq
        positions = torch.arange(max_seq_len, device=factors.device, dtype=factors.dtype) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            is_longer = max_seq_len > trained * factor
            positions = positions * (1 / (max_seq_len / trained) if is_longer else 1 / factor)
        angles = positions[:, None] * factors
        if self.interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> RotaryPositionEmbedding:
        """Move the factors, without a change of their dtype: the last bits of a factor are whole
        turns at large positions."""
        before = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self.inv_freq.dtype != before.dtype:
            self.inv_freq = before.to(self.inv_freq.device)
        return self

    def extra_repr(self) -> str:
        """Return the number of rotated elements, the base and how they are paired."""
        size = 2 * self.inv_freq.shape[0]
        return f"{size}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"


def _rotated_size(dim: int, percent: float) -> int:
    """Return how many elements of a head are rotated."""
    check_size("RotaryPositionEmbedding", "dim", dim)
    if not _is_number(percent) or not 0 < percent <= 1:
        raise OperandError(
            f"RotaryPositionEmbedding(rotary_percent={percent!r}): expected a share of dim, above "
            f"0 and at most 1."
        )
    size = int(dim * percent)
    if size < 2 or size % 2:
        raise OperandError(
            f"RotaryPositionEmbedding(dim={dim!r}, rotary_percent={percent!r}) rotates {size} "
            f"elements of a head; expected an even number of at least 2, as they are rotated in "
            f"pairs."
        )
    return size


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_positive(name: str, value: float) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise OperandError(
            f"RotaryPositionEmbedding({name}={value!r}): expected a positive number, not infinite."
        )


def _check_count(name: str, value: object) -> None:
    """Refuse what is no position: tensors too, whose values would have to be waited for."""
    is_integer = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    if is_integer and value >= 0:  # type: ignore[operator]  # an integer
        return
    shown = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
    raise OperandError(
        f"RotaryPositionEmbedding: {name} is {shown}; expected an integer of at least 0."
    )
