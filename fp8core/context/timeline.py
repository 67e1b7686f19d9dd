"""Which autocast was active when autograd created a node: a recompute in backward must repeat it.

A checkpointed function that enters its autocast itself enters it in the recompute too. A function
that runs in the autocast of its caller does not enter it again, and torch does not tell which
autocast that was. But each thread numbers the autograd nodes that it creates. So this module keeps
the numbers at which each thread entered and left autocasts, which tell the autocast that was active
around the node whose backward, or whose saved tensors, cause the recompute.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction

from fp8core.torch_ops.private import (
    CHECKPOINT_FRAME,
    CHECKPOINT_HOOK,
    COMPILE_CONTEXT,
    NO_BACKWARD_PASS,
    compile_variables,
    current_backward_pass,
    current_node,
    next_node_number,
    node_number,
    saved_tensor_hooks,
)


class _Entered(NamedTuple):
    """An open autocast; ``outer`` is the one around it.

    ``region`` is the torch checkpoint (``use_reentrant=False``) in whose function it was entered,
    ``in_backward`` whether a recompute entered it, inside a backward pass.
    """

    name: str
    region: weakref.ref[Any] | None
    in_backward: bool
    outer: _Entered | None


# Without the Python function of a NamedTuple: each autocast creates one.
_new_entered: Callable[..., _Entered] = tuple.__new__

# One change of a thread's innermost open autocast: the number of the first node after it, the
# autocast, and whether the change happened in backward. A tuple and no class, as each autocast
# creates two.
_Event: TypeAlias = "tuple[int, _Entered | None, bool]"
_NUMBER: Final = 0
_INNERMOST: Final = 1
_IN_BACKWARD: Final = 2
_MOST_EVENTS, _MOST_ENDED_THREADS = 4096, 256


class _History:
    """The autocasts that one thread entered and left, without the oldest ones."""

    def __init__(self, thread: _Thread) -> None:
        self.entered: _Entered | None = None
        self.is_listed = False
        self.events: deque[_Event] = deque(maxlen=_MOST_EVENTS)
        self._life = weakref.ref(thread.life)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return self._life() is None

    @property
    def last_number(self) -> float:
        """The number of the last node that the events tell about; infinite while more may come."""
        if self.entered is not None or not self.events:
            return math.inf
        return self.events[-1][_NUMBER]

    def note(self, entered: _Entered | None, in_backward: bool) -> None:
        """Record that ``entered`` is the innermost open autocast from now on."""
        number, events = next_node_number(), self.events
        self.entered = entered
        if not (in_backward or self.is_listed):
            _list(self)
        if events:
            last, _, was_in_backward = events[-1]
            if last == number and was_in_backward is in_backward:
                events.pop()  # no node was created since
        events.append((number, entered, in_backward))

    def has_open_since(self, number: int) -> bool:
        """Say whether the autocast that is open now was open when the thread created node
        ``number``: the usual case of a backward within the autocast of its forward."""
        is_past = number < next_node_number() and bool(self.events)
        is_past = is_past and self.events[0][_NUMBER] <= number
        return (
            is_past
            and self.entered is not None
            and self.at(number, in_forward=True) is self.entered
        )

    def at(self, number: int, *, in_forward: bool) -> _Entered | None:
        """Return the innermost autocast that was open when the thread created node ``number``.

        ``in_forward`` skips events in backward passes, whose nodes other threads may number.

        Raises:
            LookupError: the events of that time are no longer kept.
        """
        at = bisect_right(self.events, number, key=_number_of) - 1
        while at >= 0 and in_forward and self.events[at][_IN_BACKWARD]:
            at -= 1
        if at < 0 and len(self.events) == _MOST_EVENTS:
            raise LookupError
        return self.events[at][_INNERMOST] if at >= 0 else None


_number_of = itemgetter(_NUMBER)


class _Histories:
    """The histories of threads that enter autocasts in forward, which autograd's threads do not.

    Histories of some threads that have ended stay, as their graphs may live on. ``forgotten`` is
    the largest number of a node in the histories that were dropped.
    """

    def __init__(self) -> None:
        self.listed: list[_History] = []
        self.forgotten: float = -1
        self.lock = threading.Lock()


_histories = _Histories()


def _list(history: _History) -> None:
    with _histories.lock:
        history.is_listed = True
        ended = [past for past in _histories.listed if past.has_ended]
        gone = ended[: max(0, len(ended) - _MOST_ENDED_THREADS)]
        _histories.forgotten = max([_histories.forgotten, *(past.last_number for past in gone)])
        remaining = [past for past in _histories.listed if past not in gone]
        _histories.listed = [*remaining, history]


class _Life:
    """An object that lives as long as its thread: a weak reference to it tells when that ends."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.history: _History | None = None
        self.life = _Life()


