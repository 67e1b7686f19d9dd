"""Shapes: a link before it is bound, as a plain value that answers questions and binds itself.

A new kind of link is a shape, with a link and a program where two functions are not enough
(:mod:`fp8core.chain.simple`); a subclass of
:class:`fp8core.modules.layers.operation.Operation` that returns the shape makes it a part of
``ops.Sequential``. Whoever lays out a layer, checks sizes or binds a chain asks a shape for what it
needs to know, and never which kind of shape it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import OpDesc, Transfers
from fp8core.chain.protocol import Link
from fp8core.chain.request import QuantizeRequest
from fp8core.collectives import Communicator, named
from fp8core.dispatch.table import Purpose, Resolved
from fp8core.recipe.plan import HIGH_PRECISION, AttentionPlan, LinearPlan, Plan, TensorPlan
from fp8core.tensors.delayed_state import LayerStates
from fp8core.tensors.quantizer_binding import Binding


class CallInputs(NamedTuple):
    """The arguments of a link in a call besides the chain's input: the first of its parameters,
    where the others are the layer's, and ``Call.tensors`` and ``Call.sizes``."""

    params: Sequence[torch.Tensor] = ()
    tensors: Sequence[torch.Tensor | None] = ()
    sizes: Sequence[int] = ()


class Movement(NamedTuple):
    """The rows that a link moves between the ranks of the group ``group``, by its name.

    ``rows`` says how the rows of its output come from several ranks: ``"gathered"``, those of all
    ranks, of which its input has a rank's; ``"exchanged"``, those of a call's routes; empty if they
    are those of its input. ``grad_rows`` says so of the gradient of its input.
    """

    group: str
    rows: str = ""
    grad_rows: str = ""


class LinkShape:
    """Base of the shapes, which are frozen dataclasses: each states what differs from a link that
    has no parameters, keeps the columns, and computes in the dtype of the activations."""

    __slots__ = ()
    # The kind of plan by which its link computes.
    plan_type: ClassVar[type[Plan]] = LinearPlan
    # Into how many groups each call splits its rows; 0 for a dense link.
    groups: int = 0
    # Whether its link quantizes tensors: it is bound first, and its neighbours ask how.
    quantizes: bool = False
    # Whether weight gradients are added to ``weight.main_grad``, and whether backward leaves them
    # to a later call.
    accumulates: bool = False
    delays_wgrad: bool = False
    # Whether a layer returns the value at this link besides its output.
    leaves_chain: bool = False
    # Whether its link may take the gradient of its output some rows at a time, and whether it can
    # leave an addition to the next one.
    reads_grad_rows: bool = False
    leaves_sum: bool = False

    @property
    def num_params(self) -> int:
        """How many of the chain's parameters are this link's."""
        return 0

    @property
    def num_weights(self) -> int:
        """How many parameters are weights, each with a GEMM and delayed scales of its own."""
        return 0

    @property
    def features(self) -> tuple[int, int] | None:
        """The columns that its matrix product takes and returns; None for a link without one."""
        return None

    @property
    def movement(self) -> Movement | None:
        """The rows that its link moves between the ranks of a group; None if it computes. The
        links on both sides quantize for each other as if it were not there."""
        return None

    @property
    def process_groups(self) -> tuple[str, ...]:
        """The names of the groups whose ranks compute together, and so have to bind it alike."""
        return () if self.movement is None else (self.movement.group,)

    @property
    def shares_scales_over(self) -> str | None:
        """The name of the group whose ranks have one delayed scale for each tensor; None: none."""
        return None if self.movement is None or self.splits_experts else self.movement.group

    @property
    def splits_experts(self) -> bool:
        """Whether each rank has other experts behind it, with delayed scales of their own."""
        return self.movement is not None and "exchanged" in self.movement

    @property
    def widths(self) -> tuple[int, int] | None:
        """The columns that it takes and returns; None if it takes any number of them."""
        return self.features

    def columns(self, columns: int) -> int:
        """Return how many columns its output has if its input has ``columns``."""
        return columns if self.widths is None else self.widths[1]

    def input_columns(self, columns: int | None) -> int | None:
        """Return how many columns its input has if its output has ``columns``; None: any number."""
        return columns if self.widths is None else self.widths[0]

    def expected_columns(self, columns: int) -> str | None:
        """Return None if it takes an input of ``columns``, else how many it takes, in words."""
        return None if self.widths is None or columns == self.widths[0] else str(self.widths[0])

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which it can hand over its output before rounding to ``dtype``, that
        of the activations."""
        return dtype

    def grad_input_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which it can hand back its gradient before rounding to ``dtype``."""
        return dtype

    def example(self, x: torch.Tensor) -> CallInputs:
        """Return what a call with the input ``x [rows, columns]`` brings besides it: tensors of
        the right shapes like ``x``, without values."""
        return CallInputs()

    def with_offsets_on_device(self) -> LinkShape:
        """Return the shape for calls whose group sizes the host never reads."""
        return self

    def values(self) -> tuple[Any, ...]:
        """Return the class and its arguments, which torch.compile can hand over as constants."""
        return (type(self), *[getattr(self, name) for name in type(self).__match_args__])  # type: ignore[attr-defined]  # each is a dataclass

    def bind(self, context: BindContext) -> Link:
        """Return the link, bound to the operations of a backend.

        Raises:
            UnsupportedError: no backend runs one of them on the device.
        """
        raise NotImplementedError


