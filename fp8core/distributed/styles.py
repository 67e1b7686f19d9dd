"""Styles for torch's ``parallelize_module`` that spread fp8core's layers over the ranks of a mesh.

They are torch's styles of the same names, and treat every other module as those do::

    parallelize_module(block, mesh["tp"], {
        "norm": SequenceParallel(),
        "ffn": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    })

The parameters become DTensors, as optimizers, FSDP2 and distributed checkpoints expect them. A
layer computes with this rank's part of them, between the links that Transformer Engine's arguments
``parallel_mode`` and ``sequence_parallel`` give it: codes and scales travel instead of activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import style as torch_style

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.layernorm_linear import LayerNormLinear
from fp8core.modules.linear import Linear
from fp8core.modules.norm import LayerNorm, RMSNorm
from fp8core.modules.parallel import Parallel
from fp8core.tensors.quantized_tensor import QuantizedTensor

__all__ = ["ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel"]


class _Spread(NamedTuple):
    """A layer that a style spread: the style's name, and the mesh."""

    style: str
    mesh: DeviceMesh

    def refuse(self, layer: LowPrecisionModule, asked: str, remedy: str) -> OperandError:
        """Return the error for a layout that does not fit."""
        return OperandError(f"{self.style} of {layer.label}: {asked}. {remedy}")


@dataclass(frozen=True)
class _LocalPart:
    """Returns what a rank has of a parameter; gradients of ``partial`` names are sums over ranks,
    as each rank sees other rows."""

    partial: frozenset[str]

    def __call__(self, name: str, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """Return the local tensor of a DTensor, through which gradients flow back."""
        if not isinstance(parameter, DTensor):
            return parameter
        if name not in self.partial:
            return parameter.to_local()
        # Redistributing to where it is moves nothing in forward; backward sums the gradient.
        placements = parameter.placements
        whole = parameter.redistribute(placements=placements)
        return whole.to_local(grad_placements=[Partial() for _ in placements])


class ColwiseParallel(torch_style.ColwiseParallel):
    """Each rank has its rows of the weight, and computes its columns of the output.

    For :class:`fp8core.Linear`, :class:`fp8core.LayerNormLinear` and converted ``torch.nn.Linear``.
    An input that is sharded by rows, ``Shard(0)`` of ``[s, b, h]`` or ``Shard(1)`` of
    ``[b, s, h]``, is cast and then gathered; the sum of its gradient is scattered. In both, blocks
    of wgrad along the rows take them in the order of ``[s, b]``.

    Args:
        input_layouts: of an input that is no DTensor; replicated if None. A DTensor's is its own.
        output_layouts: of the output; sharded by columns if None.
        use_local_output: return a plain tensor instead of a DTensor.

    Raises:
        OperandError: sizes that the ranks do not divide, or a layout that does not fit.
        UnsupportedError: another layer of fp8core, or quantized parameters.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, LowPrecisionModule):
            return super()._apply(module, device_mesh)
        spread = _Spread("ColwiseParallel", device_mesh)
        linear, parallel = _spreadable(spread, module)
        (layout,) = self.input_layouts
        _sequence_dim(spread, linear, layout)
        owner = f"{spread.style} of {linear.label}"
        out_features = parallel.part_of(owner, "out_features", linear.out_features)
        parts = [
            (prefix, parallel.part_of(owner, f"{prefix}weight", rows))
            for prefix, rows in linear.parts
        ]
        norm = frozenset(name for name in linear._parameters if name.startswith("layer_norm_"))
        is_sequence = isinstance(layout, Shard)
        _distribute(self, linear, device_mesh, dict.fromkeys(norm, Replicate()), Shard(0))
        linear.local_part = _LocalPart(norm if is_sequence else frozenset())
        linear.set_share("column", parallel._replace(sequence=is_sequence), out_features, parts)
        _hook(linear, _Columns(spread, self, norm))
        return module


class RowwiseParallel(torch_style.RowwiseParallel):
    """Each rank has its columns of the weight; the sum over ranks is the output, then the bias.

    For :class:`fp8core.Linear` and converted ``torch.nn.Linear``.

    Args:
        input_layouts: of an input that is no DTensor; sharded by columns if None.
        output_layouts: replicated if None; ``Shard(0)`` and ``Shard(1)`` scatter the sum by rows.
        use_local_output: return a plain tensor instead of a DTensor.

    Raises:
        OperandError: sizes that the ranks do not divide, or a layout that does not fit.
        UnsupportedError: another layer of fp8core, or quantized parameters.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, LowPrecisionModule):
            return super()._apply(module, device_mesh)
        spread = _Spread("RowwiseParallel", device_mesh)
        linear, parallel = _spreadable(spread, module)
        if isinstance(linear, LayerNormLinear):
            raise spread.refuse(
                linear,
                "a norm takes whole rows, and a row-parallel layer has parts of them",
                "Use ColwiseParallel.",
            )
        (layout,) = self.output_layouts
        is_sequence = _sequence_dim(spread, linear, layout) is not None
        owner = f"{spread.style} of {linear.label}"
        in_features = parallel.part_of(owner, "in_features", linear.in_features)
        biases = [name for name in linear._parameters if name.endswith("bias")]
        _distribute(self, linear, device_mesh, dict.fromkeys(biases, Replicate()), Shard(1))
        linear.local_part = _LocalPart(frozenset(biases if is_sequence else ()))
        linear.set_share("row", parallel._replace(sequence=is_sequence), in_features)
        _hook(linear, _Rows(spread, self))
        return module


