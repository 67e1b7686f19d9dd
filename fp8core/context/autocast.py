"""``autocast``: which recipe is active, per thread, and when delayed scales are updated."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed

from fp8core.collectives.base import GroupReference, is_process_group
from fp8core.context import timeline
from fp8core.context.scopes import close_scope, open_scope
from fp8core.errors import RecipeError, no_argument
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.custom import may_reduce_amaxes
from fp8core.recipe.named import recipe_from
from fp8core.tensors.reduced_amaxes import note_autocast
from fp8core.torch_ops.capture import constant_in_graph, taking_dataclasses

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Active:
    """The request of an ``autocast`` to the layers inside it.

    ``quantize`` is the recipe to compute with, ``observe`` the one to record amaxes for while
    computing in high precision; at most one is set. ``group`` is the one to reduce amaxes over;
    ``reduces`` says whether the recipe may have any to reduce. :func:`request` makes them, one of
    each value, which ``name`` stands for in this process.
    """

    quantize: Recipe | None
    observe: Recipe | None
    group: GroupReference | None
    reduces: bool
    name: str = field(compare=False, repr=False)

    def __reduce__(self) -> tuple[Callable[..., Active], tuple[object, ...]]:
        return request, (self.quantize, self.observe, self.group)

    @property
    def process_group(self) -> torch.distributed.ProcessGroup | None:
        """The group itself; None as well once it is destroyed."""
        return None if self.group is None else self.group()


# Every request of an autocast, by a name of its own. A compiled graph is guarded by the name: a
# string is compared by value, an object by an address that another object may get later. There are
# as many entries as a program has different recipes and groups.
_by_name: dict[str, Active] = {}
_by_values: dict[tuple[object, ...], Active] = {}
_lock = threading.Lock()
# Recipes that a compiled graph knows by their address: kept alive, so that no other object gets it.
_compared_by_address: list[Recipe] = []


def request(
    quantize: Recipe | None = None,
    observe: Recipe | None = None,
    group: GroupReference | None = None,
) -> Active:
    """Return the request of these values: the same object each time, which callers compare."""
    values = (quantize, observe, group)
    with _lock:  # torch.compile leaves it to Python, which can hash a group's reference
        requested = _by_values.get(values)
    if requested is None:
        reduces = group is not None and may_reduce_amaxes(quantize or observe)  # a whole plan
        with _lock:
            name = f"autocast {len(_by_values)}"
            requested = _by_values.get(values) or Active(*values, reduces, name)
            _by_name[requested.name] = _by_values[values] = requested
    return requested


# Outside any autocast a converted layer's recipe counts; in autocast(enabled=False) it does not.
OUTSIDE = "no autocast"
_by_name[OUTSIDE] = Active(None, None, None, False, OUTSIDE)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.active = OUTSIDE
        # The open autocasts, each with the name of the request around it.
        self.opened: list[tuple[autocast, str]] = []


_thread = _ThreadState()


def active(default: Active | None = None) -> Active:
    """Return what the calling thread's innermost autocast asks for; outside any, ``default``."""
    name = _thread.active
    return _by_name[name] if default is None or name != OUTSIDE else default


def active_name(default: Active | None = None) -> str:
    """Return the name of :func:`active`: equal names, equal requests."""
    name = _thread.active
    return name if default is None or name != OUTSIDE else default.name


def active_before(
    recompute: timeline.Recompute, default: Active | None = None
) -> set[tuple[Recipe | None, Recipe | None]]:
    """Return the recipes (quantize, observe) that may have been active in a repeated forward.

    ``default`` counts outside any autocast, as in :func:`active`. Empty if they are not known.
    """
    outside = _by_name[OUTSIDE] if default is None else default
    names = recompute.active_before(OUTSIDE)
    requests = [outside if name == OUTSIDE else _by_name[name] for name in names]
    return {(request.quantize, request.observe) for request in requests}


def is_switched_off() -> bool:
    """Say whether the calling thread is in an autocast, and the innermost computes in high
    precision."""
    return _thread.active != OUTSIDE and _by_name[_thread.active].quantize is None


def named(name: str) -> Active:
    """Return the request that :func:`active_name` gave this name."""
    return _by_name[name]


@contextlib.contextmanager
def activated(name: str) -> Iterator[None]:
    """Activate the request ``name`` of :func:`active_name` for the calling thread.

    Unlike an autocast it updates no scales at the end.
    """
    outer, _thread.active = _thread.active, name
    timeline.enter(name)
    try:
        yield
    finally:
        _thread.active = outer
        timeline.leave()


