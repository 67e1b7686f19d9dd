"""The updates of delayed scaling, in which recorded amaxes become scales.

Forward scales are updated when the outermost ``autocast`` exits, backward scales once for each
backward pass, whatever the order of the modules in it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from fp8core.collectives import Communicator
from fp8core.collectives.base import GroupReference
from fp8core.reporting import collect
from fp8core.tensors.delayed_state import DelayedState, GraphState, begin_all
from fp8core.tensors.reduced_amaxes import reduced_after_backward, reduced_after_forward
from fp8core.torch_ops.private import (
    copy_all,
    count_writes,
    current_backward_pass,
    preserved_versions,
    queue_callback,
    without_modes,
)

_Reduce: TypeAlias = Callable[[GroupReference, Sequence[DelayedState]], list[DelayedState]]


class _Batch:
    """States that are updated together in every step, sorted and bound to backends once.

    ``members`` are in the order in which layers recorded, which is the same in every step of a
    program.
    """

    __slots__ = ("_advances", "_by_user", "_ordered", "_reported", "_scales", "members")

    def __init__(self, members: tuple[DelayedState, ...]) -> None:
        self.members = members
        self._ordered = sorted(members, key=_order_of)
        self._scales = [state.scale for state in self._ordered]
        # On other devices a look at the amaxes would wait, and fake ones have no values.
        self._reported = [
            state
            for state in self._ordered
            if state.scale.is_cpu and type(state.scale) is torch.Tensor
        ]
        self._advances: list[Callable[[], None]] = []
        self._by_user: list[DelayedState] = []
        for advance, states in _partition(self._ordered, _advance_of):
            if advance is None:
                self._by_user = states
            else:
                prepare = states[0].prepare or partial(partial, advance)
                self._advances.append(
                    prepare(
                        [state.amax_history for state in states],
                        [state.scale for state in states],
                        [state.targets for state in states],
                        [state.nonfinite for state in states],
                    )
                )

    def update(self) -> None:
        """Reduce the newest amaxes over the ranks of each layer, and turn them into scales."""
        for state in self.members:
            if state.communicator is not None and state.left_to_reduce is not None:
                for communicator, states in _partition(self._ordered, _left_to_reduce_of):
                    if communicator is not None:
                        _reduce_over_layer(states, communicator)
                break
        if self._reported:
            with without_modes():
                _report_nonfinite(self._reported)
        # The user's functions may raise: nothing is written before the last of them has returned.
        writes = [_advanced_by_user(state) for state in self._by_user] if self._by_user else ()
        for advance in (*self._advances, *writes):
            advance()
        # torch does not count a kernel's writes, and stored weights depend on the scale's version.
        count_writes(self._scales)


def update(states: Iterable[DelayedState], groups: Iterable[GroupReference] = ()) -> None:
    """Turn the newest amaxes of the forward ``states`` into scales.

    Amaxes are reduced over the group of each state, and over ``groups``: this rank takes part in
    their reductions even if it has no state there. Included are the layers of the group that this
    rank has skipped.

    Called in each step, so its time counts for a single layer. ``torch.no_grad()`` is not needed,
    as states are buffers, which require no gradient.
    """
    _update(tuple(states), groups, reduced_after_forward)


def _update(
    members: tuple[DelayedState, ...], groups: Iterable[GroupReference], reduce: _Reduce
) -> None:
    groups_of_members = (state.reduced_over for state in members if state.group is not None)
    reducing = dict.fromkeys(
        [*groups, *(group for group in groups_of_members if group is not None)]
    )
    if reducing:
        updated = [state for state in members if state.reduced_over is None]
        for group in reducing:
            updated += reduce(group, members)
        members = tuple(updated)
    if not members:
        return
    batch = members[0].batch
    if batch is None or batch.members != members:
        batch = members[0].batch = _Batch(members)
    batch.update()


_order_of = attrgetter("order")
_left_to_reduce_of = attrgetter("left_to_reduce")
_advance_of = attrgetter("advance")


def restore_of(state: DelayedState) -> Callable[[], None]:
    """Return what restores the amaxes that ``state`` has recorded since its last update, after a
    step that did not finish."""
    amax = state.newest.clone()

    def restore() -> None:
        state.newest.copy_(amax)

    return restore


def discard(states: Iterable[DelayedState]) -> None:
    """Forget the amaxes that ``states`` recorded since their last update."""
    for state in states:
        state.newest.zero_()


def _partition(
    states: Sequence[DelayedState], key: Callable[[DelayedState], Any]
) -> list[tuple[Any, list[DelayedState]]]:
    """Group ``states`` by the results of ``key``, objects that are compared by identity."""
    if len(states) == 1:
        return [(key(states[0]), list(states))]
    parts: dict[Any, list[DelayedState]] = {}
    for state in states:
        parts.setdefault(key(state), []).append(state)
    return list(parts.items())


def _reduce_over_layer(states: Sequence[DelayedState], communicator: Communicator) -> None:
    newest = [state.amax_history[0] for state in states]
    flat = newest[0] if len(newest) == 1 else torch.cat(newest)
    reduced = communicator.max(flat, "delayed amax", in_place=True, at_once=True).wait()
    if reduced is not newest[0]:
        copy_all(newest, reduced.split_with_sizes([part.numel() for part in newest]))


def _report_nonfinite(states: Sequence[DelayedState]) -> None:
    """Log the layers whose amaxes are not finite; on other devices than the CPU a kernel counts
    them."""
    for state in states:
        newest = state.newest.tolist()
        bad = [slot for slot, amax in enumerate(newest) if not math.isfinite(amax)]
        if bad:
            text = f"the amax of slots {bad} is not finite and was not recorded; "
            collect(state.owner, f"{text}their scales are unchanged")


def _advanced_by_user(state: DelayedState) -> Callable[[], None]:
    """Compute the update of a state with the user's functions, and return what writes it.

    An amax is recorded under the same rules as in a backend's update.
    """
    history, plan = state.amax_history, state.plan
    newest = history[0]
    recorded = torch.isfinite(newest) & (newest > 0)
    if callable(plan.amax_algorithm):
        amax = plan.amax_algorithm(history.clone())  # the function may write what it gets
    else:
        amax = history.amax(0) if plan.amax_algorithm == "max" else newest
    if plan.scaling_algorithm is None:
        scale = state.targets / amax
    else:
        scale = plan.scaling_algorithm(amax, state.scale, state.fp8_max, state.recipe)
    good = recorded & torch.isfinite(scale) & (scale > 0)
    scales = torch.where(good, scale, state.scale)
    amaxes = torch.where(recorded, history.roll(-1, 0), history)
    nonfinite = (~torch.isfinite(newest)).sum()

    def write() -> None:
        state.scale.copy_(scales)
        history.copy_(amaxes)
        history[0] = 0
        state.nonfinite += nonfinite

    return write


_backward_lock = threading.Lock()


ScaleOf: TypeAlias = "Callable[[DelayedState], torch.Tensor | None]"
"""Returns what the scales of a state were in a forward, None if that had none of it."""


def present_scales(states: Sequence[DelayedState]) -> ScaleOf:
    """Copy the scales of ``states`` as they are now, by one launch a device; few backward passes
    ask for one of them."""
    by_device: dict[torch.device, list[DelayedState]] = {}
    for state in states:
        by_device.setdefault(state.scale.device, []).append(state)
    copies = {
        device: torch.cat([state.scale for state in here]) for device, here in by_device.items()
    }

    def find(state: DelayedState) -> torch.Tensor | None:
        device, start = state.scale.device, 0
        for each in by_device.get(device, ()):
            if each is state:
                return copies[device].narrow(0, start, each.scale.numel())
            start += each.scale.numel()
        return None

    return find


class _Pass:
    """A backward pass that runs.

    ``states`` are those in which it records, each with the amaxes that another running pass had
    recorded there before, None if there were none. ``scales`` are those of forwards. ``saved``
    are buffers of states that are saved.
    """

    __slots__ = ("__weakref__", "saved", "scales", "states")

    def __init__(self) -> None:
        self.saved: tuple[torch.Tensor, ...] = ()
        self.states: dict[DelayedState, torch.Tensor | None] = {}
        self.scales: list[ScaleOf] = []

    def finish(self) -> None:
        """Update the states; the engine calls this when the pass has succeeded."""
        try:
            with preserved_versions(self.saved):
                _update(tuple(self.states), (), reduced_after_backward)
        except BaseException:
            discard(self.states)
            raise
        finally:
            self.states.clear()


# The running passes by number. The engine's callback holds the only strong reference to a pass, so
# a pass that raises is forgotten together with its graph task. A WeakValueDictionary is slower.
_in_backward: dict[int, weakref.ReferenceType[_Pass]] = {}


def _find_pass(task: int) -> _Pass | None:
    reference = _in_backward.get(task)
    return None if reference is None else reference()


def _join(task: int) -> _Pass:
    """Return the running pass, of number ``task``; the first call in a pass registers it."""
    with _backward_lock:
        running = _find_pass(task)
        if running is None:
            running = _Pass()
            _in_backward[task] = weakref.ref(running, partial(_forget, task, running.states))
            queue_callback(running.finish)
    return running


def _forget(task: int, states: dict[DelayedState, torch.Tensor | None], _: object) -> None:
    """Forget a pass, and its amaxes if it did not finish.

    Of a pass that raises on a GPU it is called by the engine's thread of the device: an instant
    after the caller has the exception, and before that thread takes up a node of another pass.
    """
    _in_backward.pop(task, None)
    if not states:
        return
    discard(states)
    for state, before in states.items():
        if before is not None and _is_recorded_elsewhere(state, states):
            state.newest.copy_(before)
        else:
            state.is_abandoned = True


def _is_recorded_elsewhere(state: DelayedState, states: object) -> bool:
    """Say whether a running pass other than the one with ``states`` records in ``state``."""
    passes = [reference() for reference in list(_in_backward.values())]
    return any(
        backward_pass is not None
        and backward_pass.states is not states
        and state in backward_pass.states
        for backward_pass in passes
    )


def update_after_backward(
    state: DelayedState | GraphState, backward_pass: int | None = None
) -> None:
    """Have ``state`` updated once when the running backward pass ends.

    To be called before the pass records in it. ``backward_pass`` is the number of an outer pass,
    from :func:`join_backward`. A pass that raises updates nothing, and its amaxes are forgotten.
    """
    if isinstance(state, GraphState):  # the pass is that of the graph's run
        begin_all((state,))
    else:
        update_all_after_backward((state,), backward_pass)


def update_all_after_backward(
    states: Iterable[DelayedState], backward_pass: int | None = None
) -> None:
    """Have each of ``states``, none of a graph, updated as :func:`update_after_backward` says."""
    task = current_backward_pass() if backward_pass is None else backward_pass
    running = _find_pass(task) or _join(task)
    recorded = running.states
    for state in states:
        if state in recorded:
            continue
        if state.is_saved:
            running.saved += (state.scale, state.amax_history)
        is_shared = len(_in_backward) > 1 and _is_recorded_elsewhere(state, recorded)
        recorded[state] = state.newest.clone() if is_shared else None
        if state.is_abandoned:
            state.is_abandoned = False
            if not is_shared:
                discard([state])


def offer_scales(scales: ScaleOf) -> None:
    """Give the scales of a forward to the recomputes in the running backward pass.

    After two forwards of the same layer in one pass, no scales are given: torch does not tell which
    forward a recompute repeats.
    """
    task = current_backward_pass()
    running = _find_pass(task) or _join(task)
    with _backward_lock:
        if scales not in running.scales:  # by another output of the same forward
            running.scales.append(scales)


def _offered(state: DelayedState) -> list[torch.Tensor]:
    running = _find_pass(current_backward_pass())
    scales = [find(state) for find in (() if running is None else running.scales)]
    return [scale for scale in scales if scale is not None]


def offered_scale(state: DelayedState) -> torch.Tensor | None:
    """Return the scales that :func:`offer_scales` gave ``state`` in this backward pass, if any."""
    offered = _offered(state)
    return offered[0] if len(offered) == 1 else None


def is_of_two_forwards(state: DelayedState) -> bool:
    """Say whether this backward pass got the scales of two forwards for ``state``."""
    return len(_offered(state)) > 1


def join_backward() -> int:
    """Return the number of the running backward pass; passes within it can update at its end."""
    task = current_backward_pass()
    _join(task)
    return task