def input_columns_of(shapes: Sequence[LinkShape]) -> int | None:
    """Return how many columns the input of a chain of ``shapes`` has; None if it may have any
    number."""
    columns: int | None = None
    for shape in reversed(shapes):
        columns = shape.input_columns(columns)
    return columns


Watch: TypeAlias = Callable[[Any, LinearPlan, Binding], Link]
"""``f(link, plan of its GEMMs, binding) -> link`` that computes the same and looks at it."""


class Neighbour(NamedTuple):
    """The shape next to a link, and its own link; None while that is not bound yet."""

    shape: LinkShape
    link: Link | None


class BindContext(NamedTuple):
    """The arguments of binding a chain, and what a shape can see of its neighbours in it.

    Attributes:
        plan: how the recipe quantizes the tensors of the layer.
        binding: device and dtype, and who finds the operations.
        owner: what messages call the layer.
        states: the delayed states of the chain, None without.
        watch: makes another link of each one that has GEMMs, to be used instead.
        nonfinite: int64 ``[1]``, to which every cast adds the number of its NaN and inf; None in a
            graph, whose casts have a count of their own.
        position: the index of the shape in the chain.
        first_gemm: the number of GEMMs that the shapes before have in forward, and of those of the
            layer before its first shape.
        before, after: the neighbours, None at an end of the chain.
        source, target: the nearest links on both sides that compute, beyond those that only move a
            tensor between ranks.
        is_parallel: whether the chain has links that do.
        attention: how the recipe quantizes the tensors of attention, None in other layers.
    """

    plan: LinearPlan
    binding: Binding
    owner: str
    states: LayerStates | None = None
    watch: Watch | None = None
    nonfinite: torch.Tensor | None = None
    position: int = 0
    first_gemm: int = 0
    before: Neighbour | None = None
    after: Neighbour | None = None
    source: Neighbour | None = None
    target: Neighbour | None = None
    is_parallel: bool = False
    attention: AttentionPlan | None = None

    @classmethod
    def of(cls, plan: Plan, binding: Binding, owner: str, *more: Any) -> BindContext:
        """Return the context of a layer that computes by ``plan``, of whatever kind; ``more`` are
        the fields that follow."""
        if isinstance(plan, LinearPlan):
            return cls(plan, binding, owner, *more)
        context = cls(HIGH_PRECISION, binding, owner, *more)
        return context._replace(attention=plan) if isinstance(plan, AttentionPlan) else context

    @property
    def gemm_plan(self) -> LinearPlan:
        """How the GEMMs compute: while amaxes are only observed, in high precision."""
        return HIGH_PRECISION if self.binding.is_observing else self.plan

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self.binding.activation_dtype

    @property
    def output_consumer(self) -> QuantizeRequest | None:
        """How the next link quantizes the output; None if it takes the tensor as it is."""
        link = None if self.target is None else self.target.link
        return None if link is None else link.input_consumer

    @property
    def grad_input_consumer(self) -> QuantizeRequest | None:
        """How the link before quantizes the gradient of its output; None if it does not."""
        link = None if self.source is None else self.source.link
        return None if link is None else link.grad_consumer

    def input_dtype(self, plan: TensorPlan) -> torch.dtype:
        """Return the dtype in which the link before hands over a tensor quantized as ``plan``.

        Source: docs/numerics.md, "Where values are rounded before the cast".
        """
        if _is_rounded_first(plan) or self.source is None:
            return self.dtype
        return self.source.shape.output_dtype(self.dtype)

    def grad_dtype(self, plan: TensorPlan) -> torch.dtype:
        """Return the dtype in which the next link hands back a gradient quantized as ``plan``."""
        if _is_rounded_first(plan) or self.target is None:
            return self.dtype
        return self.target.shape.grad_input_dtype(self.dtype)

    def moved_over(self, tensor: str, way: str) -> Communicator | None:
        """Return the ranks between which a neighbour moves the rows of ``tensor``, the input or
        the gradient of the output, by ``way``, as in :class:`Movement`; None: no link does."""
        neighbour = self.before if tensor == "input" else self.after
        movement = None if neighbour is None else neighbour.shape.movement
        if movement is None:
            return None
        moved = movement.rows if tensor == "input" else movement.grad_rows
        return named(movement.group) if moved == way else None

    def purpose(self, step: str) -> Purpose:
        """Return what an operation of the link is for."""
        return Purpose(self.position, step)

    def resolve(self, step: str, desc: OpDesc) -> Resolved:
        """Return the operation for ``desc``, which ``step`` of the link needs."""
        return self.binding.resolver.resolve(desc, self.binding.device, self.purpose(step))

    def resolve_optional(self, step: str, desc: OpDesc, backend: str) -> Resolved | None:
        """Return the operation for ``desc`` if ``backend`` offers it, else None."""
        resolver, device = self.binding.resolver, self.binding.device
        return resolver.resolve_optional(desc, device, backend, self.purpose(step))

    def transfers(self, communicator: Communicator | None) -> Transfers | None:
        """Return what moves rows beside the chain's products; None: collectives of the group do."""
        if communicator is None or communicator.size == 1 or self.watch is not None:
            return None
        binding = self.binding
        return binding.resolver.transfers(communicator, binding.device, self.dtype)


