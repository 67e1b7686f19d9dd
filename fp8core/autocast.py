"""``autocast``: which recipe is active, per thread, and when delayed scales are updated."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed

from fp8core import scaling, timeline
from fp8core.errors import RecipeError
from fp8core.library.operators import constant_in_graph
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.choice import recipe_from
from fp8core.scaling import DelayedState, Recorded

__all__ = [
    "Active",
    "activated",
    "active",
    "active_name",
    "autocast",
    "begin_step",
    "end_step",
    "forget_interrupted",
    "fp8_autocast",
    "is_in_step",
    "is_switched_off",
    "named",
    "touch",
    "touched_in",
]


@dataclass(frozen=True, slots=True)
class Active:
    """What an ``autocast`` asks of the layers inside it.

    ``quantize`` is the recipe to compute with, ``observe`` the one to record amaxes for while
    computing in high precision; at most one is set.
    """

    quantize: Recipe | None = None
    observe: Recipe | None = None
    group: torch.distributed.ProcessGroup | None = None


# What was ever asked for, by a name that is never given twice. A compiled graph is guarded by the
# name: a string is compared by value, where an object would be compared by an address that another
# may take over. As many entries as a program has different recipes and groups.
_asked: dict[str, Active] = {}
_names: dict[Active, str] = {}
_names_lock = threading.Lock()
# Recipes that a compiled graph knows by their address: kept, so that no other has it.
_compared_by_address: list[Recipe] = []


def _name(asked: Active) -> str:
    with _names_lock:
        name = _names.setdefault(asked, f"autocast {len(_names)}")
        _asked[name] = asked
    return name


# Outside any autocast, which is not what autocast(enabled=False) says: a layer's own recipe counts.
_OUTSIDE = "no autocast"
_asked[_OUTSIDE] = Active()


class _Scope(NamedTuple):
    """An open autocast (``owner`` None), or step of ``owner``: what is recorded in until it closes.

    ``touched`` are the states that recorded in it, by their buffer: states of two backends or
    margins share a layer's. ``before`` is what a buffer held that a scope around had recorded in.
    One that ``ends_step`` turns amaxes into scales when it closes; one inside an autocast hands
    them on to the scope around it. ``is_running`` tells whether a step was interrupted.
    """

    owner: object
    ends_step: bool
    is_running: Callable[[], bool]
    touched: dict[int, DelayedState]
    before: dict[int, Recorded]


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.active = _OUTSIDE
        self.outer: list[str] = []
        self.scopes: list[_Scope] = []


_thread = _ThreadState()


def active(default: Active | None = None) -> Active:
    """Return what the calling thread's innermost autocast asks for; outside any, ``default``."""
    name = _thread.active
    return _asked[name] if default is None or name != _OUTSIDE else default


def active_name(default: Active | None = None) -> str:
    """Return the name of :func:`active`: equal names, equal requests."""
    name = _thread.active
    if default is None or name != _OUTSIDE:
        return name
    return _ask(default.quantize is not None, False, default.quantize, None)


def active_before(
    recompute: timeline.Recompute, default: Active | None = None
) -> set[tuple[Recipe | None, Recipe | None]]:
    """Return the recipes (quantize, observe) that may have been active in the forward that
    ``recompute`` repeats, for what does ``default`` outside any autocast; nothing if unknown."""
    outside = _asked[_OUTSIDE] if default is None else default
    names = recompute.active_before(_OUTSIDE)
    asked = [outside if name == _OUTSIDE else _asked[name] for name in names]
    return {(one.quantize, one.observe) for one in asked}


def is_switched_off() -> bool:
    """Say whether the calling thread's innermost autocast computes in high precision; False outside
    any."""
    return _thread.active != _OUTSIDE and _asked[_thread.active].quantize is None


def named(name: str) -> Active:
    """Return what :func:`active_name` named."""
    return _asked[name]