class SequenceParallel(torch_style.SequenceParallel):
    """A norm of fp8core, which each rank computes for its rows.

    The gradients of its parameters are summed over the ranks.

    Args:
        sequence_dim: the dimension of the input that is sharded.
        use_local_output: return a plain tensor instead of a DTensor.

    Raises:
        UnsupportedError: a layer of fp8core that is no norm.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, LowPrecisionModule):
            return super()._apply(module, device_mesh)
        spread = _Spread("SequenceParallel", device_mesh)
        if not isinstance(module, LayerNorm | RMSNorm):
            raise UnsupportedError(
                f"SequenceParallel of {module.label} is not offered: it takes LayerNorm and "
                f"RMSNorm. Use ColwiseParallel or RowwiseParallel for linears."
            )
        _distribute(self, module, device_mesh, {}, Replicate())
        module.local_part = _LocalPart(frozenset(module._parameters))
        _hook(module, _Sequence(spread, self))
        return module


class PrepareModuleInput(torch_style.PrepareModuleInput):
    """Marks the inputs of a module with their layouts; arguments as torch's.

    Where torch's style gathers an input that is sharded by rows and wanted replicated, this one
    hands over the shard as a DTensor: each column-parallel linear inside gathers it once it is
    cast. With ``use_local_output=True`` it is gathered here, in high precision.
    """

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        is_gather = isinstance(input_layout, Shard) and isinstance(desired_layout, Replicate)
        wanted = input_layout if is_gather and not self.use_local_output else desired_layout
        return super()._prepare_input_arg(input, mesh, input_layout, wanted)


def _spreadable(spread: _Spread, module: LowPrecisionModule) -> tuple[Linear, Parallel]:
    """Return the layer and its group, or refuse it."""
    name = f"{spread.style} of {module.label}"
    if not isinstance(module, Linear) or not module.can_be_spread:
        raise UnsupportedError(
            f"{name} is not offered: it takes Linear, LayerNormLinear and converted "
            f"torch.nn.Linear. Give other layers tp_group= where they are made."
        )
    if module.tp_size > 1 or module.local_part is not None:
        raise OperandError(f"{name}: the layer is spread over {module.tp_size} ranks already.")
    if module.return_bias or module.fuse_wgrad_accumulation or module.wgrad_queue is not None:
        raise UnsupportedError(
            f"{name}: return_bias, fuse_wgrad_accumulation and delay_wgrad_compute are not offered "
            f"with DTensors. Leave them out, or give the layer tp_group= instead."
        )
    if any(isinstance(one, QuantizedTensor) for one in module.parameters()):
        raise UnsupportedError(
            f"{name}: parameters of quantized_model_init are not spread. Make the layer outside "
            f"it; fp8core.distributed.gather_quantized gathers weights quantized."
        )
    if spread.mesh.ndim != 1:
        raise spread.refuse(
            module, f"the mesh has {spread.mesh.ndim} dimensions", 'Give one, as mesh["tp"].'
        )
    return module, Parallel.of(name, spread.mesh.get_group(), 1, False)


def _sequence_dim(
    spread: _Spread, layer: LowPrecisionModule, layout: Placement, ndim: int | None = None
) -> int | None:
    """Return the dimension of rows that ``layout`` shards, None for a replicated tensor."""
    if isinstance(layout, Replicate):
        return None
    if isinstance(layout, Shard) and layout.dim in (0, 1) and layout.dim + 1 != ndim:
        return layout.dim
    raise spread.refuse(
        layer,
        f"{layout} of its rows does not fit",
        "Choose Replicate(), Shard(0) or Shard(1), a dimension before the last.",
    )


def _distribute(
    style: Any,
    module: LowPrecisionModule,
    mesh: DeviceMesh,
    layouts: Mapping[str, Placement],
    other: Placement,
) -> None:
    """Make the parameters of ``module`` DTensors, each in its layout or in ``other``."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None or isinstance(parameter, DTensor):
            continue
        layout = [layouts.get(name, other)]
        whole = distribute_tensor(parameter.data, mesh, layout, src_data_rank=style.src_data_rank)
        spread = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
        module.register_parameter(name, spread)