def _is_rounded_first(plan: TensorPlan) -> bool:
    return all(spec is None or spec.cast_first for spec in plan)


def bind_chain(
    shapes: Sequence[LinkShape], context: BindContext, bound: Mapping[int, Link] | None = None
) -> tuple[Link, ...]:
    """Bind the links of ``shapes``, each knowing its neighbours. Those of ``bound``, by their
    position, are bound already, as links of other layers.

    Links that quantize come first, as the others ask them what to hand over. The others are bound
    from the last to the first, as a link may leave work to the one after it.

    Raises:
        UnsupportedError: no backend runs one of the operations on the device; GEMMs are asked
            first, so that the message is about them.
    """
    links: dict[int, Link] = dict(bound or {})
    positions = range(len(shapes))

    def neighbour(position: int) -> Neighbour | None:
        if position not in positions:
            return None
        return Neighbour(shapes[position], links.get(position))

    def computing(nearest: Iterable[int]) -> Neighbour | None:
        computes = (at for at in nearest if shapes[at].movement is None)
        return neighbour(next(computes, -1))

    is_parallel = any(shape.movement is not None for shape in shapes)
    quantizing = [position for position in positions if shapes[position].quantizes]
    computing_last = [position for position in positions if not shapes[position].quantizes]
    for position in (*quantizing, *reversed(computing_last)):
        if position in links:
            continue
        link_context = context._replace(
            position=position,
            first_gemm=context.first_gemm + sum(shape.num_weights for shape in shapes[:position]),
            before=neighbour(position - 1),
            after=neighbour(position + 1),
            source=computing(range(position - 1, -1, -1)),
            target=computing(range(position + 1, len(shapes))),
            is_parallel=is_parallel,
        )
        links[position] = shapes[position].bind(link_context)
    return tuple(links[position] for position in positions)
