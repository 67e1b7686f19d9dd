"""Zero rows behind the tokens of each expert, and their removal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.chain.alone import plain
from fp8core.context.autocast import active
from fp8core.errors import OperandError
from fp8core.recipe import CustomRecipe, Recipe, get_default_recipe


class _Padding(torch.nn.Module):
    """The numbers of groups, and the multiple that the rows of each are padded to."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if align_size is not None and align_size < 1:
            raise OperandError(
                f"{type(self).__name__}(align_size={align_size!r}): expected an integer >= 1, or "
                f"None for what the recipe needs."
            )
        self.num_gemms = num_gemms
        self.align_size = align_size

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """Return the rows of each group with the padding.

        Raises:
            OperandError: another number of groups than the layer has, or a negative number of rows.
        """
        sizes = list(m_splits)
        if len(sizes) != self.num_gemms or min(sizes, default=0) < 0:
            raise OperandError(
                f"{type(self).__name__}: m_splits {sizes}; expected {self.num_gemms} numbers of "
                f"rows, 0 or above."
            )
        if self.align_size is None:
            self.align_size = _align_size()
        return [size + -size % self.align_size for size in sizes]

    def _groups(self, input: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return the rows of each group of ``input [..., hidden]``.

        Raises:
            OperandError: ``sizes`` do not add up to its rows.
        """
        rows = plain(input, f"input of {type(self).__name__}").reshape(-1, input.shape[-1])
        if sum(sizes) != rows.shape[0]:
            raise OperandError(
                f"{type(self).__name__}: input {list(input.shape)} has {rows.shape[0]} rows; "
                f"expected {sum(sizes)}, those of the groups {list(sizes)}."
            )
        return torch.split(rows, list(sizes))

    def extra_repr(self) -> str:
        """Return the number of groups and the multiple."""
        return f"{self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Padding):
    """Adds zero rows to each group, up to a multiple.

    :class:`fp8core.GroupedLinear` pads for its blocks without this module.

    Args:
        num_gemms: the number of groups.
        align_size: the multiple. None: what the active recipe needs when the layer is first
            called, 32 for MXFP8, 128 for NVFP4, 16 for the others, and
            ``CustomRecipe.quantization_alignment``; outside of ``autocast``, the default recipe's.

    Raises:
        OperandError: ``align_size`` below 1.
    """

    def forward(
        self, input: torch.Tensor, m_splits: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        """Return the padded rows ``[rows, hidden]``, and how many each group has.

        Args:
            input: ``[..., hidden]``, the rows of group 0, then those of group 1, and so on.
            m_splits: how many rows each group has. Where none needs padding, both are returned.

        Raises:
            OperandError: ``m_splits`` of another number, or that do not add up to the rows.
        """
        padded = self.padded(m_splits)
        groups = self._groups(input, m_splits)
        if padded == list(m_splits):
            return input, m_splits
        missing = [size - rows for size, rows in zip(padded, m_splits, strict=True)]
        zeros = groups[0].new_zeros(max(missing), groups[0].shape[1])
        parts = [
            part
            for group, count in zip(groups, missing, strict=True)
            for part in (group, zeros[:count])
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(_Padding):
    """Removes the rows that :class:`Fp8Padding` added.

    Args:
        num_gemms, align_size: those of the :class:`Fp8Padding`.
    """

    def forward(self, input: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """Return the rows ``[rows, hidden]`` without the padding.

        Args:
            input: ``[..., hidden]``, the padded rows.
            m_splits: how many rows each group has without the padding.

        Raises:
            OperandError: ``m_splits`` of another number, or that do not fit the padded rows.
        """
        padded = self.padded(m_splits)
        groups = self._groups(input, padded)
        if padded == list(m_splits):
            return input
        return torch.cat([group[:size] for group, size in zip(groups, m_splits, strict=True)])


def _align_size() -> int:
    """Return the multiple that the active recipe needs, as Transformer Engine chooses it."""
    request = active()
    recipe: Recipe = request.quantize or request.observe or get_default_recipe()
    if isinstance(recipe, CustomRecipe):
        return recipe.quantization_alignment
    if recipe.mxfp8():
        return 32
    return 128 if recipe.nvfp4() else 16
