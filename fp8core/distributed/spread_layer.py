"""A layer that a style of ``parallelize_module`` spreads: its parameters, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
from torch.nn.utils import parametrize

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.linear import Linear
from fp8core.modules.norm import LayerNorm, RMSNorm
from fp8core.modules.parallel import Parallel
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
