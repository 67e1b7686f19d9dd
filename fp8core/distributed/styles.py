"""Styles for torch's ``parallelize_module`` that spread fp8core's layers over the ranks of a mesh.

The styles are torch's of the same names, and treat every other module as torch's do::

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
from torch.nn.utils import parametrize

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.layers.layernorm_linear import LayerNormLinear
from fp8core.modules.layers.linear import Linear
from fp8core.modules.layers.norm import LayerNorm, RMSNorm
from fp8core.modules.layers.parallel import Parallel
from fp8core.tensors.quantized_tensor import QuantizedTensor


class Spread(NamedTuple):
    """A layer that a style spread: the style's name, and the mesh."""

    style: str
    mesh: DeviceMesh

    def refuse(self, layer: LowPrecisionModule, problem: str, remedy: str) -> OperandError:
        """Return the error for a layout that does not fit."""
        return OperandError(f"{self.style} of {layer.label}: {problem}. {remedy}")


@dataclass(frozen=True)
class LocalPart:
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


def spreadable_linear(spread: Spread, module: LowPrecisionModule) -> tuple[Linear, Parallel]:
    """Return the layer and its group, or refuse it."""
    name = f"{spread.style} of {module.label}"
    if not isinstance(module, Linear) or not module.can_be_spread:
        raise UnsupportedError(
            f"{name} is not offered: it takes Linear, LayerNormLinear and converted "
            f"torch.nn.Linear. Give other layers tp_group= where they are made."
        )
    if module.tp_size > 1:
        raise OperandError(f"{name}: the layer is spread over {module.tp_size} ranks already.")
    _check_spreadable(spread, module, [f"{prefix}weight" for prefix, _ in module.parts])
    if module.return_bias or module.fuse_wgrad_accumulation or module.wgrad_queue is not None:
        raise UnsupportedError(
            f"{name}: return_bias, fuse_wgrad_accumulation and delay_wgrad_compute are not offered "
            f"with DTensors. Leave them out, or give the layer tp_group= instead."
        )
    if any(isinstance(parameter, QuantizedTensor) for parameter in module.parameters()):
        raise UnsupportedError(
            f"{name}: parameters of quantized_model_init are not spread. Make the layer outside "
            f"it; fp8core.distributed.gather_quantized gathers weights quantized."
        )
    return module, Parallel.of(name, spread.mesh.get_group(), 1, False)


def spreadable_norm(spread: Spread, module: LowPrecisionModule) -> LayerNorm | RMSNorm:
    """Return the layer, or refuse it."""
    if not isinstance(module, LayerNorm | RMSNorm):
        raise UnsupportedError(
            f"{spread.style} of {module.label} is not offered: it takes LayerNorm and RMSNorm. Use "
            f"ColwiseParallel or RowwiseParallel for linears."
        )
    _check_spreadable(spread, module, ["weight"])
    return module


def _check_spreadable(spread: Spread, module: LowPrecisionModule, weights: list[str]) -> None:
    """Refuse a layer that is spread already or computes its parameters, and a mesh that does not
    fit."""
    if module.local_part is not None:
        raise OperandError(
            f"{spread.style} of {module.label}: a style has spread the layer already. Name it once "
            f"in the plans."
        )
    are_parameters = all(name in module._parameters for name in weights)
    if not are_parameters or parametrize.is_parametrized(module):
        raise UnsupportedError(
            f"{spread.style} of {module.label} is not offered for parameters that are computed "
            f"from other parameters. Remove the parametrization, or register it on the spread "
            f"layer."
        )
    mesh = spread.mesh
    if mesh.ndim != 1:
        raise spread.refuse(
            module, f"the mesh has {mesh.ndim} dimensions", 'Give one, as mesh["tp"].'
        )
    if mesh.get_coordinate() is None:
        raise spread.refuse(
            module,
            f"this rank is not in {mesh}",
            "Spread the layer on the ranks of the mesh alone.",
        )


def sequence_dim(
    spread: Spread, layer: LowPrecisionModule, layout: Placement, ndim: int | None = None
) -> int | None:
    """Return the dimension of rows that ``layout`` shards, None for a replicated tensor."""
    if isinstance(layout, Replicate):
        return None
    if isinstance(layout, Shard) and layout.dim in (0, 1) and layout.dim + 1 != ndim:
        return layout.dim
    raise refuse_rows(spread, layer, layout)


