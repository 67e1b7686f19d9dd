"""Which autocast was active when autograd made a node: what a recompute in backward has to repeat.

A checkpointed function that enters its autocast itself enters it in the recompute too. One that
runs in the autocast of its caller does not, and torch says nothing of that. But each thread numbers
the nodes that it makes, so the numbers at which autocasts were entered and left tell what was
active around a node whose backward, or whose saved tensors, ask for the recompute.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from bisect import bisect_right
from collections import deque
from operator import itemgetter
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction

from fp8core.torch_ops.private import (
    CHECKPOINT_FRAME,
    CHECKPOINT_HOOK,
    NO_BACKWARD_PASS,
    compile_context,
    current_backward_pass,
    current_node,
    next_node_number,
    node_number,
    saved_tensor_hooks,
)

__all__ = ["Recompute", "enter", "is_entered_in_backward", "is_traced", "leave", "recompute"]


class _Entered(NamedTuple):
    """An autocast that is open, in the one ``outer``.

    ``region`` is the checkpoint of torch (``use_reentrant=False``) in whose function it was
    entered; ``in_backward``: by what runs there, a recompute.
    """

    name: str
    region: weakref.ref[Any] | None
    in_backward: bool
    outer: _Entered | None


# From the node of this number of its thread on, that is the innermost open autocast; whether it
# was taken down in backward. No class: two are made in each autocast.
_Event: TypeAlias = "tuple[int, _Entered | None, bool]"
_NUMBER: Final = 0
_INNERMOST: Final = 1
_IN_BACKWARD: Final = 2
_MOST_EVENTS, _MOST_ENDED_THREADS = 4096, 256


class _History:
    """What one thread entered and left; of the oldest nothing is known."""

    def __init__(self, thread: _Thread) -> None:
        self.entered: _Entered | None = None
        self.is_listed = False
        self.events: deque[_Event] = deque(maxlen=_MOST_EVENTS)
        self._life = weakref.ref(thread.life)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has."""
        return self._life() is None

    @property
    def last_number(self) -> float:
        """The number of its last node of which something is known, if it has ended."""
        if self.entered is not None or not self.events:
            return math.inf
        return self.events[-1][_NUMBER]

    def note(self, entered: _Entered | None, in_backward: bool) -> None:
        """Take down that ``entered`` is open now."""
        number, events = next_node_number(), self.events
        self.entered = entered
        if not (in_backward or self.is_listed):
            _list(self)
        if events:
            last = events[-1]
            if last[_NUMBER] == number and last[_IN_BACKWARD] is in_backward:
                events.pop()  # no node was made since
        events.append((number, entered, in_backward))

    def has_open_since(self, number: int) -> bool:
        """Say whether the autocast that is open now, in this thread, was so at its node ``number``,
        and still: nearly always a backward within the autocast of its forward."""
        is_past = number < next_node_number() and bool(self.events)
        is_past = is_past and self.events[0][_NUMBER] <= number
        return (
            is_past
            and self.entered is not None
            and self.at(number, in_forward=True) is self.entered
        )

    def at(self, number: int, *, in_forward: bool) -> _Entered | None:
        """Return what was open when the thread made node ``number``.

        ``in_forward``: in no backward pass, whose nodes other threads may count.

        Raises:
            LookupError: that is forgotten.
        """
        at = bisect_right(self.events, number, key=_number_of) - 1
        while at >= 0 and in_forward and self.events[at][_IN_BACKWARD]:
            at -= 1
        if at < 0 and len(self.events) == _MOST_EVENTS:
            raise LookupError
        return self.events[at][_INNERMOST] if at >= 0 else None


_number_of = itemgetter(_NUMBER)


class _Histories:
    """Of the threads that enter autocasts in forward; others, as autograd's own, say nothing.

    Some of those that have ended are kept too: their graphs may live on. Of nodes up to the number
    ``forgotten`` it is not known what was active around them in a thread that is not kept.
    """

    def __init__(self) -> None:
        self.listed: list[_History] = []
        self.forgotten: float = -1
        self.lock = threading.Lock()


_histories = _Histories()


def _list(history: _History) -> None:
    with _histories.lock:
        history.is_listed = True
        ended = [one for one in _histories.listed if one.has_ended]
        gone = ended[: max(0, len(ended) - _MOST_ENDED_THREADS)]
        _histories.forgotten = max([_histories.forgotten, *(one.last_number for one in gone)])
        kept = [one for one in _histories.listed if one not in gone]
        _histories.listed = [*kept, history]