@contextlib.contextmanager
def activated(name: str) -> Iterator[None]:
    """Have the calling thread's layers do what ``name``, of :func:`active_name`, asks for; updates
    no scales at the end."""
    outer, _thread.active = _thread.active, name
    timeline.enter(name)
    try:
        yield
    finally:
        _thread.active = outer
        timeline.leave()


def touch(
    forward: DelayedState,
    backward: DelayedState,
    group: torch.distributed.ProcessGroup | None,
) -> None:
    """Have ``forward`` updated when the thread's outermost autocast, or its model's step, ends, and
    both states be reduced over ``group``. To be called before ``forward`` records."""
    scopes = _thread.scopes
    if scopes:
        touched = scopes[-1].touched
        if forward.key not in touched:
            if len(scopes) > 1:
                _keep_recorded(forward, backward)
            touched[forward.key] = forward
    forward.group = backward.group = group


def _keep_recorded(forward: DelayedState, backward: DelayedState) -> None:
    """Keep what ``forward`` holds for the innermost scope, if a scope around has recorded in it."""
    scopes, ends_step = _thread.scopes, False
    for scope in reversed(scopes):
        if forward.key in scope.touched:
            scopes[-1].before[forward.key] = Recorded.of(forward, backward)
            if ends_step:  # the update of a step within a step is of its own amaxes
                scaling.discard([forward])
            return
        ends_step |= scope.ends_step


def _close(scope: _Scope, *, failed: bool) -> None:
    """End ``scope``, which is none of the thread's any more: update what it touched, hand it on to
    the scope around, or, if it ``failed``, put back what was there before."""
    touched, before = scope.touched, scope.before
    if not touched:
        return
    if not scope.ends_step and not failed:
        around = _thread.scopes[-1]
        for key, state in touched.items():
            if key not in around.touched:
                around.touched[key] = state
                if key in before:
                    around.before[key] = before[key]
        return
    try:
        if not failed:
            scaling.update(touched.values())
    except BaseException:
        failed = True
        raise
    finally:
        if failed:
            scaling.discard(touched.values())
        for recorded in before.values():
            recorded.put_back()


def _always() -> bool:
    return True


def begin_step(owner: object, is_running: Callable[[], bool] = _always) -> None:
    """Open a step of ``owner``, a model whose layers have a recipe of their own.

    Inside an autocast, whose exit is the step's end, it only marks what is forgotten if the step
    fails. A step of the same owner that was never ended, as an interrupt leaves one, is forgotten,
    and so is any that no longer is running.
    """
    end_step(owner, failed=True)
    forget_interrupted()
    _thread.scopes.append(_Scope(owner, not _thread.outer, is_running, {}, {}))


def forget_interrupted() -> None:
    """Forget the innermost steps that were never ended and no longer are running."""
    scopes = _thread.scopes
    while scopes and not scopes[-1].is_running():
        _close(scopes.pop(), failed=True)


def end_step(owner: object, *, failed: bool) -> None:
    """Close the step of ``owner`` and those within it; turn its amaxes into scales, or forget
    them if it failed. Without an open step of ``owner``, or if an autocast was opened in it that
    still is, it does nothing."""
    scopes = _thread.scopes
    at = len(scopes) - 1
    while at >= 0 and scopes[at].owner is not owner:
        if scopes[at].owner is None:
            return
        at -= 1
    while at >= 0 and len(scopes) > at:
        scope = scopes.pop()
        _close(scope, failed=failed or scope.owner is not owner)


def touched_in(owner: object) -> list[DelayedState]:
    """Return the states touched so far in the step of ``owner``, if that is the innermost open and
    not inside an autocast."""
    scopes = _thread.scopes
    is_open = bool(scopes) and scopes[-1].owner is owner and scopes[-1].ends_step
    return list(scopes[-1].touched.values()) if is_open else []


def is_in_step(owner: object) -> bool:
    """Say whether the calling thread has a step of ``owner`` open."""
    return any(scope.owner is owner for scope in _thread.scopes)