class autocast(contextlib.ContextDecorator):
    """Context manager: layers inside compute their GEMMs in low precision, as ``recipe`` says.

    Nested uses are allowed, the innermost decides; one object may be entered again, also while it
    is active, and from several threads. Forward keeps everything that backward needs, so backward
    may run outside. An exception restores the outer state, and the amaxes recorded inside are
    forgotten, also those of an inner autocast whose exception is caught inside an outer one.

    Args:
        enabled: False computes in high precision.
        calibrating: with ``enabled=False``, record the amaxes that a delayed-scaling recipe will
            need, and turn them into scales on exit; works without gradients too.
        recipe: a Recipe, or the name of one; None takes :func:`fp8core.get_default_recipe`.
        amax_reduction_group: process group over which delayed amaxes are reduced (MAX), those of
            each layer with those of the same layer on other ranks. All ranks have to enter the
            autocast, but may skip layers in it. None reduces nothing; there is no implicit WORLD
            group.

    Raises:
        RecipeError: ``recipe`` is neither a Recipe nor the name of one, ``amax_reduction_group``
            not a process group, or an argument has another name.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
        **misnamed: NoReturn,
    ) -> None:
        if misnamed:
            _refuse_names("autocast", misnamed)
        ask = _ask_by_object if isinstance(recipe, Recipe) else _ask
        self._active = ask(enabled, calibrating, recipe, amax_reduction_group)

    def __enter__(self) -> None:
        thread, is_traced = _thread, timeline.is_traced()
        open_scope(is_traced)
        thread.opened.append((self, thread.active))
        thread.active = self._active
        if not is_traced:
            timeline.enter(self._active)
            group = self._reducing()
            if group is not None:
                note_autocast(group)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        thread = _thread
        opened = thread.opened
        if not opened or opened[-1][0] is not self:
            self._exit_early(failed=kind is not None)
            return
        thread.active = opened.pop()[1]
        group, is_traced = None, timeline.is_traced()
        if not is_traced:
            timeline.leave()
            group = self._reducing()
        close_scope(failed=kind is not None, group=group, is_traced=is_traced)

    def _reducing(self) -> GroupReference | None:
        """Return the group that reduces amaxes because of this autocast, whatever ran in it."""
        requested = _by_name[self._active]
        if requested.reduces and (requested.observe is not None or torch.is_grad_enabled()):
            return requested.group
        return None

    def _exit_early(self, *, failed: bool) -> None:
        """End this autocast while others that were entered later stay open, as those in a generator
        or a coroutine do."""
        opened = _thread.opened
        depth = next(
            (d for d, (entered, _) in enumerate(reversed(opened)) if entered is self), None
        )
        if depth is None:
            raise RecipeError(
                "an autocast ends in a thread that has not entered it, as where one thread begins "
                "a generator and another one closes it. Enter and leave it in one thread."
            )
        at = len(opened) - 1 - depth
        _, around = opened.pop(at)
        opened[at] = (opened[at][0], around)
        timeline.leave(depth)
        close_scope(failed=failed, depth=depth, group=self._reducing())

    def __call__(self, func: _Function) -> _Function:
        """Run ``func`` in the autocast, each time that it is called.

        Raises:
            RecipeError: calling ``func`` does not run its body, which would run outside.
        """
        is_lazy = inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func)
        if is_lazy or inspect.isasyncgenfunction(func):
            raise RecipeError(
                f"autocast as a decorator of {getattr(func, '__qualname__', func)}, which is async "
                f"or has a yield: calling it runs nothing yet, so its body would run outside of "
                f"autocast. Write `with autocast(...):` in its body."
            )
        return super().__call__(func)


# A training loop repeats its request in every step. It is compared by identity, as hashing a recipe
# takes longer than the rest of an autocast. Recipes are immutable.
_latest: tuple[bool, bool, Recipe, GroupReference | None, str] | None = None


def _ask(
    enabled: bool,
    calibrating: bool,
    recipe: Recipe | str | None,
    group: torch.distributed.ProcessGroup | None,
) -> str:
    """Check the arguments of an autocast, and return the name of its request."""
    global _latest
    if _latest is not None:
        was_enabled, was_calibrating, before, reference, name = _latest
        # A group that was destroyed is none, and a request for it not one without a group.
        if (
            recipe is before
            and enabled is was_enabled
            and calibrating is was_calibrating
            and (reference is None if group is None else reference and reference() is group)
            and not torch.compiler.is_compiling()  # where _check keeps the recipe alive
        ):
            return name
    name = _check(enabled, calibrating, recipe, group)
    if isinstance(recipe, Recipe):  # the recipe that None or a name stands for may change
        _latest = enabled, calibrating, recipe, _by_name[name].group, name
    return name


def _check(
    enabled: bool,
    calibrating: bool,
    argument: Recipe | str | None,
    group: torch.distributed.ProcessGroup | None,
) -> str:
    for name, value in (("enabled", enabled), ("calibrating", calibrating)):
        if not isinstance(value, bool):
            raise RecipeError(
                f"autocast({name}={value!r}): expected True or False. A recipe is given by its "
                f"name: autocast(recipe=...)."
            )
    recipe = recipe_from(argument, "autocast(recipe=...)")
    if group is not None and not is_process_group(group):
        raise RecipeError(
            f"autocast(amax_reduction_group={group!r}): expected a process "
            f"group from torch.distributed.new_group, or None to reduce nothing."
        )
    if recipe is None and (enabled or calibrating):
        recipe = get_default_recipe()
    elif isinstance(argument, Recipe) and torch.compiler.is_compiling():
        _compared_by_address.append(argument)
    observe = recipe if calibrating and not enabled else None
    reference = None if group is None else weakref.ref(group)
    return request(recipe if enabled else None, observe, reference).name


_NAMES = {
    "autocast": ("enabled", "calibrating", "recipe", "amax_reduction_group"),
    "fp8_autocast": ("enabled", "calibrating", "fp8_recipe", "fp8_group"),
}


def _refuse_names(owner: str, misnamed: Iterable[str]) -> NoReturn:
    """Refuse arguments that ``owner`` has not; names the argument that means the same."""
    names = _NAMES[owner]
    same = {
        name: mine for theirs in _NAMES.values() for name, mine in zip(theirs, names, strict=True)
    }
    raise RecipeError(no_argument(owner, next(iter(misnamed)), names, same))


_ask_by_object = taking_dataclasses(_ask)
constant_in_graph(_ask)
constant_in_graph(timeline.is_traced)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | str | None = None,
    fp8_group: torch.distributed.ProcessGroup | None = None,
    **misnamed: NoReturn,
) -> autocast:
    """Return :class:`autocast` under the argument names of Transformer Engine's older function."""
    if misnamed:
        _refuse_names("fp8_autocast", misnamed)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)
