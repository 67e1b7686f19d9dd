"""The delayed amaxes that the ranks of a process group reduce together, matched layer by layer.

Ranks skip layers: dropped ones, experts without tokens. So what is reduced is not what one rank has
recorded, but a list of layers that all ranks have agreed on::

    [is_new, is_used, is_idle, is_waiting, amaxes of layer 0, ...]    one all-reduce (MAX)

A layer that a rank skipped adds zeros there, and takes the maximum of the others. Of a layer whose
ranks have other parts, as experts, there are the amaxes of all parts, and a rank adds those of its
own. ``is_new`` says
that a rank has recorded in a layer that is not in the list: then all ranks exchange what they have
used, and the list becomes the union. ``is_used`` says that a rank has recorded in a layer, and
``is_idle`` that one has in none: no backward pass of that one could take part in a collective, so
from then on backward amaxes wait for the next reduction of forward ones. So do those of a backward
pass within an autocast, which ``is_waiting`` tells the other ranks: whether one of them is idle
shows at its end.

On the CPU the flags are read at once. On other devices the host would wait for the device, so
they are read at the next reduction, and the amaxes of a layer that is not in the list wait as long.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from fp8core.collectives import Communicator, of_group
from fp8core.collectives.base import GroupReference, existing
from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.delayed_state import DelayedState, Family, Order, family_of, num_created, shown
from fp8core.torch_ops.private import copy_all, is_capturing

_USE: Final = "autocast(amax_reduction_group=...)"
_NUM_FLAGS: Final = 4


def note_autocast(reference: GroupReference) -> None:
    """Note that an autocast has begun at whose end the ranks of the group reduce amaxes."""
    _of_group(reference).is_in_autocast = True


def reduced_after_forward(
    reference: GroupReference, recorded: Sequence[DelayedState]
) -> list[DelayedState]:
    """Reduce forward amaxes, and backward amaxes that wait; return the states that hold the
    maximum over the ranks now.

    Every rank of the group has to call it, also one that recorded nothing. ``recorded`` are the
    forward states in which this rank recorded, of all groups.

    Raises:
        OperandError: the group was destroyed, or the ranks' layers differ; then on every rank.
        UnsupportedError: a graph captures a layer that the ranks have not compared.
    """
    ways = _of_group(reference)
    ways.is_in_autocast = False
    reduced = ways.forward.reduce(recorded, is_waiting=bool(ways.waiting))
    if ways.forward.defers_backward and not ways.forward.is_captured(recorded):
        waiting, ways.waiting = ways.waiting, []
        reduced += ways.backward.reduce(_existing(waiting))
    return reduced


def reduced_after_backward(
    reference: GroupReference, recorded: Sequence[DelayedState]
) -> list[DelayedState]:
    """As :func:`reduced_after_forward`, of a backward pass; no states where its amaxes wait."""
    ways = _of_group(reference)
    if not ways.forward.is_captured(recorded):
        ways.forward.read_flags()
        forward = ways.forward
        if forward.defers_backward or (ways.is_in_autocast and forward.communicator.size > 1):
            ways.waiting += map(weakref.ref, recorded)
            return []
    return ways.backward.reduce(recorded)


class _Layer(NamedTuple):
    """A layer that a rank has used, as it describes it, or that the ranks have agreed on.

    ``order`` is its number, of one agreed on that of this rank's layer; ``slots`` how many amaxes
    the group reduces.
    """

    order: Order
    owner: str
    slots: int
    device_type: str

    @property
    def shown(self) -> str:
        """The layer in words."""
        return f"{self.owner} with {self.slots} amaxes, {shown(self.order)}"

    @classmethod
    def of(cls, state: DelayedState) -> _Layer:
        """Return what the others have to know."""
        slots = state.scale.numel() * state.part[1]
        return cls(state.order, state.owner, slots, state.scale.device.type)


class _Message(NamedTuple):
    """The message of a rank in an exchange.

    Attributes:
        num_created: how many layers of each family its process has created.
        exist: for each layer agreed on so far, whether the rank still has used it.
        layers: those that it has used since.
        is_waiting: whether backward amaxes of the rank wait.
    """

    num_created: Counter[Family]
    exist: list[bool]
    layers: list[_Layer]
    is_waiting: bool


class _Reduction:
    """The states of one way, forward or backward, that the ranks of a group reduce."""

    def __init__(self, reference: GroupReference) -> None:
        self._reference = reference
        self._communicator: Communicator | None = None
        # The latest state in which each layer of this rank has recorded, by its order.
        self._used: dict[Order, weakref.ref[DelayedState]] = {}
        self._agreed: list[_Layer] | None = None
        self._device_type = "cpu"
        self._is_announced = False
        # The flags of the last reduction on a device, and what tells that they have arrived; the
        # memory of both is that of each reduction.
        self._flags: tuple[torch.Tensor, torch.Event] | None = None
        self._arriving: tuple[torch.Tensor, torch.Event] | None = None
        # Flags that ranks have sent, on the device.
        self._sent_flags: dict[tuple[bool, ...], torch.Tensor] = {}
        # Whether backward amaxes wait for the next reduction of forward ones, on all ranks.
        self.defers_backward = False

    @property
    def communicator(self) -> Communicator:
        """The group's."""
        group = existing(self._reference, _USE)
        if self._communicator is None:
            self._communicator = of_group(group)
        return self._communicator

    def reduce(
        self, recorded: Sequence[DelayedState], *, is_waiting: bool = False
    ) -> list[DelayedState]:
        """Reduce the newest amaxes; return the states that hold the maximum over the ranks now.

        ``recorded`` may have states of other groups, which have no part in it. ``is_waiting`` says
        that backward amaxes of this rank wait.
        """
        communicator = self.communicator
        members = [state for state in recorded if state.reduced_over is self._reference]
        if communicator.size == 1:
            return members
        for state in members:
            self._used[state.order] = weakref.ref(state)
        if self.is_captured(recorded):
            return self._reduce_captured(members, communicator)
        self.read_flags()
        if self._agreed is None or self._is_announced:
            self._agreed = self._agree(is_waiting=is_waiting)
        foreign = {entry.order for entry in recorded if entry.reduced_over is not self._reference}
        flags = bool(members), not members, is_waiting
        reduced = self._reduce_agreed(self._agreed, foreign, flags, communicator)
        if self._is_announced:  # known at once
            self._agreed = self._agree(is_waiting=is_waiting)
            reduced = self._reduce_agreed(self._agreed, foreign, flags, communicator)
        # A layer that is spread over ranks, and that they skipped, may exist on one of them alone,
        # as garbage: it keeps the amax for its next update.
        used = set(members)
        return [state for state in reduced if state.communicator is None or state in used]

    def is_captured(self, recorded: Sequence[DelayedState]) -> bool:
        """Say whether a CUDA graph captures the reduction of ``recorded``."""
        is_cuda = self._device_type == "cuda" or any(state.scale.is_cuda for state in recorded)
        return is_cuda and is_capturing()

    def read_flags(self) -> None:
        """Read the flags of the last reduction, unless they were read at once."""
        if self._flags is not None:
            flags, arrived = self._flags
            self._flags = None
            arrived.synchronize()
            self._note(flags)

    def _note(self, flags: torch.Tensor) -> None:
        is_new, is_used, is_idle, is_waiting = flags.tolist()
        self._is_announced = is_new > 0
        self.defers_backward |= is_waiting > 0 or (is_used > 0 and is_idle > 0)

    def _reduce_agreed(
        self,
        agreed: list[_Layer],
        foreign: set[Order],
        rank_flags: tuple[bool, ...],
        communicator: Communicator,
    ) -> list[DelayedState]:
        """Reduce the layers ``agreed``, of which those of the orders ``foreign`` add nothing;
        ``rank_flags`` are those of this rank, besides the first."""
        states = self._states()
        is_new = not {entry.order for entry in agreed}.issuperset(states)
        members = [None if entry.order in foreign else states.get(entry.order) for entry in agreed]
        flags = self._flags_tensor((is_new, *rank_flags))
        sent = [
            flags.new_zeros(slots) if state is None else state.among_all()
            for state, (_, _, slots, _) in zip(members, agreed, strict=True)
        ]
        flags, *reduced = _largest([flags, *sent], communicator)
        _write(members, reduced)
        self._keep(flags)
        return [state for state in members if state is not None]

    def _flags_tensor(self, flags: tuple[bool, ...]) -> torch.Tensor:
        """Return ``flags`` on the device, where a copy from the host would wait for it."""
        values = self._sent_flags.get(flags)
        if values is None:
            device = torch.device(self._device_type)
            if device.type != "cpu":
                device = torch.device(device.type, torch.accelerator.current_device_index())
            values = torch.zeros(_NUM_FLAGS, dtype=torch.float32, device=device)
            for at, flag in enumerate(flags):
                if flag:
                    values[at].fill_(1.0)
            self._sent_flags[flags] = values
        return values

    def _keep(self, flags: torch.Tensor) -> None:
        """Read ``flags``, or start to copy them to the host."""
        if flags.is_cpu:
            self._note(flags)
            return
        if self._arriving is None:
            copied = torch.empty(_NUM_FLAGS, dtype=torch.float32, device="cpu", pin_memory=True)
            self._arriving = copied, torch.Event(flags.device)
        copied, arrived = self._flags = self._arriving
        copied.copy_(flags, non_blocking=True)
        arrived.record()

    def _reduce_captured(
        self, members: list[DelayedState], communicator: Communicator
    ) -> list[DelayedState]:
        """Reduce in a graph, which runs the same layers in each replay."""
        agreed = {entry.order for entry in self._agreed or ()}
        for state in members:
            if state.order not in agreed:
                raise UnsupportedError(
                    f"{_USE}: a CUDA graph captures {state.owner} before the ranks have compared "
                    f"their layers. Run it once before the capture."
                )
        if members:
            _write(members, _largest([state.among_all() for state in members], communicator))
        return members

    def _agree(self, *, is_waiting: bool) -> list[_Layer]:
        """Exchange the layers that the ranks have used since they agreed last, and return all.

        Layers that no rank has any more are left out. ``is_waiting`` is as in :meth:`reduce`.
        """
        states, agreed = self._states(), self._agreed or []
        group = existing(self._reference, _USE)
        agreed_orders = {entry.order for entry in agreed}
        described = [
            _Layer.of(states[order]) for order in sorted(states) if order not in agreed_orders
        ]
        exist = [entry.order in states for entry in agreed]
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(
            said, _Message(num_created(), exist, described, is_waiting), group=group
        )
        self.defers_backward |= any(news.is_waiting for news in said)
        self._is_announced = False
        try:
            matched = _matched(said, dist.get_rank(group))
        except OperandError:
            for layer in described:  # which may never run again
                del self._used[layer.order]
            raise
        if matched:
            self._device_type = matched[0].device_type
        elif self._agreed is None:
            self._device_type = _device_type_of(group)
        exists = [any(of_rank) for of_rank in zip(*(news.exist for news in said), strict=True)]
        return [*itertools.compress(agreed, exists), *matched]

    def _states(self) -> dict[Order, DelayedState]:
        """Return the states that exist, by the order of their layers."""
        self._used = {
            order: reference for order, reference in self._used.items() if reference() is not None
        }
        return {state.order: state for state in _existing([*self._used.values()])}


