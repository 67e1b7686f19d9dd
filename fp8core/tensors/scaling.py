"""Delayed scaling's state: where it lives, when amaxes become scales, and over which ranks.

Forward scales change when the outermost ``autocast`` exits, backward scales once per backward pass,
whatever the order of the modules in it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed

from fp8core.backend_api import ScaleUpdateDesc
from fp8core.dispatch import table
from fp8core.recipe.plan import DelayedPlan
from fp8core.reporting import log_once
from fp8core.torch_ops.private import copy_all, current_backward_pass, queue_callback

__all__ = [
    "DelayedState",
    "Recorded",
    "discard",
    "is_of_two_forwards",
    "join_backward",
    "offer_scales",
    "offered_scale",
    "update",
    "update_after_backward",
]


class DelayedState:
    """Scale and amax history of one direction of one layer; a view of the layer's buffers.

    ``scale [slots]`` and ``amax_history [length, slots]`` are float32 and updated in place; row 0
    of the history holds the amax since the last update, rows 1 to length - 1 older ones, the
    oldest first. ``fp8_max [slots]`` is each slot's format maximum, ``nonfinite [1]`` int64 counts
    the amaxes that were not recorded because they were inf. States are reduced in ``order``, which
    has to be the same on all ranks.
    """

    def __init__(
        self,
        owner: str,
        plan: DelayedPlan,
        recipe: Any,
        *,
        scale: torch.Tensor,
        amax_history: torch.Tensor,
        maxima: Sequence[float],
        order: int,
    ) -> None:
        self.owner = owner
        self.plan = plan
        self.recipe = recipe
        self.scale = scale
        self.amax_history = amax_history
        # States with the same buffers have the same key, as long as one of them is there.
        self.key = id(amax_history)
        self.fp8_max = torch.tensor(maxima, dtype=torch.float32, device=scale.device)
        self.targets = self.fp8_max * 2.0**-plan.margin
        self.nonfinite = torch.zeros(1, dtype=torch.int64, device=scale.device)
        # The backend's update, bound like every other operation; None for the user's own functions.
        self.advance: Callable[..., None] | None = None
        self.prepare: Callable[..., Callable[[], None]] | None = None
        if isinstance(plan.amax_algorithm, str) and plan.scaling_algorithm is None:
            desc = ScaleUpdateDesc(plan.amax_algorithm)
            resolved = table.resolve(desc, scale.device)
            self.advance, self.prepare = resolved.run, resolved.offers.prepare
        self.group: torch.distributed.ProcessGroup | None = None
        self.order = order
        # A backward pass that recorded here has failed. Its amaxes are discarded at once, by the
        # engine's thread, whose stream need not be the one that a kernel still records on; so they
        # are discarded again, in order, where the next pass begins to record.
        self.is_abandoned = False
        # The states that were last updated together, if this one was the first of them.
        self.batch: _Batch | None = None


class _Batch:
    """States that are updated together, step after step: sorted and handed to backends once.

    ``members`` are in the order of the touch, which is the same in every step of one program.
    """

    __slots__ = ("_advances", "_by_user", "_ordered", "_reports", "_scales", "members")

    def __init__(self, members: tuple[DelayedState, ...]) -> None:
        self.members = members
        self._ordered = sorted(members, key=_order_of)
        self._scales = [state.scale for state in self._ordered]
        # To ask a device is to wait for it.
        self._reports = self._ordered[0].scale.device.type == "cpu"
        self._advances: list[Callable[[], None]] = []
        self._by_user: list[DelayedState] = []
        for advance, own in _partition(self._ordered, _advance_of):
            if advance is None:
                self._by_user = own
            else:
                prepare = own[0].prepare or partial(partial, advance)
                self._advances.append(
                    prepare(
                        [state.amax_history for state in own],
                        [state.scale for state in own],
                        [state.targets for state in own],
                        [state.nonfinite for state in own],
                    )
                )

    def update(self) -> None:
        """Reduce the newest amaxes over each state's group, and turn them into scales."""
        for state in self.members:
            if state.group is not None:
                for group, own in _partition(self._ordered, _group_of):
                    if group is not None:
                        _reduce(own, group)
                break
        if self._reports:
            _report_nonfinite(self._ordered)
        # The user's functions may raise: nothing is written before the last of them has returned.
        computed = [_advanced_by_user(state) for state in self._by_user]
        for advance in self._advances:
            advance()
        for state, advanced in zip(self._by_user, computed, strict=True):
            advanced.write_to(state)
        # A kernel's writes are counted nowhere, and what was cast by a scale asks for them.
        torch.autograd.graph.increment_version(self._scales)