_thread = _Thread()


def is_traced() -> bool:
    """Say whether torch.compile traces the caller, or another capture runs it.

    torch.compile evaluates this function while it traces and keeps the result as a constant. A
    direct call of ``torch.compiler.is_compiling()`` would have it compile the calling function even
    if that calls no operator, such as an autocast entered around a graph break; attributes of the
    thread that the function sets would then be lost.
    """
    return compile_variables().get(COMPILE_CONTEXT) is not None or torch.compiler.is_compiling()


def enter(name: str) -> None:
    """Record that the calling thread enters the autocast ``name``."""
    history = _thread.history
    if history is None:
        history = _thread.history = _History(_thread)
    in_backward, hooks = current_backward_pass() != NO_BACKWARD_PASS, saved_tensor_hooks(True)
    region = _region(hooks) if hooks else None
    entered = _new_entered(_Entered, (name, region, in_backward, history.entered))
    history.note(entered, in_backward)


def leave(depth: int = 0) -> None:
    """Record that the calling thread leaves the open autocast that has ``depth`` others in it."""
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
    """Say whether the innermost open autocast was entered inside a backward pass."""
    history = _thread.history
    return history is not None and history.entered is not None and history.entered.in_backward


class Recompute(NamedTuple):
    """A forward that runs inside a backward pass, and what caused it.

    Attributes:
        node: the autograd node that the pass computes.
        regions: the torch checkpoints (``use_reentrant=False``) that unpack their tensors now.
        is_requested: whether a node written in Python or a checkpoint caused it; False in a hook
            of a tensor.
        is_nested: whether it runs within another recompute, which created ``node`` in this thread.
    """

    node: Any
    regions: tuple[Any, ...]
    is_requested: bool
    is_nested: bool

    def active_before(self, outside: str) -> set[str]:
        """Return the names of the autocasts that may have been active around the repeated forward.

        ``outside`` stands for no autocast; the set is empty where the answer is no longer known.
        """
        if self.node is None:
            return set()
        number = node_number(self.node)
        of_thread = _thread.history
        if of_thread is not None and (self.is_nested or of_thread.has_open_since(number)):
            histories = [of_thread]
        elif self.is_nested:
            histories = []
        else:
            histories = _histories.listed
            if number <= _histories.forgotten:  # _list raises it before it drops a history
                return set()
        try:
            opened = [past.at(number, in_forward=not self.is_nested) for past in histories]
        except LookupError:
            return set()
        around = map(self._around, opened)
        return {outside if entered is None else entered.name for entered in around} or {outside}

    def _around(self, innermost: _Entered | None) -> _Entered | None:
        """Return the innermost autocast around the checkpointed function, not inside it."""
        around, entered = innermost, innermost
        while entered is not None:
            region = None if entered.region is None else entered.region()
            if region is not None and any(region is repeated for repeated in self.regions):
                around = entered.outer
            entered = entered.outer
        return around


def recompute() -> Recompute:
    """Describe the forward that runs now, inside backward, from the frames that called it."""
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


# The method that the engine calls for every node written in Python.
_APPLY = BackwardCFunction.apply.__code__


def _region(hooks: tuple[Any, Any]) -> weakref.ref[Any] | None:
    """Return the torch checkpoint whose ``hooks`` are the innermost ones on saved tensors."""
    code = getattr(hooks[0], "__code__", None)
    if code is None or CHECKPOINT_FRAME not in code.co_freevars:
        return None
    cells: Any = hooks[0].__closure__
    return weakref.ref(cells[code.co_freevars.index(CHECKPOINT_FRAME)].cell_contents)
