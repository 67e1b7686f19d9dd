"""``transformer_engine.pytorch.distributed``: recompute with a tracker of random states; and which
tokens of packed sequences the ranks of a context-parallel group have."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8core.chain.sequence_chunks import lengths_of_chunks
from fp8core.context import recompute as native
from fp8core.context.autocast import active
from fp8core.context.recompute import Tape, TapeEntry, current, playing
from fp8core.errors import OperandError, UnsupportedError
from fp8core.training.context_parallel import check_bounds, thd_get_partitioned_indices


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
        """Return the record of the forward that this call repeats."""
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


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Have layers remember their forward, or, with ``recompute_phase``, repeat it exactly.

    A repeat has the delayed scales and stored weights of the forward, and records no amax. Forwards
    of one layer are repeated in the order in which they ran.
    """
    if not activation_recompute:
        yield
        return
    tape = _Repeat(current()) if recompute_phase else _Forward(True, current())
    with playing(tape):
        yield


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether the thread runs in low precision what backward repeats, or repeats it: in
    :func:`checkpoint` or :func:`activation_recompute_forward`."""
    return current() is not None and active(None).quantize is not None


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether the thread repeats a forward."""
    tape = current()
    return tape is not None and tape.is_repeating


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


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: torch.Tensor,
    input_ids_padded: torch.Tensor | None,
    labels_padded: torch.Tensor | None,
    position_ids_padded: torch.Tensor | None,
    cp_group: dist.ProcessGroup | None = None,
    qvk_format: str = "thd",
    load_balancing_strategy: None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the tokens, labels and positions of packed sequences that this rank of ``cp_group``
    has: two chunks of each sequence. None stays None.

    Args:
        cu_seqlens_padded: where sequences begin, integers ``[b + 1]``, each with its padding.
        input_ids_padded, labels_padded, position_ids_padded: ``[t]`` or ``[1, t]``, on any device;
            of more than one dimension the second is that of the tokens if it has their number.
        cp_group: None is the group of all ranks.
        qvk_format: ``"thd"``.
        load_balancing_strategy: chunks are as attention takes them: None.

    Raises:
        OperandError: a tensor without a dimension of all tokens, or sequences that the ranks do not
            divide.
        UnsupportedError: another format, or a strategy.
    """
    owner = "get_batch_on_this_cp_rank"
    if qvk_format != "thd" or load_balancing_strategy is not None:
        raise UnsupportedError(
            f"{owner}(qvk_format={qvk_format!r}, load_balancing_strategy="
            f"{load_balancing_strategy!r}) is not offered: expected 'thd' and None. "
            f"fp8core.distributed.get_batch_on_this_cp_rank takes whole sequences of other formats."
        )
    check_bounds(owner, cu_seqlens_padded)
    size, rank = dist.get_world_size(group=cp_group), dist.get_rank(group=cp_group)
    batch = input_ids_padded, labels_padded, position_ids_padded
    if size == 1:
        return batch
    num_tokens = int(cu_seqlens_padded[-1])
    where = thd_get_partitioned_indices(cu_seqlens_padded, num_tokens, size, rank)
    first, second, third = (
        x if x is None else x.index_select(_dim_of(owner, x, num_tokens), where.to(x.device))
        for x in batch
    )
    return first, second, third


def _dim_of(owner: str, x: torch.Tensor, num_tokens: int) -> int:
    """Return the dimension of ``x`` that has ``num_tokens`` tokens, the second before the first."""
    dims = [dim for dim in (1, 0) if num_tokens in x.shape[dim : dim + 1]]
    if not dims:
        raise OperandError(
            f"{owner}: {list(x.shape)} of sequences that end at {num_tokens} with their padding; "
            f"expected [{num_tokens}] or [1, {num_tokens}], as pad_thd_sequences_for_cp makes it."
        )
    return dims[0]


def get_thd_partitioned_indices(
    cu_seqlens_padded: torch.Tensor,
    total_tokens: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device | str | None = None,
    load_balancing_strategy: None = None,
) -> torch.Tensor:
    """Return which tokens a rank has, on ``device``; see
    :func:`fp8core.distributed.thd_get_partitioned_indices`."""
    if load_balancing_strategy is not None:
        raise UnsupportedError(
            f"get_thd_partitioned_indices(load_balancing_strategy={load_balancing_strategy!r}) is "
            f"not offered: a rank has two chunks of each sequence. Leave it out."
        )
    return thd_get_partitioned_indices(cu_seqlens_padded, total_tokens, cp_size, cp_rank).to(device)


def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded_on_cp_rank: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    """Return the lengths, added up, of what a rank has of each sequence without its padding.

    Args:
        cu_seqlens: of whole sequences without padding, integers ``[b + 1]``.
        cu_seqlens_padded_on_cp_rank: where a sequence's two chunks begin among the rank's tokens.
        first_half, second_half: which of the two chunks count.
    """
    chunk = cu_seqlens_padded_on_cp_rank.diff() // 2
    counts = lengths_of_chunks(cu_seqlens, chunk, cp_size, cp_rank)
    lengths = counts.first * bool(first_half) + counts.second * bool(second_half)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=cu_seqlens.dtype), (1, 0))