def update(states: Iterable[DelayedState]) -> None:
    """Turn the newest amaxes of ``states`` into scales; reduce them over each state's group.

    Called twice a step, so that a lone layer feels it. States are buffers, which need no gradient:
    nothing here has to be kept from autograd.
    """
    members = tuple(states)
    if not members:
        return
    batch = members[0].batch
    if batch is None or batch.members != members:
        batch = members[0].batch = _Batch(members)
    batch.update()


_order_of = attrgetter("order")
_group_of = attrgetter("group")
_advance_of = attrgetter("advance")


class Recorded(NamedTuple):
    """The amaxes that a state held at some point of a step, since the last update."""

    amax: torch.Tensor
    state: DelayedState

    @classmethod
    def of(cls, state: DelayedState) -> Recorded:
        """Return what it holds now."""
        return cls(state.amax_history[0].clone(), state)

    def put_back(self) -> None:
        """Have the state hold that again: what recorded since did not finish."""
        with torch.no_grad():
            self.state.amax_history[0].copy_(self.amax)


def discard(states: Iterable[DelayedState]) -> None:
    """Forget the amaxes since the last update."""
    with torch.no_grad():
        for state in states:
            state.amax_history[0].zero_()


def _partition(
    states: Sequence[DelayedState], key: Callable[[DelayedState], Any]
) -> list[tuple[Any, list[DelayedState]]]:
    """Group ``states`` by ``key``, which is equal where it is the same object."""
    if len(states) == 1:
        return [(key(states[0]), list(states))]
    parts: dict[Any, list[DelayedState]] = {}
    for state in states:
        parts.setdefault(key(state), []).append(state)
    return list(parts.items())


def _reduce(states: Sequence[DelayedState], group: torch.distributed.ProcessGroup) -> None:
    reducing = [state for state in states if state.plan.reduce_amax]
    if not reducing:
        return
    newest = [state.amax_history[0] for state in reducing]
    flat = torch.cat(newest)
    torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)
    copy_all(newest, list(torch.split(flat, [part.numel() for part in newest])))


def _report_nonfinite(states: Sequence[DelayedState]) -> None:
    """Name the layers whose amaxes are not finite; on a device they are counted alone."""
    for state in states:
        newest = state.amax_history[0].tolist()
        bad = [slot for slot, amax in enumerate(newest) if not math.isfinite(amax)]
        if bad:
            log_once(
                f"{state.owner}: the amax of slots {bad} is not finite and was not recorded; "
                f"their scales are unchanged"
            )


class _Advanced(NamedTuple):
    """What a state's tensors will hold after an update."""

    scale: torch.Tensor
    amax_history: torch.Tensor
    nonfinite: torch.Tensor

    def write_to(self, state: DelayedState) -> None:
        state.scale.copy_(self.scale)
        state.amax_history.copy_(self.amax_history)
        state.amax_history[0] = 0
        state.nonfinite += self.nonfinite


def _advanced_by_user(state: DelayedState) -> _Advanced:
    """Advance one state with the user's own functions, under the same rules of what is recorded;
    writes nothing."""
    history, plan = state.amax_history, state.plan
    newest = history[0]
    recorded = torch.isfinite(newest) & (newest > 0)
    window = torch.cat((history[1:], newest[None]))
    if callable(plan.amax_algorithm):
        amax = plan.amax_algorithm(window)
    else:
        amax = window.amax(0) if plan.amax_algorithm == "max" else newest
    if plan.scaling_algorithm is None:
        scale = state.targets / amax
    else:
        scale = plan.scaling_algorithm(amax, state.scale, state.fp8_max, state.recipe)
    good = recorded & torch.isfinite(scale) & (scale > 0)
    return _Advanced(
        torch.where(good, scale, state.scale),
        torch.where(recorded, window, history),
        (~torch.isfinite(newest)).sum(),
    )


