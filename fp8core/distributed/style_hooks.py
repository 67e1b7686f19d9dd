"""What a layer does, spread by a style, with its input before a call and with its output after."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8core.distributed.spread_layer import LocalPart, Spread, refuse_rows, sequence_dim
from fp8core.modules.base import LowPrecisionModule

__all__ = ["Columns", "Rows", "Sequence", "hook"]


class _Boundary:
    """Turns the input of a layer into this rank's plain tensor, and its output back."""

    def __init__(self, spread: Spread, style: Any) -> None:
        self.spread = spread
        self.style = style
        self.dim: int | None = None  # of the rows that the input or the output shards

    def enter(
        self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the input, the first argument or ``input=``; forward refuses one that is no
        tensor, or none."""
        if not isinstance(arguments[0] if arguments else keywords.get("input"), torch.Tensor):
            return arguments, keywords
        if arguments:
            return (self._input(module, arguments[0]), *arguments[1:]), keywords
        return (), {**keywords, "input": self._input(module, keywords["input"])}

    def leave(self, module: Any, arguments: object, output: Any) -> Any:
        """Replace the output."""
        return self._output(module, output)

    def _placed(self, module: LowPrecisionModule, x: Any, layout: Placement) -> DTensor:
        """Return ``x`` as a DTensor of the style's mesh; a plain one has ``layout``."""
        if not isinstance(x, DTensor):
            return DTensor.from_local(x, self.spread.mesh, (layout,), run_check=False)
        if x.device_mesh != self.spread.mesh:
            raise self.spread.refuse(
                module, f"the input lies on {x.device_mesh}, not on {self.spread.mesh}", "Move it."
            )
        return x

    def _input(self, module: Any, x: Any) -> torch.Tensor:
        raise NotImplementedError

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _finished(self, y: torch.Tensor, made: Placement, wanted: Placement) -> torch.Tensor:
        """Return ``y``, which lies as ``made`` says, as the style returns it."""
        is_local = self.style.use_local_output
        if is_local and made == wanted:
            return y
        result = DTensor.from_local(y, self.spread.mesh, (made,), run_check=False)
        result = result.redistribute(placements=(wanted,))
        return result.to_local() if is_local else result


class Columns(_Boundary):
    """Of a column-parallel linear: rows to gather come first, as its link gathers them.

    ``norm`` are the parameters of a norm inside, which sees the rows of this rank or of all.
    """

    def __init__(self, spread: Spread, style: Any, norm: frozenset[str]) -> None:
        super().__init__(spread, style)
        self.norm = norm

    def _input(self, module: Any, x: Any) -> torch.Tensor:
        placed = self._placed(module, x, self.style.input_layouts[0])
        layout = placed.placements[0]
        self.dim = sequence_dim(self.spread, module, layout, placed.ndim)
        wanted = self.style.output_layouts[0]
        if isinstance(wanted, Shard) and wanted.dim not in range(-max(placed.ndim, 1), placed.ndim):
            raise self.spread.refuse(
                module,
                f"output_layouts={wanted} does not fit an input of {placed.ndim} dimensions",
                "Choose Replicate(), or a dimension that the output has.",
            )
        is_sequence = self.dim is not None
        if is_sequence != module.sequence_parallel:
            module.set_sequence(is_sequence)
            module.local_part = LocalPart(self.norm if is_sequence else frozenset())
        local = placed.to_local()
        return local.transpose(0, 1) if self.dim == 1 else local

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.transpose(0, 1) if self.dim == 1 else y
        wanted = self.style.output_layouts[0]
        last = y.dim() - 1
        if isinstance(wanted, Shard) and wanted.dim in (-1, last):
            wanted = Shard(last)
        return self._finished(y, Shard(last), wanted)


class Rows(_Boundary):
    """Of a row-parallel linear: rows to scatter come first, as its link scatters them."""

    def _input(self, module: Any, x: Any) -> torch.Tensor:
        layout = self.style.input_layouts[0]
        last = x.dim() - 1
        if isinstance(layout, Shard) and layout.dim == -1:
            layout = Shard(last)
        placed = self._placed(module, x, layout)
        if isinstance(placed.placements[0], Replicate):
            placed = placed.redistribute(placements=(Shard(last),))
        if placed.placements[0] != Shard(last):
            raise self.spread.refuse(
                module,
                f"the input lies as {placed.placements[0]}",
                "It takes columns, Shard(-1), as ColwiseParallel returns them.",
            )
        self.dim = sequence_dim(self.spread, module, self.style.output_layouts[0], x.dim())
        local = placed.to_local()
        return local.transpose(0, 1) if self.dim == 1 else local

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.transpose(0, 1) if self.dim == 1 else y
        (made,) = self.style.output_layouts
        return self._finished(y, made, made)


class Sequence(_Boundary):
    """Of a norm: each rank has some of the rows."""

    def __init__(self, spread: Spread, style: Any) -> None:
        super().__init__(spread, style)
        self.uneven: torch.Size | None = None  # of a whole input that ranks have unequal shards of

    def _input(self, module: Any, x: Any) -> torch.Tensor:
        (layout,) = self.style.sequence_sharding
        if not -x.dim() <= layout.dim < x.dim() or layout.dim % x.dim() == x.dim() - 1:
            raise refuse_rows(self.spread, module, layout)
        placed = self._placed(module, x, layout).redistribute(placements=(layout,))
        is_even = placed.shape[layout.dim] % self.spread.mesh.size() == 0
        self.uneven = None if is_even else placed.shape
        return placed.to_local()

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        (layout,) = self.style.sequence_sharding
        if self.uneven is None or self.style.use_local_output:
            return self._finished(y, layout, layout)
        stride = torch.empty(self.uneven, device="meta").stride()
        return DTensor.from_local(
            y, self.spread.mesh, (layout,), run_check=False, shape=self.uneven, stride=stride
        )


def hook(module: LowPrecisionModule, boundary: _Boundary) -> None:
    """Have ``boundary`` replace the input and the output of each call of ``module``."""
    module.register_forward_pre_hook(boundary.enter, with_kwargs=True)
    module.register_forward_hook(boundary.leave)