class _Boundary:
    """Turns the input of a layer into this rank's plain tensor, and its output back."""

    def __init__(self, spread: _Spread, style: Any) -> None:
        self.spread = spread
        self.style = style
        self.dim: int | None = None  # of the rows that the input or the output shards

    def enter(
        self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the input, the first argument or ``input=``."""
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


class _Columns(_Boundary):
    """Of a column-parallel linear: rows to gather come first, as its link gathers them.

    ``norm`` are the parameters of a norm inside, which sees the rows of this rank or of all.
    """

    def __init__(self, spread: _Spread, style: Any, norm: frozenset[str]) -> None:
        super().__init__(spread, style)
        self.norm = norm

    def _input(self, module: Any, x: Any) -> torch.Tensor:
        placed = self._placed(module, x, self.style.input_layouts[0])
        layout = placed.placements[0]
        self.dim = _sequence_dim(self.spread, module, layout, placed.ndim)
        is_sequence = self.dim is not None
        if is_sequence != module.sequence_parallel:
            module.set_sequence(is_sequence)
            module.local_part = _LocalPart(self.norm if is_sequence else frozenset())
        local = placed.to_local()
        return local.transpose(0, 1) if self.dim == 1 else local

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.transpose(0, 1) if self.dim == 1 else y
        wanted = self.style.output_layouts[0]
        last = y.dim() - 1
        if isinstance(wanted, Shard) and wanted.dim in (-1, last):
            wanted = Shard(last)
        return self._finished(y, Shard(last), wanted)


class _Rows(_Boundary):
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
        self.dim = _sequence_dim(self.spread, module, self.style.output_layouts[0], x.dim())
        local = placed.to_local()
        return local.transpose(0, 1) if self.dim == 1 else local

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.transpose(0, 1) if self.dim == 1 else y
        (made,) = self.style.output_layouts
        return self._finished(y, made, made)


class _Sequence(_Boundary):
    """Of a norm: each rank has some of the rows."""

    def _input(self, module: Any, x: Any) -> torch.Tensor:
        (layout,) = self.style.sequence_sharding
        placed = self._placed(module, x, layout)
        return placed.redistribute(placements=(layout,)).to_local()

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        (layout,) = self.style.sequence_sharding
        return self._finished(y, layout, layout)


def _hook(module: LowPrecisionModule, boundary: _Boundary) -> None:
    module.register_forward_pre_hook(boundary.enter, with_kwargs=True)
    module.register_forward_hook(boundary.leave)
