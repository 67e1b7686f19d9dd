"""A layer's own chain on meta tensors, which have shapes and no values.

The chain runs without the layer's memory and without other ranks, so that the bytes that it saves
and would send can be counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fp8core.backend_api import GemmDesc, OpDesc, Operand, Ranks, Transfers
from fp8core.chain import run as chain
from fp8core.chain.call import Call, Routes
from fp8core.chain.shape import BindContext, LinkShape, bind_chain, input_columns_of
from fp8core.collectives import Communicator, Traffic, named
from fp8core.dispatch import table
from fp8core.dispatch.table import Purpose, Resolved, Resolver
from fp8core.modules.agreement import communicators_of
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bound import parts_of
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, Plan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer_binding import Binding
from fp8core.tensors.saving import is_of_parameter


class Sent(NamedTuple):
    """A kind of collective of a layer, forward and backward.

    Attributes:
        collective: gather, scatter, sum, max or exchange.
        tensor: what travels: ``input``, ``input scales``, ``input again`` in backward, ``output``,
            ``grad_output``, ``grad_input``, ``amax``.
        group: the name of the process group, and ``ranks`` how many there are.
        format: how the tensor is quantized, or its dtype.
        calls: how often it is called in a step.
        a_row: bytes that a rank sends for each row of its input, in calls whose rows are whole
            blocks on each rank; others may send a tensor in high precision.
        fixed: bytes that it sends whatever the number of rows.
        way: how it runs: ``plain``, a collective of the process group; ``beside products``, copies
            by the backend; ``in parts``, such copies while the product that reads or writes the
            tensor computes other rows; ``read by each rank``, numbers that the backend reads from
            the memory of other ranks.
    """

    collective: str
    tensor: str
    group: str
    ranks: int
    format: str
    calls: int
    a_row: float
    fixed: int
    way: str = "plain"

    def __str__(self) -> str:
        sizes = [f"{self.a_row:,.2f} bytes a row"] if self.a_row else []
        sizes += [f"{self.fixed:,} bytes a step"] if self.fixed or not sizes else []
        return (
            f"{self.collective} of {self.tensor} over {self.ranks} ranks of group {self.group!r}: "
            f"{self.format}, sends {' and '.join(sizes)}, {self.way}"
        )


def sent_by(
    layer: LowPrecisionModule, recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> list[Sent]:
    """Return the collectives of a rank in a step of ``layer`` under ``recipe``, with all gradients.

    Empty for a layer of one rank, and for a layer whose input has no fixed size.

    Raises:
        UnsupportedError: no backend runs one of the layer's operations on the device.
    """
    communicators = communicators_of(layer.link_shapes())
    if not communicators or not MetaChain.can_run(layer):
        return []
    meta = MetaChain(layer, recipe, device, dtype)
    few, many = (_counted(meta, communicators, rows) for rows in (ROWS, 2 * ROWS))
    return [
        Sent(
            collective,
            tensor,
            communicator.group_name,
            communicator.size,
            _format(meta, tensor),
            calls,
            (many[at][collective, tensor].bytes - sent) / ROWS,
            2 * sent - many[at][collective, tensor].bytes,
            few[at].way(collective, tensor),
        )
        for at, communicator in enumerate(communicators)
        for (collective, tensor), (calls, sent) in few[at]
    ]


def _counted(meta: MetaChain, communicators: list[Communicator], rows: int) -> list[Traffic]:
    with contextlib.ExitStack() as stack:
        counts = [stack.enter_context(communicator.counting()) for communicator in communicators]
        forward, _ = stack.enter_context(meta.forward(rows))
        y = forward()
        torch.autograd.backward((y,), (torch.empty_like(y),))
        return counts


def _format(meta: MetaChain, tensor: str) -> str:
    """Return how ``tensor`` is quantized, or the dtype in which it travels."""
    name, *rest = tensor.split()
    if name == "amax" or rest[-1:] == ["scales"]:
        return "scales" if rest else "float32"
    plan = meta.plan.tensors.get(name)
    spec = None if plan is None else plan.columnwise if "again" in rest else plan.rowwise
    return str(meta.dtype).removeprefix("torch.") if spec is None else str(spec)


class SavedBytes(NamedTuple):
    """Bytes that a layer holds from its forward to its backward, which computes the gradients of
    its input and of the parameters that require one.

    Attributes:
        a_row: for each row of the input: activations, their codes and statistics. The input itself
            is among them where backward reads it. A call of other rows than whole blocks holds
            more: where it is padded, as under MXFP8 to a multiple of 32 rows, the operands of a
            product have the zero rows too, and a block that is not full has a whole scale.
        fixed: whatever the number of rows: the copies of the weights, and weights that forward
            computes from parameters. Parameters are not counted.

    A layer counts by itself: under ``holding="least"`` it holds no codes that it makes again from
    tensors of the layer before it, as those of the result of attention in a TransformerLayer.

    Of grouped layers, scales of blocks count as for the groups that have the most of them. On CUDA
    the columnwise codes of groups have room for up to 32 rows of zeros each, which do not count.
    """

    a_row: float
    fixed: int

    def __str__(self) -> str:
        return (
            f"holds {self.a_row:,.0f} bytes a row from forward to backward, and "
            f"{self.fixed / 2**20:,.1f} MiB of weights' copies"
        )


def saved_bytes(
    layer: LowPrecisionModule, recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> SavedBytes | None:
    """Return the bytes that ``layer`` saves on ``device`` under ``recipe``, on activations of
    ``dtype``; None if the layer takes any number of columns, on which the bytes depend, or runs
    other modules between its chains.

    Raises:
        UnsupportedError: no backend runs one of the layer's operations on the device.
    """
    if not MetaChain.can_run(layer):
        return None
    meta = MetaChain(layer, recipe, device, dtype)
    few, many = (_bytes(meta, rows) for rows in (ROWS, 2 * ROWS))
    return SavedBytes((many - few) / ROWS, 2 * few - many)


def _bytes(meta: MetaChain, rows: int) -> int:
    """Return the bytes of the storages that autograd saves in one forward of ``rows`` rows."""
    with meta.forward(rows) as (forward, parameters):
        return autograd_bytes(forward, parameters)


def autograd_bytes(forward: Callable[[], object], parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes that autograd saves in one call of ``forward``, each storage counted once.

    Storages of ``parameters`` are not counted.
    """
    # By identity: torch has one object for each storage as long as somebody holds it.
    counted = {id(param.untyped_storage()): param.untyped_storage() for param in parameters}
    num_parameters = len(counted)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        counted[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in list(counted.values())[num_parameters:])


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
        return input_columns_of(layer.link_shapes()) is not None and layer.is_whole_chain

    @contextmanager
    def forward(self, rows: int) -> Iterator[tuple[Callable[[], torch.Tensor], list[torch.Tensor]]]:
        """Prepare a forward of ``rows`` rows: the forward to call, which returns the output with
        its history, and the plain tensors among the layer's own parameters."""
        columns = input_columns_of(self.shapes)
        assert columns is not None
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.empty(rows, columns, dtype=self.dtype, device=_META)
            params, plain = _params(self.layer, self.shapes, x.requires_grad_())

            def forward() -> torch.Tensor:
                y, left, call = x, iter(params), _call(self.shapes, x)
                for part in parts_of(self.shapes, self.links):
                    num_params = sum(link.num_params for link in part)
                    y = chain.run(part, y, list(itertools.islice(left, num_params)), call)
                return y

            yield forward, plain


