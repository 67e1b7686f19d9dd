"""``transformer_engine.pytorch.distributed``: recompute with a tracker of random states."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from fp8core.context import recompute as native
from fp8core.context.recompute import Tape, TapeEntry, current, playing
from fp8core.errors import OperandError


class _Recorded(NamedTuple):
    """A layer's forward; the reference to the layer keeps its id from other objects."""

    entry: TapeEntry
    layer: torch.nn.Module


# The forwards of each layer that no recompute has repeated yet, oldest first. A framework repeats
# its layers in any order, but the microbatches of one layer in theirs.
_waiting: dict[int, deque[_Recorded]] = {}
_waiting_lock = threading.Lock()


class _Forward(Tape):
    """Records layers one by one, for recomputes in another order."""

    def _record(self, entry: TapeEntry, layer: torch.nn.Module) -> None:
        with _waiting_lock:
            queue = _waiting.setdefault(id(layer), deque())
            queue.append(_Recorded(entry, layer))


class _Repeat(Tape):
    """Hands each layer the oldest of its forwards that was not repeated yet."""

    def __init__(self, outer: Tape | None) -> None:
        super().__init__(True, outer)
        self.replay()

    def _take(self, label: str, key: tuple[object, ...], layer: torch.nn.Module) -> TapeEntry:
        """Return the record of the forward that this call repeats.

        Raises:
            OperandError: there is none, or it ran with another recipe, dtype or weight.
        """
        with _waiting_lock:
            queue = _waiting.get(id(layer))
            if not queue:
                raise OperandError(
                    f"recompute of {label}: its forward did not run within "
                    f"activation_recompute_forward(recompute_phase=False), or was repeated already."
                )
            entry = queue.popleft().entry
            if not queue:
                del _waiting[id(layer)]
        self._record(entry, layer)
        return super()._take(label, key, layer)


class _Phase(threading.local):
    is_enabled = False
    is_recompute = False


_phase = _Phase()


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Have layers remember their forward, or, with ``recompute_phase``, repeat it exactly.

    A repeat has the delayed scales and stored weights of the forward, and records no amax. Forwards
    of one layer are repeated in the order in which they ran.
    """
    before = _phase.is_enabled, _phase.is_recompute
    _phase.is_enabled = activation_recompute
    _phase.is_recompute = activation_recompute and recompute_phase
    try:
        if not activation_recompute:
            yield
            return
        tape = _Repeat(current()) if recompute_phase else _Forward(True, current())
        with playing(tape):
            yield
    finally:
        _phase.is_enabled, _phase.is_recompute = before


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether the calling thread is in :func:`activation_recompute_forward`."""
    return _phase.is_enabled


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether the thread is in the recompute."""
    return _phase.is_recompute


class RandomState(NamedTuple):
    """The states of the generators of the CPU and of the current accelerator, if there is one."""

    cpu: torch.Tensor
    accelerator: torch.Tensor | None


def _current_state() -> RandomState:
    accelerator = _accelerator()
    state = None if accelerator is None else accelerator.get_rng_state()
    return RandomState(torch.get_rng_state(), state)


def _set_state(state: RandomState) -> None:
    torch.set_rng_state(state.cpu)
    accelerator = _accelerator()
    if accelerator is not None and state.accelerator is not None:
        accelerator.set_rng_state(state.accelerator)


def _accelerator() -> Any:
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device)


_all_states: dict[str, RandomState] = {}


class CudaRNGStatesTracker:
    """Random states by name, each of which :meth:`fork` continues.

    The states are of the CPU's generator, from which fp8core draws seeds, and of the accelerator's.
    """

    def __init__(self) -> None:
        self.states_: dict[str, RandomState] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, RandomState]:
        """Return a copy of the states by name."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, RandomState]) -> None:
        """Continue with ``states``, as :meth:`get_states` returned them."""
        self.states_ = dict(states)
        _all_states.update(self.states_)

    def add(self, name: str, seed: int) -> None:
        """Begin a state ``name`` from ``seed``.

        Raises:
            OperandError: the name or the seed is in use.
        """
        if seed in self.seeds_:
            raise OperandError(f"CudaRNGStatesTracker.add({name!r}): seed {seed} is in use.")
        if name in self.states_:
            raise OperandError(f"CudaRNGStatesTracker.add({name!r}): the name is in use.")
        before = _current_state()
        torch.manual_seed(seed)  # of all devices
        self.seeds_.add(seed)
        self.states_[name] = _all_states[name] = _current_state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from the state ``name`` inside, and continue outside as before.

        Raises:
            OperandError: there is no such state.
        """
        if name not in self.states_:
            names = ", ".join(self.states_) or "none"
            raise OperandError(f"CudaRNGStatesTracker.fork({name!r}): the states are: {names}.")
        before = _current_state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _all_states[name] = _current_state()
            _set_state(before)


def get_all_rng_states() -> dict[str, RandomState]:
    """Return the states that trackers of this process have, by name."""
    return dict(_all_states)


@contextmanager
def _tracking(tracker: Any, states: Any) -> Iterator[None]:
    """Have ``tracker`` begin with ``states``, and continue with its present ones afterwards."""
    before = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(before)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: torch.distributed.ProcessGroup | None = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """:func:`fp8core.checkpoint`, whose recompute also begins with the tracker's states.

    Over one rank there is nothing to distribute.

    Args:
        get_rng_state_tracker: returns the tracker, which has ``get_states`` and ``set_states``.

    Raises:
        UnsupportedError: ``distribute_saved_activations`` over several ranks.
    """
    if tp_group is None or tp_group.size() == 1:
        distribute_saved_activations = False
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    states = None if tracker is None else tracker.get_states()
    is_first = True

    def run(*inputs: Any, **named: Any) -> Any:
        nonlocal is_first
        is_repeat, is_first = not is_first, False
        with _tracking(tracker, states) if is_repeat and states else nullcontext():
            return function(*inputs, **named)

    return native.checkpoint(
        run,
        *args,
        distribute_saved_activations=distribute_saved_activations,
        tp_group=tp_group,
        use_reentrant=use_reentrant,
        **kwargs,
    )