class autocast(contextlib.ContextDecorator):
    """Context manager: layers inside compute their GEMMs in low precision, as ``recipe`` says.

    Nested uses are allowed, the innermost decides; one object may be entered again, also while it
    is active, and from several threads. What backward needs is kept in forward, so backward may
    run outside. An exception restores the outer state, and the amaxes recorded inside are
    forgotten, those of an inner autocast too whose exception an outer one never sees.

    Args:
        enabled: False computes in high precision.
        calibrating: with ``enabled=False``, record the amaxes that a delayed-scaling recipe will
            need, and turn them into scales on exit; works without gradients too.
        recipe: a Recipe, or the name of one; None takes :func:`fp8core.get_default_recipe`.
        amax_reduction_group: process group over which delayed amaxes are reduced (MAX). None
            reduces nothing; there is no implicit WORLD group.

    Raises:
        RecipeError: ``recipe`` is neither a Recipe nor the name of one, or ``amax_reduction_group``
            not a process group.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self._active = _ask(enabled, calibrating, recipe, amax_reduction_group)

    def __enter__(self) -> None:
        thread = _thread
        thread.scopes.append(_Scope(None, not thread.outer, _always, {}, {}))
        thread.outer.append(thread.active)
        thread.active = self._active
        if not torch.compiler.is_compiling():
            timeline.enter(self._active)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        thread = _thread
        thread.active = thread.outer.pop()
        if not torch.compiler.is_compiling():
            timeline.leave()
        scopes = thread.scopes
        scope = scopes.pop()
        while scope.owner is not None:  # a step that an interrupt left open
            _close(scope, failed=True)
            scope = scopes.pop()
        _close(scope, failed=kind is not None)


class _Request(NamedTuple):
    """The arguments of an autocast, and the name of what they ask for."""

    enabled: bool
    calibrating: bool
    given: Recipe
    group: torch.distributed.ProcessGroup | None
    name: str


# A training loop asks for the same in every step: compared by identity, as to hash a recipe takes
# longer than the rest of an autocast. Recipes do not change.
_latest: _Request | None = None


def _ask(
    enabled: bool,
    calibrating: bool,
    given: Recipe | str | None,
    group: torch.distributed.ProcessGroup | None,
) -> str:
    """Check the arguments of an autocast, and return the name of what it asks for."""
    global _latest
    latest = _latest
    if (
        latest is not None
        and given is latest.given
        and enabled is latest.enabled
        and calibrating is latest.calibrating
        and group is latest.group
        and not torch.compiler.is_compiling()  # where _check takes down what it was asked
    ):
        return latest.name
    name = _check(enabled, calibrating, given, group)
    if isinstance(given, Recipe):  # what None and a name stand for may change
        _latest = _Request(enabled, calibrating, given, group, name)
    return name


def _check(
    enabled: bool,
    calibrating: bool,
    given: Recipe | str | None,
    group: torch.distributed.ProcessGroup | None,
) -> str:
    for name, value in (("enabled", enabled), ("calibrating", calibrating)):
        if not isinstance(value, bool):
            raise RecipeError(
                f"autocast({name}={value!r}): expected True or False. A recipe is given by its "
                f"name: autocast(recipe=...)."
            )
    recipe = recipe_from(given, "autocast(recipe=...)")
    if group is not None and not _is_group(group):
        raise RecipeError(
            f"autocast(amax_reduction_group={group!r}): expected a process "
            f"group from torch.distributed.new_group, or None to reduce nothing."
        )
    if recipe is None and (enabled or calibrating):
        recipe = get_default_recipe()
    elif isinstance(given, Recipe) and torch.compiler.is_compiling():
        _compared_by_address.append(given)
    observe = recipe if calibrating and not enabled else None
    return _name(Active(quantize=recipe if enabled else None, observe=observe, group=group))


constant_in_graph(_ask)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | str | None = None,
    fp8_group: torch.distributed.ProcessGroup | None = None,
) -> autocast:
    """Return :class:`autocast` under the argument names of Transformer Engine's older function."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def _is_group(group: object) -> bool:
    return torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)