def _largest(parts: list[torch.Tensor], communicator: Communicator) -> Sequence[torch.Tensor]:
    """Return the maximum of ``parts`` over the ranks; they travel as one tensor."""
    flat = torch.cat(parts)
    reduced = communicator.max(flat, "delayed amax", in_place=True, at_once=True).wait()
    return reduced.split_with_sizes([part.numel() for part in parts])


def _write(states: Sequence[DelayedState | None], reduced: Sequence[torch.Tensor]) -> None:
    """Write to each state its part of the amaxes that were reduced for it, if any were."""
    pairs = [
        (state.amax_history[0], state.part_of(amaxes))
        for state, amaxes in zip(states, reduced, strict=True)
        if state is not None and amaxes.numel()
    ]
    if pairs:
        targets, values = zip(*pairs, strict=True)
        copy_all([*targets], [*values])


def _device_type_of(group: dist.ProcessGroup) -> str:
    """Return a type of device whose tensors the group reduces."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend(group) == "gloo":
        return "cpu"
    return accelerator.type


def _matched(said: Sequence[_Message], rank: int) -> list[_Layer]:
    """Return the new layers that any rank has used, by the orders that they have in ``rank``.

    Processes that have created other numbers of layers of a family have to use the same ones, as
    the order does not tell then which of them a rank skipped.

    Raises:
        OperandError: the layers differ.
    """
    uncertain = _uncertain(said)
    if uncertain:
        for peer, news in enumerate(said):
            _check_same(said[0].layers, news.layers, peer, uncertain)
        return said[rank].layers
    union: dict[Order, tuple[int, _Layer]] = {}
    for peer, news in enumerate(said):
        for layer in news.layers:
            first, seen = union.setdefault(layer.order, (peer, layer))
            if layer[1:3] != seen[1:3]:
                raise _difference(first, seen, peer, layer)
    return [layer for _, (_, layer) in sorted(union.items())]


def _uncertain(said: Sequence[_Message]) -> set[Family]:
    """Return the families, of those that any rank has used, whose numbers differ between ranks."""
    families = {(), *(family_of(layer.order) for news in said for layer in news.layers)}
    differing = {
        family for family in families if len({news.num_created[family] for news in said}) > 1
    }
    return families if () in differing else differing  # a copy's number starts with its original's


def _check_same(
    first: Sequence[_Layer], layers: Sequence[_Layer], rank: int, uncertain: set[Family]
) -> None:
    """Raise OperandError at the first layer in which rank 0 and ``rank`` differ."""
    places = _places(first, uncertain), _places(layers, uncertain)
    for mine, another, place, peer_place in itertools.zip_longest(first, layers, *places):
        if mine is None or another is None or mine[1:3] != another[1:3] or place != peer_place:
            raise _difference(0, mine, rank, another)


def _places(layers: Sequence[_Layer], uncertain: set[Family]) -> list[list[int]]:
    """Return the numbers of ``layers``; of uncertain families, how far after the first of them.

    Where only some ranks have copied a layer, they may use the copy in its stead.
    """
    firsts: dict[Family, int] = {}
    places = []
    for order, *_ in layers:
        place = []
        for at, number in enumerate(order):
            family = order[:at]
            start = firsts.setdefault(family, number) if family in uncertain else 0
            place.append(number - start)
        places.append([*place, 0] if order in uncertain else place)
    return places


def _difference(
    first: int, first_layer: _Layer | None, second: int, second_layer: _Layer | None
) -> OperandError:
    texts = [
        f"rank {rank} of the group has {'no other layer' if layer is None else layer.shown}"
        for rank, layer in ((first, first_layer), (second, second_layer))
    ]
    return OperandError(
        f"{_USE} reduces the amaxes of each layer over the ranks, whose layers differ: "
        f"{', '.join(texts)}. Every rank has to create the same layers in the same order; it may "
        f"skip some of them in a step. Where a rank has created layers of its own besides, all "
        f"ranks have to run the same layers in the first step: run each of them once, or create "
        f"the layers of that rank alone afterwards."
    )


class _Ways:
    """Both ways of a group; ``waiting`` are backward states whose amaxes wait.

    ``is_in_autocast``: an autocast has begun that will end in a reduction of forward amaxes.
    """

    def __init__(self, reference: GroupReference) -> None:
        self.forward = _Reduction(reference)
        self.backward = _Reduction(reference)
        self.waiting: list[weakref.ref[DelayedState]] = []
        self.is_in_autocast = False


_groups: dict[GroupReference, _Ways] = {}


def _of_group(reference: GroupReference) -> _Ways:
    ways = _groups.get(reference)
    if ways is None:
        for gone in [
            reference_of_group for reference_of_group in _groups if reference_of_group() is None
        ]:
            del _groups[gone]
        ways = _groups[reference] = _Ways(reference)
    return ways


def _existing(references: Sequence[weakref.ref[DelayedState]]) -> list[DelayedState]:
    states = (reference() for reference in references)
    return [state for state in states if state is not None]