def refuse_rows(spread: Spread, layer: LowPrecisionModule, layout: Placement) -> OperandError:
    """Return the error for a layout that shards no dimension of rows."""
    return spread.refuse(
        layer,
        f"{layout} of its rows does not fit",
        "Choose Replicate(), Shard(0) or Shard(1), a dimension before the last.",
    )


def distribute(
    spread: Spread,
    module: LowPrecisionModule,
    layouts: Mapping[str, Placement],
    default: Placement,
    src_data_rank: int | None,
) -> None:
    """Make the parameters of ``module`` DTensors, each in its layout or in ``default``.

    Parameters that are DTensors already, as weights that another layer shares, stay.
    ``src_data_rank``: the rank whose values all take; None: each has its own.

    Raises:
        OperandError: a DTensor that lies in another way; nothing is changed then.
    """
    mesh, parameters = spread.mesh, [(n, p) for n, p in module._parameters.items() if p is not None]
    for name, parameter in parameters:
        placements = (layouts.get(name, default),)
        if isinstance(parameter, DTensor) and (
            parameter.placements != placements or parameter.device_mesh != mesh
        ):
            raise spread.refuse(
                module,
                f"its {name} lies as {parameter.placements} on {parameter.device_mesh}; expected "
                f"{placements} on {mesh}",
                "Share weights between layers of one style, or give plain ones.",
            )
    for name, parameter in parameters:
        if not isinstance(parameter, DTensor):
            layout = [layouts.get(name, default)]
            whole = distribute_tensor(parameter.data, mesh, layout, src_data_rank=src_data_rank)
            placed = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module.register_parameter(name, placed)


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
        x = arguments[0] if arguments else keywords.get("input")
        if not isinstance(x, torch.Tensor):
            return arguments, keywords
        local = self._input(module, x)
        local = local.transpose(0, 1) if self.dim == 1 else local
        if arguments:
            return (local, *arguments[1:]), keywords
        return (), {**keywords, "input": local}

    def leave(self, module: Any, arguments: object, output: Any) -> Any:
        """Replace the output."""
        return self._output(module, output.transpose(0, 1) if self.dim == 1 else output)

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

    def _finished(self, y: torch.Tensor, layout: Placement, target: Placement) -> torch.Tensor:
        """Return ``y``, whose placement is ``layout``, in the placement ``target`` of the style's
        output."""
        is_local = self.style.use_local_output
        if is_local and layout == target:
            return y
        result = DTensor.from_local(y, self.spread.mesh, (layout,), run_check=False)
        result = result.redistribute(placements=(target,))
        return result.to_local() if is_local else result


class Columns(_Boundary):
    """The boundary of a column-parallel linear: rows to gather are moved to the first dimension,
    along which the link gathers.

    ``norm`` are the parameters of a norm inside, which sees the rows of this rank or of all.
    """

    def __init__(self, spread: Spread, style: Any, norm: frozenset[str]) -> None:
        super().__init__(spread, style)
        self.norm = norm

    def _input(self, module: Any, x: Any) -> torch.Tensor:
        placed = self._placed(module, x, self.style.input_layouts[0])
        layout = placed.placements[0]
        self.dim = sequence_dim(self.spread, module, layout, placed.ndim)
        target = self.style.output_layouts[0]
        if isinstance(target, Shard) and target.dim not in range(-max(placed.ndim, 1), placed.ndim):
            raise self.spread.refuse(
                module,
                f"output_layouts={target} does not fit an input of {placed.ndim} dimensions",
                "Choose Replicate(), or a dimension that the output has.",
            )
        is_sequence = self.dim is not None
        if is_sequence != module.sequence_parallel:
            module.set_sequence(is_sequence)
            module.local_part = LocalPart(self.norm if is_sequence else frozenset())
        return placed.to_local()

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        target = self.style.output_layouts[0]
        last = y.dim() - 1
        if isinstance(target, Shard) and target.dim in (-1, last):
            target = Shard(last)
        return self._finished(y, Shard(last), target)