class _ShapesOf(Resolver):
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
        if not (isinstance(desc, GemmDesc) and desc.part):
            return table.resolve_optional(desc, self._device, backend)
        with table.in_eager():
            resolved = table.resolve_optional(desc, self._device, backend)
        if resolved is None:
            return None
        whole = table.resolve(dataclasses.replace(desc, part=False), self._device, backend=backend)

        def part(
            rows: int,
            a: Operand,
            b: Operand,
            *,
            bias: torch.Tensor | None = None,
            out: torch.Tensor,
        ) -> torch.Tensor:
            whole.run(a, b, bias=bias)
            return out

        return dataclasses.replace(resolved, run=part)

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Transfers | None:
        with table.in_eager():
            return table.transfers(ranks, self._device, dtype)


def _params(
    layer: LowPrecisionModule, shapes: tuple[LinkShape, ...], x: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters of a call with the input ``x``, and the plain tensors of the layer's
    own: the others are weights that forward computes, and what comes with the call, as the extra
    inputs of residual adds."""
    rows, columns = x.shape
    params: list[torch.Tensor] = []
    plain: list[torch.Tensor] = []
    sources = iter(layer.link_params())
    for shape in shapes:
        brought = shape.example(x.new_empty(rows, columns)).params
        params += brought
        for _ in range(shape.num_params - len(brought)):
            real = next(sources)
            param = _on_meta(real)
            params.append(param)
            if isinstance(param, QuantizedTensor):
                plain += param.tensors()
            elif is_of_parameter(real):
                plain.append(param)
        columns = shape.columns(columns)
    return params, plain


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
            tensors=[tensor for example in brought for tensor in example.tensors],
            sizes=[size for example in brought for size in example.sizes],
        )
    exchanging = next((shape.process_groups[0] for shape in shapes if shape.splits_experts), None)
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