_backward_lock = threading.Lock()


class _Pass:
    """The states that one backward pass records in, each with the amaxes that it held before, None
    where no other pass had recorded there; and the scales of its forward."""

    __slots__ = ("__weakref__", "scales", "states")

    def __init__(self) -> None:
        self.states: dict[DelayedState, torch.Tensor | None] = {}
        self.scales: dict[DelayedState, torch.Tensor | None] = {}

    def finish(self) -> None:
        """Update what was recorded in; the engine calls it when the pass has succeeded."""
        try:
            update(self.states)
        except BaseException:
            discard(self.states)
            raise
        finally:
            self.states.clear()


# The engine's callback owns the pass, so one that raises is forgotten along with its graph task. A
# WeakValueDictionary would do the same in three times the time.
_in_backward: dict[int, weakref.ReferenceType[_Pass]] = {}


def _find_pass(task: int) -> _Pass | None:
    found = _in_backward.get(task)
    return None if found is None else found()


def _join(task: int) -> _Pass:
    """Return the pass of ``task``, the one that is running; the first to join begins it."""
    with _backward_lock:
        running = _find_pass(task)
        if running is None:
            running = _Pass()
            _in_backward[task] = weakref.ref(running, partial(_forget, task, running.states))
            queue_callback(running.finish)
    return running


def _forget(task: int, states: dict[DelayedState, torch.Tensor | None], _: object) -> None:
    """Forget a pass, and what it recorded if it did not finish."""
    _in_backward.pop(task, None)
    if not states:
        return
    discard(states)
    with torch.no_grad():
        for state, before in states.items():
            if before is not None and _is_recorded_elsewhere(state, states):
                state.amax_history[0].copy_(before)
            else:
                state.is_abandoned = True


def _is_recorded_elsewhere(state: DelayedState, states: object) -> bool:
    """Say whether a running pass records in ``state``, besides the one whose own are ``states``."""
    running = [found() for found in list(_in_backward.values())]
    return any(
        one is not None and one.states is not states and state in one.states for one in running
    )


def update_after_backward(state: DelayedState, backward_pass: int | None = None) -> None:
    """Update ``state`` when the backward pass that is running ends; once, however often called.

    To be called before something is recorded. ``backward_pass`` names an outer one that
    :func:`join_backward` returned. A pass that raises updates nothing, and what it recorded is
    forgotten.
    """
    task = current_backward_pass() if backward_pass is None else backward_pass
    running = _find_pass(task) or _join(task)
    states = running.states
    if state not in states:
        is_shared = len(_in_backward) > 1 and _is_recorded_elsewhere(state, states)
        states[state] = state.amax_history[0].clone() if is_shared else None
        if state.is_abandoned:
            state.is_abandoned = False
            if not is_shared:
                discard([state])


def offer_scales(scales: Mapping[DelayedState, torch.Tensor]) -> None:
    """Have recomputes in the backward pass that is running find the scales of their forward.

    Of two forwards nobody knows which one a recompute repeats: then there is none to be found.
    """
    task = current_backward_pass()
    running = _find_pass(task) or _join(task)
    with _backward_lock:
        known = running.scales
        for state, scale in scales.items():
            known[state] = scale if known.get(state, scale) is scale else None


def offered_scale(state: DelayedState) -> torch.Tensor | None:
    """Return what :func:`offer_scales` offered for ``state`` in this backward pass, if anything."""
    running = _find_pass(current_backward_pass())
    return None if running is None else running.scales.get(state)


def is_of_two_forwards(state: DelayedState) -> bool:
    """Say whether this backward pass was offered the scales of two forwards for ``state``."""
    running = _find_pass(current_backward_pass())
    return running is not None and state in running.scales and running.scales[state] is None


def join_backward() -> int:
    """Return the backward pass that is running, for passes within it to update at its end."""
    task = current_backward_pass()
    _join(task)
    return task
