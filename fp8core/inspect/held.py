"""How many bytes a layer holds from forward to backward, without computing anything.

The layer's own chain runs on meta tensors, which have shapes and no values, and every tensor that
autograd saves is counted. Nothing here knows what a link saves.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from fp8core.backend_api import OpDesc
from fp8core.chain import run as chain
from fp8core.chain.bind import bind_chain
from fp8core.chain.call import Call
from fp8core.chain.protocol import Link
from fp8core.chain.shape import BindContext, LinkShape, input_columns_of
from fp8core.dispatch import table
from fp8core.dispatch.resolver import Purpose
from fp8core.dispatch.table import Resolved
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bound import parts_of
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Binding
from fp8core.tensors.requantized import is_of_parameter

__all__ = ["Held", "held_by"]

_META = torch.device("meta")
_ROWS = 8192  # a multiple of what any backend pads rows to, and of the rows under one scale


class Held(NamedTuple):
    """Bytes that a layer holds from its forward to its backward, which computes the gradients of
    its input and of the parameters that require one.

    Attributes:
        a_row: for each row of the input: activations, their codes and statistics. The input itself
            is among them where backward reads it.
        fixed: whatever the number of rows: the copies of the weights, and weights that forward
            computes from parameters. Parameters are not counted.

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
) -> Held | None:
    """Return what ``layer`` holds on ``device`` under ``recipe``, on activations of ``dtype``; None
    if it takes any number of columns, on which that depends, or runs other modules between its
    chains.

    Raises:
        UnsupportedError: no backend runs one of the layer's operations on the device.
    """
    shapes = layer.link_shapes()
    columns = input_columns_of(shapes)
    if columns is None or not layer.is_one_chain:
        return None
    plan = plan_of(layer.plan_type, recipe, LayerRole(layer.kind, layer.name), dtype)
    binding = Binding(_META, dtype, resolver=_ShapesOf(device))
    with table.capturing():
        links = bind_chain(shapes, BindContext.of(plan, binding, layer.label))
    with torch.inference_mode(False), torch.enable_grad():
        few, many = (
            _bytes(layer, shapes, links, torch.empty(rows, columns, dtype=dtype, device=_META))
            for rows in (_ROWS, 2 * _ROWS)
        )
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
    x: torch.Tensor,
) -> int:
    """Return the bytes of the storages that autograd saves in one forward of ``x [rows, k]``."""
    params, own = _params(layer, shapes, x.requires_grad_())
    # By identity: torch has one object for each storage as long as somebody holds it.
    counted = {id(param.untyped_storage()): param.untyped_storage() for param in own}
    num_own = len(counted)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        counted[id(storage)] = storage
        return tensor

    call = _call(shapes, x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        first = 0
        for part in parts_of(shapes, links):
            end = first + sum(link.num_params for link in part)
            x = chain.run(part, x, params[first:end], call)
            first = end
    return sum(storage.nbytes() for storage in list(counted.values())[num_own:])


def _params(
    layer: LowPrecisionModule, shapes: tuple[LinkShape, ...], x: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters of a call with the input ``x``, and the plain tensors of the layer's
    own: the others are weights that forward computes, and what comes with the call, as the extra
    inputs of residual adds."""
    rows, columns = x.shape
    params: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    given = iter(layer.link_params())
    for shape in shapes:
        brought = shape.example(x.new_empty(rows, columns)).params
        params += brought
        for _ in range(shape.num_params - len(brought)):
            real = next(given)
            param = _on_meta(real)
            params.append(param)
            if isinstance(param, QuantizedTensor):
                own += param.tensors()
            elif is_of_parameter(real):
                own.append(param)
        columns = shape.columns(columns)
    return params, own


def _on_meta(param: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values like ``param``: a parameter if it is one, or a view of one."""
    is_trained = param.requires_grad
    if isinstance(param, QuantizedTensor):
        return param.detach().to(_META).requires_grad_(is_trained)
    value = torch.empty(param.shape, dtype=param.dtype, device=_META)
    if not is_of_parameter(param):
        return value.requires_grad_(is_trained)
    like = torch.nn.Parameter(value, is_trained)
    return like if isinstance(param, torch.nn.Parameter) else like.view(param.shape)


def _call(shapes: tuple[LinkShape, ...], x: torch.Tensor) -> Call:
    """Return a call with the input ``x``, in groups of nearly equal sizes if the layer splits its
    rows."""
    groups = max(shape.groups for shape in shapes)
    if not groups:
        rng = torch.empty(2, dtype=torch.int64, device=_META)
        brought = [shape.example(x) for shape in shapes]
        return Call(
            rng=rng,
            tensors=[tensor for one in brought for tensor in one.tensors],
            sizes=[size for one in brought for size in one.sizes],
        )
    size, longer = divmod(x.shape[0], groups)
    splits = (*(size + 1,) * longer, *(size,) * (groups - longer))
    return Call((torch.tensor((0, *itertools.accumulate(splits)), device="cpu"),), splits)
