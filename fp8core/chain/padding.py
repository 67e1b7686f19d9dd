"""Zero-padding to the sizes that a format's blocks and a backend's kernels need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8core.backend_api import Alignment
from fp8core.chain.call import Call
from fp8core.context.scopes import warn_of_layer
from fp8core.errors import OperandError, UnsupportedError
from fp8core.reporting import log_once
from fp8core.tensors.quantizer import Groups
from fp8core.tensors.storage import padded_with
from fp8core.torch_ops.private import is_exporting


class RowsChanged(OperandError):
    """A tensor of ``shape`` where ``rows`` rows are due; the chain adds which link returned it."""

    def __init__(self, owner: str, rows: int, shape: Sequence[int]) -> None:
        super().__init__(
            f"{owner}: the call has {rows} rows, and the tensor handed over is {list(shape)}."
        )
        self.rows = rows
        self.num_rows = shape[0]


@dataclass(frozen=True, slots=True)
class LayerPadding:
    """The zeros that a linear layer has to add: the rows of each group are padded to a multiple of
    those of ``tokens``, for fprop, dgrad and wgrad, that a call computes; ``in_features`` and
    ``out_features`` are the zero columns that are added."""

    owner: str
    tokens: tuple[int, int, int]
    in_features: int
    out_features: int

    def for_call(
        self, rows: int, call: Call, *, needs_input: bool = True, needs_weight: bool = True
    ) -> PaddedCall | None:
        """Return the padding of a call with ``rows`` rows, None if it needs none.

        ``needs_input`` and ``needs_weight`` say which gradients the call will compute. An exported
        program whose rows are free always pads them, as it holds no branches.
        """
        fprop, dgrad, wgrad = self.tokens
        multiple = math.lcm(fprop, dgrad if needs_input else 1, wgrad if needs_weight else 1)
        is_free = type(rows) is not int and is_exporting() and multiple > 1
        if not (call.groups or is_free or rows % multiple or self.is_of_features):
            return None
        if call.has_device_groups:
            assert multiple == 1  # or it would not have been bound
            if not self.is_of_features:
                return None
            self._report(multiple, is_grouped=True)
            return PaddedCall(self, rows, rows, None, call.groups)
        sizes = call.splits if call.groups else (rows,)
        padded = [size + -size % multiple for size in sizes]
        if not (is_free or self.is_of_features) and sum(padded) == rows:
            return None
        self._report(multiple, is_grouped=bool(call.groups))
        if not call.groups:
            return PaddedCall(self, rows, padded[0], None, ())
        # The sizes are on the CPU, whatever torch's default device is.
        ends = torch.tensor([0, *padded], device="cpu").cumsum(0)
        return PaddedCall(self, rows, sum(padded), (sizes, padded), (ends,))

    @property
    def is_of_features(self) -> bool:
        """Whether weights are padded, and not rows alone."""
        return bool(self.in_features or self.out_features)

    @property
    def of_weight(self) -> tuple[int, int] | None:
        """The rows and columns of zeros that a weight ``[out_features, in_features]`` gets, None
        for none."""
        return (self.out_features, self.in_features) if self.is_of_features else None

    def pad_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return ``bias [out_features]`` with the zeros added."""
        return torch.nn.functional.pad(bias, (0, self.out_features))

    def cut_grad_weight(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a padded weight without that of the zeros."""
        rows, columns = grad.shape
        return grad[: rows - self.out_features, : columns - self.in_features]

    def _report(self, multiple: int, *, is_grouped: bool) -> None:
        """Warn of the padding: of features by all layers, of rows alone by the first."""
        features = (("input features", self.in_features), ("output features", self.out_features))
        parts = [f"{name} by {added}" for name, added in features if added]
        rows = f"rows to a multiple of {multiple}{' in each group' if is_grouped else ''}"
        text = "pads with zeros, as its products take no such sizes"
        if not parts:
            line = f"{self.owner}: {text}: {rows}; other layers that pad rows do not say so again"
            log_once(line, about="padding of rows")
            return
        if multiple > 1:
            parts.append(rows)
        warn_of_layer(self.owner, f"{text}: {', '.join(parts)}")


def layer_padding(
    alignments: Sequence[Alignment],
    features: tuple[int, int],
    owner: str,
    *,
    offsets_on_device: bool,
) -> LayerPadding | None:
    """Return what a linear of ``features`` (in, out) has to add, None if nothing ever.

    ``alignments`` are those of fprop, dgrad and wgrad.

    Raises:
        UnsupportedError: rows would have to be padded by sizes that only the device knows.
    """
    fprop, dgrad, wgrad = alignments
    # fprop is [tokens, out, in] as m, n, k; dgrad [tokens, in, out]; wgrad [out, in, tokens]
    tokens = fprop.m, dgrad.m, wgrad.k
    in_features = math.lcm(fprop.k, dgrad.n, wgrad.n)
    out_features = math.lcm(fprop.n, dgrad.k, wgrad.m)
    multiple = math.lcm(*tokens)
    if multiple == out_features == in_features == 1:
        return None
    if multiple > 1 and offsets_on_device:
        raise UnsupportedError(
            f"the rows of each group have to be a multiple of {multiple}, and sizes that only the "
            f"device knows cannot be padded. Give m_splits as a list of integers."
        )
    return LayerPadding(owner, tokens, -features[0] % in_features, -features[1] % out_features)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedCall:
    """The padding of one call: its ``unpadded`` rows become ``rows``; ``sizes`` are those of each
    group before and after, None without groups, or if the device alone has them."""

    layer: LayerPadding
    unpadded: int
    rows: int
    sizes: tuple[Sequence[int], Sequence[int]] | None
    groups: Groups

    def pad_input(self, x: torch.Tensor) -> torch.Tensor:
        """Pad ``x [rows, in_features]``."""
        return self._pad(x, self.layer.in_features)

    def pad_grad_output(self, grad: torch.Tensor) -> torch.Tensor:
        """Pad ``grad [rows, out_features]``."""
        return self._pad(grad, self.layer.out_features)

    def cut(self, y: torch.Tensor, padded_columns: int) -> torch.Tensor:
        """Return ``y`` without the padding of its rows and its last columns, contiguous."""
        columns = y.shape[1] - padded_columns
        if self.sizes is None:
            return y[: self.unpadded, :columns].contiguous()
        before, after = self.sizes
        groups = zip(torch.split(y, list(after)), before, strict=True)
        return torch.cat([group[:size, :columns] for group, size in groups])

    def _pad(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        if x.shape[0] != self.unpadded:  # to pad by a negative amount would be to crop
            raise RowsChanged(self.layer.owner, self.unpadded, x.shape)
        if self.sizes is None:
            return padded_with(x, (self.rows - x.shape[0], columns))
        x = padded_with(x, (0, columns))
        before, after = self.sizes
        added = [more - size for size, more in zip(before, after, strict=True)]
        zeros = x.new_zeros(max(added), x.shape[1])
        groups = zip(torch.split(x, list(before)), added, strict=True)
        return torch.cat([part for group, rows in groups for part in (group, zeros[:rows])])
