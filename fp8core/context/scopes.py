"""The scopes in which amaxes are recorded: open autocasts of a thread, and steps of its models.

The amaxes of a scope become delayed scales when the outermost scope closes, and are forgotten if
it fails.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fp8core.collectives.base import GroupReference
from fp8core.reporting import collect, collected, log_collected, log_once
from fp8core.tensors import scaling
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.scaling import restore_of
from fp8core.torch_ops.definition import define


class _Scope(NamedTuple):
    """An open autocast (``owner`` None), or a step of ``owner``, a model.

    Attributes:
        ends_step: whether closing it turns amaxes into scales; a scope inside an autocast hands
            them on to the scope around it instead.
        is_running: whether the step still runs; False after an interrupt.
        touched: the states that recorded in it, by their buffer, which the states of two backends
            or margins share.
        before: what restores the earlier content of buffers in which a scope around had recorded.
        groups: for each forward state whose process group the scope changed, its backward state and
            the group of before.
        reducing: the groups over which autocasts inside it reduce. All ranks enter them, whatever
            layers they run there, and so all take part.
        results: of a scope that begins in a graph, those of its layers there; None of all others.
    """

    owner: object
    ends_step: bool
    is_running: Callable[[], bool]
    touched: dict[int, DelayedState]
    before: dict[int, Callable[[], None]]
    groups: dict[DelayedState, tuple[DelayedState, GroupReference | None]]
    reducing: dict[GroupReference, None]
    results: list[torch.Tensor] | None = None


# Without the Python function of a NamedTuple: each autocast creates one.
_new_scope: Callable[..., _Scope] = tuple.__new__


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.scopes: list[_Scope] = []
        self.num_autocasts = 0
        # The states that recorded in a scope which began in the graph that runs: Python opens such
        # a scope when the graph has run, if it has not ended there.
        self.in_graph: dict[int, DelayedState] = {}
        # The id of the exception that was being handled when a state last recorded in a graph.
        self.handled = id(None)


_thread = _ThreadState()


def _always() -> bool:
    return True


def open_scope(is_traced: bool = False) -> None:
    """Open the scope of an autocast; ``is_traced``: in a graph that is being captured."""
    thread = _thread
    ends_step = not thread.num_autocasts
    results: list[torch.Tensor] | None = [] if is_traced else None
    thread.scopes.append(_new_scope(_Scope, (None, ends_step, _always, {}, {}, {}, {}, results)))
    thread.num_autocasts += 1


def close_scope(
    *,
    failed: bool,
    depth: int = 0,
    group: GroupReference | None = None,
    is_traced: bool = False,
) -> None:
    """Close the scope of the autocast that has ``depth`` others in it; 0: the innermost.

    ``group`` is the one over which the autocast reduces amaxes, whatever ran in it. Steps in it
    that an interrupt left open are closed as failed.
    """
    thread = _thread
    thread.num_autocasts -= 1
    scopes = thread.scopes
    if depth:
        _close_around(depth, failed=failed, group=group)
        return
    scope = scopes.pop()
    while scope.owner is not None:
        _close(scope, failed=True)
        scope = scopes.pop()
    if group is not None:
        scope.reducing[group] = None
    if not (is_traced and _end_in_graph(scope, failed=failed)):
        _close(scope, failed=failed)
    if collected and not scopes:
        log_collected()


def warn_of_layer(layer: str, text: str) -> None:
    """Log ``text`` once in a line for all layers that say it in this autocast or step; outside of
    any, for the first layer alone."""
    if _thread.scopes:
        collect(layer, text)
    else:
        log_once(f"{layer}: {text}; other layers do not say so again", about=text)


def begin_step_in_graph(owner: object) -> None:
    """Open a step of ``owner`` that torch.compile traces, unless a scope is open."""
    if not _thread.scopes:
        _thread.scopes.append(_scope_in_graph(owner))


def _scope_in_graph(owner: object) -> _Scope:
    return _new_scope(_Scope, (owner, True, _always, {}, {}, {}, {}, []))


def end_step_in_graph(owner: object) -> None:
    """Close the step that :func:`begin_step_in_graph` opened for ``owner``, if it did."""
    scopes = _thread.scopes
    if scopes and scopes[-1].owner is owner:
        _end_in_graph(scopes.pop(), failed=False)


def phase_in_graph() -> str:
    """Return where in its step is what the graph that is being captured computes next: "begin" or
    "step" where all of the open scopes are in the graph, and a layer has recorded in none or in
    some of them; else "forward"."""
    scopes = _thread.scopes
    if len(scopes) == 0 or scopes[0].results is None:  # torch 2.11 traces no bool(list)
        return "forward"
    return "begin" if len(scopes[0].results) == 0 else "step"


def computed_in_graph(result: torch.Tensor) -> None:
    """Say that a layer whose states record has computed ``result`` in the scopes of a graph."""
    results = _thread.scopes[0].results
    if results is not None:
        results.append(result.detach())


def _end_in_graph(scope: _Scope, *, failed: bool) -> bool:
    """Have the graph end ``scope``, which has left the thread's list, if it is the outermost and
    began in a graph; say whether it is."""
    if _thread.scopes or scope.results is None:
        return False
    if scope.results or scope.touched:
        _end_step(scope.results, failed)
    return True


@define(
    "(Tensor[] results, bool failed) -> ()",
    lambda results, failed: None,
    tags=(torch.Tag.cudagraph_unsafe,),
    is_ordered=True,
)
def _end_step(results: list[torch.Tensor], failed: bool) -> None:
    """Turn the amaxes that graphs have recorded in their own step into scales, or forget those of
    a step that ``failed``; ``results`` are what they have computed before."""
    # torch calls the hook of a model, a graph of its own, from its except clause if forward raised.
    failed |= id(sys.exc_info()[1]) != _thread.handled
    # A scope that began in another graph leaves the thread's list when this graph has run.
    scope = _thread.scopes[-1] if _thread.scopes else _scope_in_graph(None)
    if scope.results is not None:
        _close(scope, failed=failed)


def _close_around(depth: int, *, failed: bool, group: GroupReference | None) -> None:
    """Close the scope of an autocast around ``depth`` others, which stay open.

    The next autocast inside ends the step in its stead, with the amaxes of both.
    """
    scopes = _thread.scopes
    of_autocasts = [at for at, scope in enumerate(scopes) if scope.owner is None]
    at, following = of_autocasts[-1 - depth], of_autocasts[-depth]
    scope = scopes[at]
    inside = scopes[at + 1 : following + 1]
    scopes[at : following + 1] = [
        inner._replace(ends_step=inner.ends_step or scope.ends_step) for inner in inside
    ]
    inside[-1].reducing.update(scope.reducing)
    if group is not None:
        inside[-1].reducing[group] = None
    touched_inside = {key for inner in inside for key in inner.touched}
    if failed:
        alone = [state for key, state in scope.touched.items() if key not in touched_inside]
        scaling.discard(alone)
        for key in scope.touched:
            for inner in inside:
                inner.before.pop(key, None)
    else:
        inside[-1].touched.update({**scope.touched, **inside[-1].touched})
    for key, restore in scope.before.items():
        if failed and key not in touched_inside:
            restore()
        else:
            inside[-1].before[key] = restore
    for forward, (backward, group) in scope.groups.items():
        if failed and forward.key not in touched_inside:
            forward.group = backward.group = group
        else:
            inside[-1].groups[forward] = backward, group


def touch(
    forward: DelayedState,
    backward: DelayedState,
    group: GroupReference | None,
    phase: str = "forward",
) -> None:
    """Enter ``forward`` in the innermost scope, and have both states reduced over ``group``.

    Its scales are updated when the thread's outermost autocast, or its model's step, ends; or
    that of the graph which runs, where ``phase`` of :func:`phase_in_graph` says so. To be called
    before ``forward`` records.
    """
    touch_all(((forward, backward),), group, phase)


def touch_all(
    states: Sequence[tuple[DelayedState, DelayedState]],
    group: GroupReference | None,
    phase: str = "forward",
) -> None:
    """Enter the states of several layers, see :func:`touch`."""
    scopes, is_in_graph = _thread.scopes, phase != "forward"
    if is_in_graph:
        _thread.handled = id(sys.exc_info()[1])
    if _thread.in_graph and (phase == "begin" or (scopes and scopes[0].results is None)):
        _forget_graph()
    touched = scopes[-1].touched if scopes else None
    for forward, backward in states:
        if touched is None:
            if is_in_graph:
                _thread.in_graph[forward.key] = forward
        elif forward.key not in touched:
            if len(scopes) > 1:
                _keep_recorded(forward)
            touched[forward.key] = forward
        if forward.group is not group:
            if scopes:
                scopes[-1].groups.setdefault(forward, (backward, forward.group))
            forward.group = backward.group = group


def _forget_graph() -> None:
    """Forget the amaxes of a step that began in a graph which failed."""
    scaling.discard(_thread.in_graph.values())
    _thread.in_graph = {}


def _keep_recorded(forward: DelayedState) -> None:
    """Keep the amaxes that a scope around the innermost one has recorded in ``forward``."""
    scopes, ends_step = _thread.scopes, False
    for scope in reversed(scopes):
        if forward.key in scope.touched:
            scopes[-1].before[forward.key] = restore_of(forward)
            if ends_step:  # a step within a step updates from its amaxes alone
                scaling.discard([forward])
            return
        ends_step |= scope.ends_step


def _close(scope: _Scope, *, failed: bool) -> None:
    """End ``scope``, which has left the thread's list.

    The scales of its states are updated, or its states are handed on to the scope around it, or, if
    it ``failed``, the amaxes of before are restored.
    """
    touched, reducing = scope.touched, scope.reducing
    if scope.results is not None and scope.ends_step:
        touched.update(_thread.in_graph)
        _thread.in_graph = {}
    if reducing and not scope.ends_step:
        _thread.scopes[-1].reducing.update(reducing)
    if not touched and (failed or not reducing):
        return
    before, groups = scope.before, scope.groups
    if not scope.ends_step and not failed:
        around = _thread.scopes[-1]
        for forward, before_it in groups.items():
            around.groups.setdefault(forward, before_it)
        for key, state in touched.items():
            if key not in around.touched:
                around.touched[key] = state
                if key in before:
                    around.before[key] = before[key]
        return
    try:
        if not failed:
            scaling.update(touched.values(), reducing)
    except BaseException:
        failed = True
        raise
    finally:
        if failed:
            scaling.discard(touched.values())
            for forward, (backward, group) in groups.items():
                forward.group = backward.group = group
        for restore in before.values():
            restore()


def begin_step(owner: object, is_running: Callable[[], bool] = _always) -> None:
    """Open a step of ``owner``, a model that was converted with a recipe.

    Inside an autocast, whose exit ends the step, it only delimits the amaxes to forget if the step
    fails. An interrupted step of the same owner is closed as failed, and so is any innermost step
    that no longer runs.
    """
    end_step(owner, failed=True)
    forget_interrupted()
    _thread.scopes.append(_Scope(owner, not _thread.num_autocasts, is_running, {}, {}, {}, {}))


def forget_interrupted() -> None:
    """Close as failed the innermost steps that an interrupt left open, or a graph that failed."""
    scopes = _thread.scopes
    if _thread.in_graph and not scopes:
        _forget_graph()
    while scopes and not scopes[-1].is_running():
        _close(scopes.pop(), failed=True)


def end_step(owner: object, *, failed: bool) -> None:
    """Close the step of ``owner`` and the steps within it.

    Its amaxes become scales, or are forgotten if it ``failed``. Does nothing if no step of
    ``owner`` is open, or if an autocast inside the step is still open.
    """
    scopes = _thread.scopes
    at = len(scopes) - 1
    while at >= 0 and scopes[at].owner is not owner:
        if scopes[at].owner is None:
            return
        at -= 1
    while at >= 0 and len(scopes) > at:
        scope = scopes.pop()
        _close(scope, failed=failed or scope.owner is not owner)
    if collected and not scopes:
        log_collected()


def touched_in(owner: object) -> list[DelayedState]:
    """Return the states that recorded so far in the step of ``owner``.

    Empty unless that is the innermost scope, outside any autocast.
    """
    scopes = _thread.scopes
    is_open = bool(scopes) and scopes[-1].owner is owner and scopes[-1].ends_step
    return list(scopes[-1].touched.values()) if is_open else []


def is_in_step(owner: object) -> bool:
    """Say whether the calling thread has a step of ``owner`` open."""
    return any([scope.owner is owner for scope in _thread.scopes])
