"""Layers of linears, perhaps behind a norm, and how ranks share them: Transformer Engine's
arguments, parameters, and links.

A column-parallel linear has some of the output features, a row-parallel one some of the input
features, on each rank of a group. With sequence parallelism the tensors between the two, which all
ranks would hold otherwise, are split by rows::

    column   gather, linear              or, without sequence parallelism, replicate, linear
    row      linear, scatter, bias       or, without sequence parallelism, linear, all_reduce, bias
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from typing_extensions import override

from fp8core.chain.linear.shape import LinearShape
from fp8core.chain.moving import MovingShape
from fp8core.chain.norm import NormShape
from fp8core.chain.shape import LinkShape
from fp8core.chain.simple import BiasShape, OutputShape
from fp8core.collectives import Communicator, named, of_group
from fp8core.collectives.base import is_process_group
from fp8core.errors import OperandError, checked_choice
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.parameters import InitMethod, fill, make_parameter, resolve_device
from fp8core.modules.layers.norm import (
    NORM_PARAMETERS,
    mark_norm,
    norm_names,
    register_norm,
    reset_norm,
)
from fp8core.modules.run import run_layer
from fp8core.recipe.plan import LayerRole
from fp8core.tensors.parameter import make_weight

_MODES = ("column", "row", None)


class Parallel(NamedTuple):
    """How a layer is spread over a group of ``size`` ranks, called ``group``, as number ``rank``.

    ``group`` is "" as long as a layer has none, and in a layer of one rank. ``sequence``: the rows
    outside of the parallel linears are split over the ranks. A plain value, which torch.compile
    compares and which a copy of the layer keeps.
    """

    size: int = 1
    group: str = ""
    sequence: bool = False
    rank: int = 0

    @classmethod
    def of(cls, owner: str, tp_group: object, tp_size: int, sequence: bool) -> Parallel:
        """Return the ranks and options for the arguments of the layer ``owner``.

        A group decides about the size, as in Transformer Engine; without one, ``tp_size`` ranks
        get theirs by ``set_tensor_parallel_group``.

        Raises:
            OperandError: ``tp_group`` is no group with this rank, or ``tp_size`` no integer from 1.
        """
        if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
            raise OperandError(f"{owner}(tp_size={tp_size!r}): expected an integer >= 1.")
        if tp_group is None:
            return cls(tp_size, "", bool(sequence) and tp_size > 1)
        communicator = communicator_of(f"{owner}(tp_group={tp_group!r})", tp_group)
        size = communicator.size
        if tp_size not in (1, size):
            raise OperandError(
                f"{owner}(tp_size={tp_size}): the given tp_group has {size} ranks. Leave out "
                f"tp_size, or give the group of that size."
            )
        name = communicator.group_name if size > 1 else ""
        return cls(size, name, bool(sequence) and size > 1, communicator.rank)

    def part_of(self, owner: str, name: str, size: int) -> int:
        """Return a rank's share of ``size``, which the argument ``name`` of ``owner`` gives.

        Raises:
            OperandError: the ranks do not divide it.
        """
        if size % self.size:
            raise OperandError(
                f"{owner}({name}={size}): the {self.size} ranks of its group do not divide it. "
                f"Choose a multiple of {self.size}, or a group of another size."
            )
        return size // self.size

    def gathered(self, leading: Sequence[int]) -> tuple[int, ...]:
        """Return the leading dimensions of what a column-parallel linear returns, from those of its
        input."""
        if not self.sequence or not leading:  # an input without rows is refused by the linear
            return tuple(leading)
        return (leading[0] * self.size, *leading[1:])

    def movement(self, split: str, whole: str) -> tuple[LinkShape, ...]:
        """Return the link beside a parallel linear: the movement ``split`` where rows outside of it
        are split over the ranks, ``whole`` where each rank has all; none in a layer of one rank."""
        if self.size == 1:
            return ()
        return (MovingShape(split if self.sequence else whole, self.group),)


ALONE = Parallel()
"""A layer of one rank."""


class LinearParameters(NamedTuple):
    """The parameters of a linear of a layer: a weight ``[out_features, in_features]`` and a bias
    ``[out_features]``, either whole or in parts along ``out_features``.

    Attributes:
        weights, biases: the names of the parts.
        rows: the output features of each part.
        in_features: the input features.
        init_method: fills each part of the weight.
        mode: how ranks share it, ``"column"`` or ``"row"``; None: each has all of it.
        adds_bias: whether the linear adds its bias.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    rows: tuple[int, ...]
    in_features: int
    init_method: InitMethod
    mode: str | None
    adds_bias: bool


NORM_FIELDS = (
    *("return_layernorm_output", "return_layernorm_output_gathered", "zero_centered_gamma"),
)
"""What may be set, besides :attr:`ParallelModule.shape_fields`, of a layer that has a norm."""


