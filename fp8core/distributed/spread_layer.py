"""A layer that a style of ``parallelize_module`` spreads: its parameters, and what does not fit."""

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

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.linear import Linear
from fp8core.modules.parallel import Parallel
from fp8core.tensors.quantized_tensor import QuantizedTensor

__all__ = ["LocalPart", "Spread", "distribute", "sequence_dim", "spreadable_linear"]


class Spread(NamedTuple):
    """A layer that a style spread: the style's name, and the mesh."""

    style: str
    mesh: DeviceMesh

    def refuse(self, layer: LowPrecisionModule, asked: str, remedy: str) -> OperandError:
        """Return the error for a layout that does not fit."""
        return OperandError(f"{self.style} of {layer.label}: {asked}. {remedy}")


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


def sequence_dim(
    spread: Spread, layer: LowPrecisionModule, layout: Placement, ndim: int | None = None
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


def distribute(
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