class _Life:
    """Lives as long as its thread."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.history: _History | None = None
        self.life = _Life()


_thread = _Thread()


def is_traced() -> bool:
    """Say whether torch.compile reads the caller's code, or another capture runs it.

    A function that asks torch.compiler.is_compiling() is compiled also where it calls no operator,
    as an autocast does that is entered around a graph break; what it then sets in the thread is
    lost. Of this one it takes the result as a constant.
    """
    return compile_context() is not None or torch.compiler.is_compiling()


def enter(name: str) -> None:
    """Take down that the calling thread enters the autocast ``name``."""
    history = _thread.history
    if history is None:
        history = _thread.history = _History(_thread)
    in_backward, hooks = current_backward_pass() != NO_BACKWARD_PASS, saved_tensor_hooks(True)
    region = _region(hooks) if hooks else None
    history.note(_Entered(name, region, in_backward, history.entered), in_backward)


def leave(depth: int = 0) -> None:
    """Take down that it leaves the innermost one but ``depth``."""
    history = _thread.history
    if history is not None and history.entered is not None:
        left = _without(history.entered, depth) if depth else history.entered.outer
        history.note(left, current_backward_pass() != NO_BACKWARD_PASS)


def _without(entered: _Entered, depth: int) -> _Entered | None:
    outer = entered.outer
    if not depth or outer is None:
        return outer
    return entered._replace(outer=_without(outer, depth - 1))


def is_entered_in_backward() -> bool:
    """Say whether the innermost open autocast was entered by what runs in backward."""
    history = _thread.history
    return history is not None and history.entered is not None and history.entered.in_backward


class Recompute(NamedTuple):
    """A forward that runs in backward, of the node or the checkpoints of torch that asked for it.

    ``is_asked_for``: by one of them, not by the hook of a tensor. ``is_nested``: in the recompute
    of another, which made the node, in this thread.
    """

    node: Any
    regions: tuple[Any, ...]
    is_asked_for: bool
    is_nested: bool

    def active_before(self, outside: str) -> set[str]:
        """Return the names of what may have been active around the forward that it repeats;
        ``outside`` for no autocast, nothing if that is forgotten."""
        if self.node is None:
            return set()
        number = node_number(self.node)
        own = _thread.history
        if own is not None and (self.is_nested or own.has_open_since(number)):
            histories = [own]
        elif self.is_nested:
            histories = []
        else:
            histories = _histories.listed
            if number <= _histories.forgotten:  # asked after: what is gone is counted before
                return set()
        try:
            opened = [one.at(number, in_forward=not self.is_nested) for one in histories]
        except LookupError:
            return set()
        around = map(self._around, opened)
        return {outside if one is None else one.name for one in around} or {outside}

    def _around(self, innermost: _Entered | None) -> _Entered | None:
        """Return the innermost that was open around the checkpointed function, not in it."""
        found, entered = innermost, innermost
        while entered is not None:
            region = None if entered.region is None else entered.region()
            if region is not None and any(region is one for one in self.regions):
                found = entered.outer
            entered = entered.outer
        return found


def recompute() -> Recompute:
    """Return what asked for the forward that runs now, in backward."""
    frame: FrameType | None = sys._getframe(1)
    regions, nodes = [], 0
    while frame is not None:
        code = frame.f_code
        if code is _APPLY:
            nodes += 1
        elif code.co_name == CHECKPOINT_HOOK and CHECKPOINT_FRAME in code.co_freevars:
            regions.append(frame.f_locals[CHECKPOINT_FRAME])
        frame = frame.f_back
    node = current_node()
    outer_nodes = nodes - isinstance(node, BackwardCFunction)
    return Recompute(node, tuple(regions), nodes > 0 or bool(regions), outer_nodes > 0)


# What the engine calls for every node written in Python.
_APPLY = BackwardCFunction.apply.__code__


def _region(hooks: tuple[Any, Any]) -> weakref.ref[Any] | None:
    """Return the checkpoint of torch that ``hooks``, which look at saved tensors now, are of."""
    code = getattr(hooks[0], "__code__", None)
    if code is None or CHECKPOINT_FRAME not in code.co_freevars:
        return None
    cells: Any = hooks[0].__closure__
    return weakref.ref(cells[code.co_freevars.index(CHECKPOINT_FRAME)].cell_contents)
