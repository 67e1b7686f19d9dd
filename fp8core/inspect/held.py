"""How many bytes a layer holds from forward to backward, without computing anything.

The layer's own chain runs on meta tensors, which have shapes and no values, and every tensor that
autograd saves is counted. Nothing here knows what a link saves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.backend_api import OpDesc
from fp8core.chain import run as chain
from fp8core.chain.bind import bind_chain
from fp8core.chain.call import Call
from fp8core.chain.protocol import Link
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.dispatch import table
from fp8core.dispatch.resolver import Purpose
from fp8core.dispatch.table import Resolved
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bound import parts_of
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Binding

__all__ = ["Held", "held_by"]

_META = torch.device("meta")
_ROWS = 8192  # a multiple of what any backend pads rows to, and of the rows under one scale


class Held(NamedTuple):
    """Bytes that a layer holds from its forward to its backward, which computes the gradients of
    its input and of the parameters that require one.

    Attributes:
        a_row: for each row of the input: activations, their codes and statistics. The input itself
            is among them where backward reads it.
        fixed: whatever the number of rows: the copies of the weights. Parameters are not counted.

    Of grouped layers, scales of blocks count as for the groups that have the most of them.
    """

    a_row: float
    fixed: int

    def __str__(self) -> str:
        return (
            f"holds {self.a_row:,.0f} bytes a row from forward to backward, and "
            f"{self.fixed / 2**20:,.1f} MiB of weights' copies"
        )


def held_by(
    layer: LowPrecisionModule, recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> Held:
    """Return what ``layer`` holds on ``device`` under ``recipe``, on activations of ``dtype``.

    Raises:
        UnsupportedError: no backend runs one of the layer's operations on the device.
    """
    shapes = layer.link_shapes()
    plan = plan_of(LinearPlan, recipe, LayerRole(layer.kind, layer.name), dtype)
    binding = Binding(_META, dtype, resolver=_ShapesOf(device))
    with table.capturing():
        links = bind_chain(shapes, BindContext(plan, binding, layer.label))
    few, many = (_bytes(layer, shapes, links, rows, dtype) for rows in (_ROWS, 2 * _ROWS))
    return Held((many - few) / _ROWS, 2 * few - many)


class _ShapesOf:
    """A resolver to the operators of the backends of a device, which on meta tensors give shapes
    alone."""

    __slots__ = ("_device",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        return table.resolve(desc, self._device)

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        return table.resolve_optional(desc, self._device, backend)


def _bytes(
    layer: LowPrecisionModule,
    shapes: tuple[LinkShape, ...],
    links: tuple[Link, ...],
    rows: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of the storages that autograd saves in one forward of ``rows`` rows."""
    columns = next((n for n in (shape.input_columns(None) for shape in shapes) if n), 1)
    x = torch.empty(rows, columns, dtype=dtype, device=_META, requires_grad=True)
    params, own = _params(layer, shapes, x)
    # By identity: torch has one object for each storage as long as somebody holds it.
    counted = {id(param.untyped_storage()): param.untyped_storage() for param in own}
    num_own = len(counted)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        counted[id(storage)] = storage
        return tensor

    call = _call(shapes, rows)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        first = 0
        for part in parts_of(shapes, links):
            end = first + sum(link.num_params for link in part)
            x = chain.run(part, x, params[first:end], call)
            first = end
    return sum(storage.nbytes() for storage in list(counted.values())[num_own:])


def _params(
    layer: LowPrecisionModule, shapes: tuple[LinkShape, ...], x: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters of a call with the input ``x``, and those that are the layer's own: the
    others are the extra inputs of residual adds."""
    columns, params = x.shape[1], []
    own: list[torch.Tensor] = []
    given = iter(layer.link_params())
    for shape in shapes:
        for _ in range(shape.num_params):
            if shape.leaves_sum:
                params.append(x.new_empty(x.shape[0], columns).requires_grad_())
                continue
            param = _on_meta(next(given))
            params.append(param)
            own += _parts(param)
        columns = shape.columns(columns)
    return params, own


def _on_meta(param: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values like ``param``, a parameter of its own if ``param`` is one."""
    is_trained = param.requires_grad
    if isinstance(param, QuantizedTensor):
        return param.detach().to(_META).requires_grad_(is_trained)
    value = torch.empty(param.shape, dtype=param.dtype, device=_META)
    if isinstance(param, torch.nn.Parameter):
        return torch.nn.Parameter(value, is_trained)
    return value.requires_grad_(is_trained)


def _parts(param: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that ``param`` consists of."""
    if not isinstance(param, QuantizedTensor):
        return [param]
    operands = [operand for operand in param.operands if operand is not None]
    return [tensor for operand in operands for tensor in operand if tensor is not None]


def _call(shapes: tuple[LinkShape, ...], rows: int) -> Call:
    """Return a call of ``rows`` rows, in equal groups if the layer splits them."""
    groups = max(shape.groups for shape in shapes)
    if not groups:
        return Call(rng=torch.empty(2, dtype=torch.int64, device=_META))
    size = rows // groups
    offsets = torch.arange(0, (groups + 1) * size, size, device="cpu")
    return Call((offsets,), (*(size,) * (groups - 1), rows - size * (groups - 1)))