class ParallelModule(LowPrecisionModule):
    """Base of the layers of linears, which may be spread over ranks, with Transformer Engine's
    attributes.

    A subclass says which linears it has, and perhaps a norm before them: that is the one
    description of its parameters, from which follow their names, values, and links.
    """

    shape_fields: ClassVar[tuple[str, ...]] = (
        "return_bias",
        "fuse_wgrad_accumulation",
        "save_original_input",
    )
    parallel: Parallel = ALONE
    parallel_mode: str | None = None
    return_bias = False
    return_layernorm_output = False
    return_layernorm_output_gathered = False
    save_original_input = False
    zero_centered_gamma = False
    # The kind of the norm before the linears, and what it adds to the variance.
    _norm: tuple[str, float] | None = None
    # Who forks the random state for weights that differ between ranks, and under which name.
    _tracker: tuple[Callable[[], Any] | None, str | None] = (None, None)

    @property
    def tp_size(self) -> int:
        """Over how many ranks the layer is spread."""
        return self.parallel.size

    @property
    def sequence_parallel(self) -> bool:
        """Whether rows outside of the parallel linears are split over the ranks."""
        return self.parallel.sequence

    @property
    def tp_group(self) -> object | None:
        """The group; None for a layer of one rank, and before :meth:`set_tensor_parallel_group`."""
        if not self.parallel.group:
            return None
        communicator = named(self.parallel.group)
        return getattr(communicator, "group", communicator)

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Give the layer, made with ``tp_size``, its group; call it before the first forward.

        Raises:
            OperandError: the group has another number of ranks, or this rank is not in it.
        """
        owner = f"{self.label}.set_tensor_parallel_group"
        if tp_group is None and self.parallel.size == 1:
            return
        parallel = Parallel.of(owner, tp_group, 1, self.parallel.sequence)
        if parallel.size != self.parallel.size:
            raise OperandError(
                f"{owner}: the group has {parallel.size} ranks, but the layer was made for "
                f"tp_size={self.parallel.size}, and has its share of the weights."
            )
        self.parallel = parallel
        self.unbind()

    def set_sequence(self, sequence: bool) -> None:
        """Say whether rows outside of the parallel linears are split over the ranks from now on."""
        if sequence != self.parallel.sequence:
            self.parallel = self.parallel._replace(sequence=sequence)
            self.unbind()

    def _set_parallel(
        self,
        mode: object,
        arguments: tuple[object, int, bool],
        tracker: object,
        rng_tracker_name: str | None = None,
    ) -> None:
        """Set what Transformer Engine's arguments ask for; ``arguments`` are tp_group, tp_size and
        sequence_parallel."""
        owner = type(self).__name__
        checked_choice(owner, "parallel_mode", mode, _MODES)
        if tracker is not None and not callable(tracker):
            raise OperandError(
                f"{owner}(get_rng_state_tracker={tracker!r}): expected a function that returns a "
                f"tracker, whose fork() is a context."
            )
        self.parallel_mode = mode if mode is None else str(mode)
        self.parallel = Parallel.of(owner, *arguments)
        self._tracker = (tracker, rng_tracker_name)

    def _linears(self) -> Sequence[LinearParameters]:
        """Return the parameters of the layer's linears, in order."""
        return ()

    @property
    def _spread(self) -> Parallel:
        """How the linears are spread over ranks."""
        return self.parallel

    def _init_parameters(
        self, device: torch.device | str | None, dtype: torch.dtype | None, delays_wgrad: bool
    ) -> None:
        """Create the parameters, and fill them unless they are on meta."""
        target = resolve_device(device)
        self._make_parameters(target, dtype)
        if delays_wgrad:
            self._delay_wgrads()
        if target.type != "meta":
            self.reset_parameters()

    def _make_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        linears, role = self._linears(), LayerRole(self.kind, self.name)
        if self._norm is not None:
            names, sizes = norm_names(self._norm[0]), (linears[0].in_features,)
            is_sequence = self.sequence_parallel
            register_norm(self, names, sizes, device, dtype, sequence_parallel=is_sequence)
        for linear in linears:
            for name, rows in zip(linear.weights, linear.rows, strict=True):
                weight = make_weight((rows, linear.in_features), device, dtype, role)
                self.register_parameter(name, weight)
            for name, rows in zip(linear.biases, linear.rows, strict=True):
                bias = make_parameter(rows, device=device, dtype=dtype) if self.use_bias else None
                self.register_parameter(name, bias)
            self._mark_parameters(linear)

    def _mark_parameters(self, linear: LinearParameters) -> None:
        """Set the attributes that Megatron reads."""
        for name in linear.weights:
            mark_weight(self._parameters[name], 1 if linear.mode == "row" else 0)
        for name in linear.biases:
            if linear.mode == "row":
                mark_norm(self._parameters[name], self._spread.sequence)
            elif linear.mode == "column":
                mark_weight(self._parameters[name], 0)

    def _fill_parameters(self) -> None:
        """Fill the weights by their methods, the biases with 0, and start a norm as the identity;
        a tensor that a parametrization computes stays as it is."""
        if self._norm is not None:
            reset_norm(self, norm_names(self._norm[0]), zero_centered=self.zero_centered_gamma)
        for linear in self._linears():
            for name in linear.weights:
                with self._forked():
                    fill(self._stored(name), linear.init_method)
            for name in linear.biases:
                fill(self._stored(name), torch.nn.init.zeros_)

    def _stored(self, name: str) -> torch.Tensor | None:
        """Return the memory of the parameter ``name``; None without one, as of a computed one."""
        return self._parameters.get(name)

    @override
    def weight_names(self) -> list[tuple[str, ...]]:
        return [linear.weights for linear in self._linears()]

    @override
    def link_names(self) -> list[tuple[str, ...]] | None:
        names: list[tuple[str, ...]] = []
        if self._norm is not None:
            names += zip(norm_names(self._norm[0]), strict=True)
        for linear in self._linears():
            names.append(linear.weights)
            if linear.adds_bias:
                names.append(linear.biases)
        return names

    def _links_of(self, linear: LinearParameters, groups: int = 0) -> tuple[LinkShape, ...]:
        """Return the shape of ``linear``, or of ``groups`` like it, between the links of its mode.
        The bias of one whose results are summed over ranks is added once, behind the sum."""
        move, mode = self._spread.movement, linear.mode
        before = move("gather", "replicate") if mode == "column" else ()
        after = move("scatter", "all_reduce") if mode == "row" else ()
        bias_dtype = self.dtype_of(linear.biases[0]) if linear.adds_bias else None
        out_features = sum(linear.rows)
        shape = LinearShape(
            *(linear.in_features, out_features),
            self.dtype_of(linear.weights[0]),
            None if after else bias_dtype,
            groups,
            accumulates=self.fuse_wgrad_accumulation,
            delays_wgrad=self.wgrad_queue is not None,
            saves_input=self.save_original_input,
        )
        if after and bias_dtype is not None:
            after = (*after, BiasShape(out_features, bias_dtype))
        return (*before, shape, *after)

    def _behind_norm(self, shapes: tuple[LinkShape, ...]) -> tuple[LinkShape, ...]:
        """Return ``shapes`` behind the norm, with the link at which its result leaves the chain if
        the layer returns that: behind the gather, if it returns that of all ranks."""
        assert self._norm is not None
        (kind, eps), dtype = self._norm, self.dtype_of("layer_norm_weight")
        size = self._linears()[0].in_features
        norm = NormShape(kind, size, eps, self.zero_centered_gamma, dtype)
        if not self.return_layernorm_output:
            return (norm, *shapes)
        movement = shapes[0].movement
        is_gathered = bool(self.return_layernorm_output_gathered and movement and movement.rows)
        return (norm, *shapes[:is_gathered], OutputShape(), *shapes[is_gathered:])

    def _compute(
        self,
        input: torch.Tensor,
        first_microbatch: bool | None,
        columns: int,
        shapes: tuple[LinkShape, ...] | None = None,
    ) -> Any:
        """Return the output of the layer for ``input [..., columns]``, followed by the last bias
        with ``return_bias``, and by the norm's result with ``return_layernorm_output``."""
        num_inner = 0 if self._norm is None else len(NORM_PARAMETERS[self._norm[0]])
        outputs: list[Any] = run_layer(
            self, input, first_microbatch, columns=columns, num_inner=num_inner, shapes=shapes
        )
        if self.return_bias:
            outputs.insert(1, self.put_together(self._linears()[-1].biases))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _forked(self) -> AbstractContextManager[Any]:
        """Return the context in which weights that differ between ranks are filled."""
        get_tracker, name = self._tracker
        if get_tracker is None:
            return contextlib.nullcontext()
        tracker = get_tracker()
        context: AbstractContextManager[Any] = tracker.fork(name) if name else tracker.fork()
        return context


def set_group(module: torch.nn.Module, tp_group: object | None) -> None:
    """Give the layers inside ``module`` that are spread over ranks their group."""
    for child in module.modules():
        if isinstance(child, ParallelModule) and child.tp_size > 1:
            child.set_tensor_parallel_group(tp_group)


def communicator_of(argument: str, group: object | None) -> Communicator:
    """Return the communicator of ``group``, a process group or a communicator; of the default group
    for None. ``argument`` is what messages call it.

    Raises:
        OperandError: it is neither, or this rank is not in it.
    """
    # The value of a group for ranks outside of it is an integer, which of_group() refuses.
    is_outside = isinstance(group, int) and not isinstance(group, bool)
    if not (is_outside and torch.distributed.is_available()) and not (
        group is None or isinstance(group, Communicator) or is_process_group(group)
    ):
        raise OperandError(f"{argument}: expected a torch.distributed process group.")
    return of_group(group)  # type: ignore[arg-type]  # checked above


def mark_weight(parameter: torch.Tensor | None, dim: int) -> None:
    """Set the attributes by which Megatron knows a parameter that is split along ``dim``."""
    if parameter is not None:
        vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