class Rows(_Boundary):
    """The boundary of a row-parallel linear: rows to scatter are moved to the first dimension,
    along which the link scatters."""

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
        return placed.to_local()

    def _output(self, module: Any, y: torch.Tensor) -> torch.Tensor:
        (layout,) = self.style.output_layouts
        return self._finished(y, layout, layout)


class Sequence(_Boundary):
    """The boundary of a norm, of whose rows each rank has a part."""

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
        spread = Spread("ColwiseParallel", device_mesh)
        linear, parallel = spreadable_linear(spread, module)
        (layout,) = self.input_layouts
        sequence_dim(spread, linear, layout)
        _check_output(spread, linear, self)
        owner = f"{spread.style} of {linear.label}"
        out_features = parallel.part_of(owner, "out_features", linear.out_features)
        parts = [
            (prefix, parallel.part_of(owner, f"{prefix}weight", rows))
            for prefix, rows in linear.parts
        ]
        norm = frozenset(name for name in linear._parameters if name.startswith("layer_norm_"))
        is_sequence = isinstance(layout, Shard)
        replicated = dict.fromkeys(norm, Replicate())
        distribute(spread, linear, replicated, Shard(0), self.src_data_rank)
        linear.local_part = LocalPart(norm if is_sequence else frozenset())
        linear.set_share("column", parallel._replace(sequence=is_sequence), out_features, parts)
        hook(linear, Columns(spread, self, norm))
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
        spread = Spread("RowwiseParallel", device_mesh)
        linear, parallel = spreadable_linear(spread, module)
        if isinstance(linear, LayerNormLinear):
            raise spread.refuse(
                linear,
                "a norm takes whole rows, and a row-parallel layer has parts of them",
                "Use ColwiseParallel.",
            )
        (layout,) = self.output_layouts
        is_sequence = sequence_dim(spread, linear, layout) is not None
        owner = f"{spread.style} of {linear.label}"
        in_features = parallel.part_of(owner, "in_features", linear.in_features)
        biases = [name for name in linear._parameters if name.endswith("bias")]
        replicated = dict.fromkeys(biases, Replicate())
        distribute(spread, linear, replicated, Shard(1), self.src_data_rank)
        linear.local_part = LocalPart(frozenset(biases if is_sequence else ()))
        linear.set_share("row", parallel._replace(sequence=is_sequence), in_features)
        hook(linear, Rows(spread, self))
        return module


class SequenceParallel(torch_style.SequenceParallel):
    """A norm of fp8core, which each rank computes for its rows.

    The gradients of its parameters are summed over the ranks.

    Args:
        sequence_dim: the dimension of the input that is sharded.
        use_local_output: return a plain tensor instead of a DTensor.

    Raises:
        OperandError: the last dimension, as a norm takes whole rows; or a norm that is spread.
        UnsupportedError: a layer of fp8core that is no norm.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, LowPrecisionModule):
            return super()._apply(module, device_mesh)
        spread = Spread("SequenceParallel", device_mesh)
        norm = spreadable_norm(spread, module)
        (layout,) = self.sequence_sharding
        if layout.dim == -1:
            raise refuse_rows(spread, norm, layout)
        distribute(spread, norm, {}, Replicate(), self.src_data_rank)
        norm.local_part = LocalPart(frozenset(norm._parameters))
        hook(norm, Sequence(spread, self))
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
        target = input_layout if is_gather and not self.use_local_output else desired_layout
        return super()._prepare_input_arg(input, mesh, input_layout, target)


def _check_output(spread: Spread, linear: Linear, style: ColwiseParallel) -> None:
    """Refuse an output that a column-parallel layer cannot return."""
    (layout,) = style.output_layouts
    if not isinstance(layout, Shard | Replicate):
        raise spread.refuse(
            linear,
            f"output_layouts={layout} does not fit, as each rank has columns",
            "Choose Shard(-1), another dimension, or Replicate().",
        )
    is_columns = isinstance(layout, Shard) and layout.dim == -1
    if len(linear.parts) > 1 and not (is_columns and style.use_local_output):
        raise spread.refuse(
            linear,
            f"with parameters_split each rank has columns of all of the {len(linear.parts)} parts, "
            f"which are no consecutive columns of the whole",
            "Take them with output_layouts=Shard(-1), use_local_output=True, and split them.",
        )
