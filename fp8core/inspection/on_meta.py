"""A layer's own chain on meta tensors, which have shapes and no values.

It runs without the layer's memory and without other ranks, so that what it saves and what it would
send can be counted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from fp8core.backend_api import GemmDesc, OpDesc, Operand, Ranks, Transfers
from fp8core.chain import run as chain
from fp8core.chain.bind import bind_chain
from fp8core.chain.call import Call
from fp8core.chain.protocol import Link
from fp8core.chain.routes import Routes
from fp8core.chain.shape import BindContext, LinkShape, input_columns_of
from fp8core.collectives import named
from fp8core.dispatch import table
from fp8core.dispatch.optional import Offers
from fp8core.dispatch.resolver import Purpose
from fp8core.dispatch.table import Resolved
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bound import parts_of
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, Plan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer_binding import Binding
from fp8core.tensors.requantized import is_of_parameter

__all__ = ["ROWS", "MetaChain"]

_META = torch.device("meta")
ROWS = 8192
"""A number of rows that is a multiple of what any backend pads to, and of those under one scale."""


class MetaChain:
    """The chain of ``layer`` under ``recipe``, bound for the device of its tensors.

    Raises:
        UnsupportedError: no backend runs one of the layer's operations on the device.
    """

    def __init__(
        self,
        layer: LowPrecisionModule,
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layer = layer
        self.dtype = dtype
        self.shapes = layer.link_shapes()
        self.plan: Plan = plan_of(layer.plan_type, recipe, LayerRole(layer.kind, layer.name), dtype)
        binding = Binding(_META, dtype, resolver=_ShapesOf(device))
        with table.capturing():
            self.links = bind_chain(self.shapes, BindContext.of(self.plan, binding, layer.label))

    @staticmethod
    def can_run(layer: LowPrecisionModule) -> bool:
        """Say whether the sizes of the layer's input are known, and it runs no other modules
        between its chains."""
        return input_columns_of(layer.link_shapes()) is not None and layer.is_one_chain

    @contextmanager
    def forward(self, rows: int) -> Iterator[tuple[Forward, list[torch.Tensor]]]:
        """Prepare a forward of ``rows`` rows: what runs it, and the plain tensors of the layer's
        own among its parameters."""
        columns = input_columns_of(self.shapes)
        assert columns is not None
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.empty(rows, columns, dtype=self.dtype, device=_META)
            params, own = _params(self.layer, self.shapes, x.requires_grad_())
            yield Forward(self.shapes, self.links, x, params), own


class Forward:
    """One forward of a chain, to be called."""

    def __init__(
        self,
        shapes: tuple[LinkShape, ...],
        links: tuple[Link, ...],
        x: torch.Tensor,
        params: list[torch.Tensor],
    ) -> None:
        self._shapes = shapes
        self._links = links
        self._x = x
        self._params = params

    def __call__(self) -> torch.Tensor:
        """Return the output, with its history."""
        call, first, x = _call(self._shapes, self._x), 0, self._x
        for part in parts_of(self._shapes, self._links):
            end = first + sum(link.num_params for link in part)
            x = chain.run(part, x, self._params[first:end], call)
            first = end
        return x


class _ShapesOf:
    """A resolver to the operators of the backends of a device, which on meta tensors give shapes
    alone."""

    __slots__ = ("_device",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        resolved = table.resolve(desc, self._device)
        if not isinstance(desc, GemmDesc):
            return resolved
        with table.in_eager():
            offers = table.resolve(desc, self._device).offers
        if offers.gemm_part is None:
            return resolved
        part = partial(_part_of_product, resolved.run)
        return dataclasses.replace(resolved, offers=Offers(gemm_part=part))

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        return table.resolve_optional(desc, self._device, backend)

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Transfers | None:
        with table.in_eager():
            return table.transfers(ranks, self._device, dtype)


def _part_of_product(
    product: Callable[..., torch.Tensor],
    rows: int,
    a: Operand,
    b: Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    product(a, b, bias=bias)
    return out


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
        rng = torch.zeros(2, dtype=torch.int64, device="cpu")
        brought = [shape.example(x) for shape in shapes]
        return Call(
            rng=rng,
            tensors=[tensor for one in brought for tensor in one.tensors],
            sizes=[size for one in brought for size in one.sizes],
        )
    exchanging = next((one.moved_over for one in shapes if one.splits_experts), None)
    if exchanging is not None:  # each rank has as many rows for each expert
        size = named(exchanging).size
        routes = Routes.of([_evenly(x.shape[0], groups * size)] * size, named(exchanging).rank)
        return Call((_offsets(routes.splits),), routes.splits, routes=routes)
    splits = _evenly(x.shape[0], groups)
    return Call((_offsets(splits),), splits)


def _evenly(rows: int, groups: int) -> tuple[int, ...]:
    """Return nearly equal sizes of ``groups`` groups."""
    size, longer = divmod(rows, groups)
    return (*(size + 1,) * longer, *(size,) * (groups - longer))


def _offsets(splits: Sequence[int]) -> torch.Tensor:
    return torch.tensor((0, *itertools.accumulate(splits)), device="cpu")
