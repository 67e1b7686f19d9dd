"""Mixtures of experts whose experts are on several ranks.

Rows go to the rank of their expert and back::

    rows, row_id_map = fp8core.moe_permute(tokens, routing_map, num_out_tokens)
    results = experts(rows, routing_map.sum(0))              # Experts(fc1, ops.SwiGLU(), fc2)
    tokens = fp8core.moe_unpermute(results, row_id_map, merging_probs=probs)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parametrize
from typing_extensions import override

from fp8core.chain import run as chain
from fp8core.chain.call import Call, Routes
from fp8core.chain.moving import MovingShape
from fp8core.chain.series import Chain
from fp8core.chain.shape import BindContext, LinkShape, bind_chain
from fp8core.collectives import Communicator, named, of_group
from fp8core.distributed.sharded_state import SavedScales, remote_experts
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import new_seed
from fp8core.modules.calls.inputs import check_chained, check_input
from fp8core.modules.layers.grouped_linear import KINDS, GroupedLinear
from fp8core.modules.layers.operation import Operation
from fp8core.modules.run import run_links
from fp8core.modules.state.loading import Imported
from fp8core.recipe.plan import HIGH_PRECISION
from fp8core.tensors.delayed_state import BUFFERS, META, LayerStates
from fp8core.tensors.quantizer_binding import Binding
from fp8core.torch_ops.private import sharded_parameters

Counts = Sequence[int] | torch.Tensor


class Experts(LowPrecisionModule):
    """The experts of a mixture, some on each rank of a group: grouped linears and activations.

    A rank has ``num_gemms`` experts, rank r the ones after those of rank r - 1. All layers run as
    one chain between two exchanges of rows. Rows are cast before they leave, and codes and scales
    travel, where the codes are those of the whole group of an expert:

    - current and delayed scaling: the ranks find one scale for each expert, or layer;
    - one scale a row: always; columns, which weight gradients read, by amaxes of all ranks;
    - scales of blocks: where the rows of each rank for each expert are a multiple of the block, as
      ``fp8core.moe_permute_and_pad_with_probs`` makes them.

    Else, and under NVFP4, rows travel in the dtype of the activations and are cast where they
    arrive. So do gradients if ``fc2`` has biases, whose gradient needs them. Results and gradients
    equal those of one process that has all experts, with the rows of each in the order of ranks.

    Parameters carry the numbers of all experts: ``0.weight2`` is the first linear's of the third
    expert, on whichever rank. So ``torch.distributed.checkpoint`` keeps all of them, and those of
    the optimizer, and loads them on another number of ranks. In a ``state_dict`` a DTensor without
    memory stands for each parameter of another rank, and ``full_state_dict=True`` gathers them.
    Delayed scales are saved as DTensors ``[..., linears, experts, slots]``.

    Args:
        layers: ``fp8core.GroupedLinear``, of one number of experts, and operations of
            ``fp8core.ops`` without parameters of rows, such as activations.
        group: the ranks; None: this one alone.
        name: the layer's name in messages.

    Raises:
        OperandError: no grouped linear, numbers of experts that differ, or a layer that does not
            take the columns of the one before it.
        UnsupportedError: a layer with ``delay_wgrad_compute`` or ``return_bias``, or an operation
            that takes further inputs.
    """

    kind = "grouped_linear"
    is_link = False

    def __init__(
        self,
        *layers: GroupedLinear | Operation,
        group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.num_local_experts = _check_layers(layers)
        for at, layer in enumerate(layers):
            self.add_module(str(at), layer)
        communicator = None if group is None else of_group(group)
        is_alone = communicator is None or communicator.size == 1
        self.group_name = "" if is_alone or communicator is None else communicator.group_name
        self.num_ranks = 1 if communicator is None else communicator.size
        self._is_agreed = False
        first = 0 if communicator is None else communicator.rank * self.num_local_experts
        for linear in self._linears():
            linear.number_groups(first, self.num_experts)
        hook = _add_remote_experts
        self.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]  # torch's

    @property
    def num_experts(self) -> int:
        """The experts of all ranks."""
        return self.num_ranks * self.num_local_experts

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shapes of the layers, between those that exchange rows."""
        shapes = tuple(shape for layer in self._layers() for shape in layer.link_shapes())
        if not self.group_name:
            return shapes
        return (
            MovingShape("dispatch", self.group_name),
            *shapes,
            MovingShape("combine", self.group_name),
        )

    @override
    def link_params(self) -> list[torch.Tensor]:
        return [param for layer in self._layers() for param in layer.link_params()]

    def forward(self, rows: torch.Tensor, tokens_per_expert: Counts) -> torch.Tensor:
        """Return the results of ``rows [n, k]``, in the same order.

        The host waits for ``tokens_per_expert`` of all ranks. A rank may have no rows, and so may
        an expert.

        Args:
            rows: this rank's rows, in the order of all experts, as ``fp8core.moe_permute``
                returns them.
            tokens_per_expert: how many rows each expert gets, ``[num_experts]`` integers.

        Raises:
            OperandError: counts that do not add up to the rows, or an input that does not fit;
                raised on every rank.
            UnsupportedError: under torch.compile and torch.export, whose graphs have no sizes that
                follow from values.
        """
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                f"{self.label}: experts over ranks are not offered under torch.compile and "
                f"torch.export, as the numbers of rows follow from values. Keep the layer out of "
                f"the graph with torch.compiler.disable."
            )
        params = self.link_params()
        communicator = named(self.group_name) if self.group_name else None
        if communicator is not None and not self._is_agreed:
            self._refuse_shards(communicator)
            told = f"{self.num_local_experts} experts on each rank"
            communicator.agree(told, f"the layer {self.label}")
            self._is_agreed = True
        layer = next(self._linears())
        problem: Fp8CoreError | None = None
        try:
            dtype = check_input(self, rows, params[0], layer.in_features)
            counts = _counts(self.label, rows, tokens_per_expert, self.num_experts)
        except Fp8CoreError as error:  # the other ranks wait for this one
            problem, counts, dtype = error, (), torch.float32
        device = params[0].device
        routes = _routes(self.label, communicator, counts, self.num_experts, device, problem)
        bound = bind(self, rows.device, dtype)
        offsets = torch.tensor((0, *routes.splits), device="cpu").cumsum(0)
        rng = new_seed() if bound.needs_rng else None
        call = Call((offsets,), routes.splits, rng, routes=routes)
        value = rows if rows.dtype == dtype else rows.to(dtype)
        y: torch.Tensor = run_links(self, bound, bound.parts[0], value, params, call)
        return y

    def _refuse_shards(self, communicator: Communicator) -> None:
        """Refuse experts that ``fully_shard`` has spread over ranks with other experts.

        Raises:
            UnsupportedError: torch took them for parts of one parameter.
        """
        of_process: Any = communicator
        ranks = {*dist.get_process_group_ranks(of_process.group)}
        linears = {linear: path for path, linear in self._named_linears()}
        for module, name, mesh in sharded_parameters():
            shared = ranks.intersection(mesh.mesh.flatten().tolist())
            if module in linears and len(shared) > 1:
                raise UnsupportedError(
                    f"{self.label}: fully_shard has spread {linears[module]}.{name} over the ranks "
                    f"{sorted(shared)}, each of which has other experts: it takes them for parts "
                    f"of one. Make the model again, and shard its experts over ranks that have the "
                    f"same ones, or leave them out: fully_shard(ignored_params="
                    f"{{*experts.parameters()}})."
                )

    def _layers(self) -> Iterator[LowPrecisionModule]:
        for layer in self._modules.values():  # children() leaves out what appears twice
            assert isinstance(layer, LowPrecisionModule)
            yield layer

    def _linears(self) -> Iterator[GroupedLinear]:
        return (linear for _, linear in self._named_linears())

    def _named_linears(self) -> Iterator[tuple[str, GroupedLinear]]:
        for name, layer in self._modules.items():  # children() leaves out what appears twice
            if isinstance(layer, GroupedLinear):
                yield name, layer

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        saved = self._saved_scales()
        for key in (prefix + name for name in BUFFERS if name != META):
            if key in destination:
                destination[key] = saved.saved(destination[key])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for path, linear in self._named_linears():
            for number in {*range(self.num_experts)} - {*linear.numbers}:
                for kind in KINDS:
                    state_dict.pop(f"{prefix}{path}.{kind}{number}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _saved_state(self, state_dict: Mapping[str, Any], prefix: str) -> Imported:
        imported, saved = super()._saved_state(state_dict, prefix), self._saved_scales()
        state = {
            name: value if name == META else saved.restored(value)
            for name, value in imported.state.items()
        }
        return imported._replace(state=state)

    def _saved_scales(self) -> SavedScales:
        communicator = named(self.group_name) if self.group_name else None
        return SavedScales(len([*self._linears()]), self.num_local_experts, communicator)

    @override
    def delayed_states(self, *arguments: Any, **options: Any) -> LayerStates:
        states = super().delayed_states(*arguments, **options)
        if self.group_name:
            states.take_part(named(self.group_name).rank, self.num_ranks)
        return states

    def _describe(self) -> list[str]:
        return [f"num_experts={self.num_experts}", f"num_ranks={self.num_ranks}"]


class TokenExchange:
    """The exchange of rows alone, in the dtype that they have, for experts of any kind.

    Args:
        tokens_per_expert: how many of this rank's rows each expert gets, ``[num_experts]`` integers
            for the experts of all ranks. The host waits for those of all ranks.
        group: the ranks, which divide the number of experts.

    Attributes:
        m_splits: the rows of each expert of this rank, for ``fp8core.GroupedLinear``.

    Raises:
        OperandError: counts that do not fit; raised on every rank.
    """

    def __init__(self, tokens_per_expert: Counts, group: dist.ProcessGroup) -> None:
        self._communicator = of_group(group)
        owner, device = "TokenExchange", torch.device("cpu")
        if isinstance(tokens_per_expert, torch.Tensor):
            device = tokens_per_expert.device
        problem: Fp8CoreError | None = None
        try:
            counts = _counts(owner, None, tokens_per_expert)
            _check_divides(owner, len(counts), self._communicator.size)
            told = f"{len(counts)} experts"
        except Fp8CoreError as error:  # the other ranks wait for this one
            problem, counts, told = error, (), f"refused, {error}"
        self._communicator.agree(told, "the number of experts")
        if problem is not None:
            raise problem
        self._routes = _routes(owner, self._communicator, counts, len(counts), device, None)
        self.m_splits = list(self._routes.splits)

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's experts, by expert, from ``rows [n, ...]``, which are in
        the order of all experts. Differentiable.

        Raises:
            OperandError: other rows than the counts say, or of another dtype or size than those of
                other ranks; raised on every rank.
        """
        return self._run("dispatch", rows, self._routes.sent)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in the order of ``dispatch``'s input, from rows in that of its output.
        Differentiable."""
        return self._run("combine", rows, self._routes.received)

    def _run(self, kind: str, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        told, problem = f"{rows.dtype} rows of {list(rows.shape[1:])}", None
        if rows.shape[0] != sum(counts):
            problem = OperandError(f"TokenExchange: {rows.shape[0]} rows; expected {sum(counts)}.")
            told = f"refused, {problem}"
        self._communicator.agree_once(told, "the rows of TokenExchange")
        if problem is not None:
            raise problem
        binding = Binding(rows.device, rows.dtype)
        shape = MovingShape(kind, self._communicator.group_name)
        links = bind_chain((shape,), BindContext.of(HIGH_PRECISION, binding, "TokenExchange"))
        flat = rows.flatten(1) if rows.dim() != 2 else rows
        out = chain.run(Chain(links), flat, (), Call(routes=self._routes))
        return out.view(out.shape[0], *rows.shape[1:])


def _add_remote_experts(
    experts: Experts, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Add to ``state`` a tensor in the stead of each parameter of another rank's expert."""
    group = experts._saved_scales().group
    if group is None:
        return
    experts._refuse_shards(group)
    for path, linear in experts._named_linears():
        computed = [f"{kind}{at}" for kind in KINDS for at in linear.numbers]
        computed = [name for name in computed if parametrize.is_parametrized(linear, name)]
        if computed:
            raise UnsupportedError(
                f"{experts.label}: {path}.{computed[0]} is computed by a parametrization, so that "
                f"a state_dict has no names for it and for those of other ranks. Call "
                f"torch.nn.utils.parametrize.remove_parametrizations before."
            )
        for kind in KINDS:
            name = f"{prefix}{path}.{kind}"
            local = [state[f"{name}{at}"] for at in linear.numbers if f"{name}{at}" in state]
            for number, tensor in remote_experts(local, group):
                state[f"{name}{number}"] = tensor


def _check_layers(layers: Sequence[object]) -> int:
    """Return how many experts the layers have."""
    linears = [layer for layer in layers if isinstance(layer, GroupedLinear)]
    sizes = {layer.num_gemms for layer in linears}
    if not linears or len(sizes) != 1:
        raise OperandError(
            f"Experts: grouped linears with {sorted(sizes) or 'no'} experts; expected "
            f"GroupedLinear layers of one number of experts."
        )
    for layer in layers:
        if not isinstance(layer, GroupedLinear | Operation) or (
            isinstance(layer, Operation) and layer.num_extra_inputs
        ):
            raise UnsupportedError(
                f"Experts: {type(layer).__name__} is not offered; expected GroupedLinear and "
                f"operations of fp8core.ops that take one input."
            )
    for linear in linears:
        if linear.wgrad_queue is not None or linear.return_bias or linear.single:
            raise UnsupportedError(
                "Experts: a GroupedLinear with delay_wgrad_compute, return_bias, "
                "single_grouped_weight or single_grouped_bias is not offered; make it without."
            )
    check_chained(
        "Experts: layer", [layer for layer in layers if isinstance(layer, LowPrecisionModule)]
    )
    return linears[0].num_gemms


def _check_divides(owner: str, num_experts: int, size: int) -> None:
    if not num_experts or num_experts % size:
        raise OperandError(
            f"{owner}: {num_experts} experts over {size} ranks, which do not divide them; give "
            f"each rank as many experts."
        )


def _counts(
    owner: str, rows: torch.Tensor | None, tokens: Counts, num_experts: int | None = None
) -> tuple[int, ...]:
    """Return the counts as integers, checked; waits for a device that has them.

    ``num_experts``: how many there have to be; None: any number.
    """
    expected = "integers" if num_experts is None else f"{num_experts} integers"
    if isinstance(tokens, torch.Tensor):
        is_integer = not (tokens.is_floating_point() or tokens.dtype == torch.bool)
        if not is_integer or tokens.dim() != 1 or tokens.is_meta:
            raise OperandError(
                f"{owner}: tokens_per_expert is {tokens.dtype} {list(tokens.shape)} on "
                f"{tokens.device}; expected {expected} in one dimension, on a device that has "
                f"values."
            )
        tokens = tokens.tolist()
    try:
        counts = tuple(index(count) for count in tokens)
    except TypeError:
        raise OperandError(f"{owner}: tokens_per_expert={tokens!r}; expected {expected}.") from None
    is_right = num_experts is None or len(counts) == num_experts
    if rows is not None:
        is_right = is_right and rows.dim() == 2 and sum(counts) == rows.shape[0]
    if not is_right or min(counts, default=0) < 0:
        shape = "" if rows is None else f" for rows {list(rows.shape)}"
        number = "" if num_experts is None else f"{num_experts} "
        raise OperandError(
            f"{owner}: tokens_per_expert={list(counts)}{shape}; expected {number}counts >= "
            f"0, one for each expert of all ranks, that add up to the rows."
        )
    return counts


def _routes(
    owner: str,
    communicator: Communicator | None,
    counts: Sequence[int],
    num_experts: int,
    device: torch.device,
    problem: Fp8CoreError | None,
) -> Routes:
    """Return the routes of all ranks' counts, or raise on every rank if one has a problem."""
    if communicator is None:
        if problem is not None:
            raise problem
        return Routes.of([counts], 0)
    mine = [0, *counts] if problem is None else [1] + [0] * num_experts
    header = torch.tensor([mine], dtype=torch.int64, device=device)
    flags, *columns = zip(*communicator.gather(header, "counts").wait().tolist(), strict=True)
    if problem is not None:
        raise problem
    if any(flags):
        failed = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
        raise OperandError(
            f"{owner}: rank {failed} of group {communicator.group_name!r} has an input that does "
            f"not fit, and says so in its own error; no rank goes on."
        )
    return Routes.of(list(zip(*columns, strict=True)), communicator.rank)
