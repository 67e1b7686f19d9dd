"""Checkpoints: the record of a forward, which its recompute in backward repeats exactly.

``fp8core.checkpoint`` records the layers that ran on a :class:`Tape`; the recompute replays it with
the same recipe, the same delayed scales and the same weights, and records no amax twice. A layer
that runs inside backward without a tape is part of another library's recompute: it runs only if
nothing can have changed since the forward, or if the model's output keeps the scales
(:func:`keep_scales`).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint as torch_checkpoint

from fp8core.context.autocast import activated, active_name
from fp8core.dispatch import policy
from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.scaling import join_backward, offer_scales, present_scales
from fp8core.tensors.weights import CachedWeight, version_of
from fp8core.torch_ops.private import NO_BACKWARD_PASS, current_backward_pass, pytree


class TapeEntry(NamedTuple):
    """A layer's forward: its label, what it was bound for, its weights and delayed scales.

    ``versions`` count the writes to its parameters, by name; ``scale`` is a copy of the delayed
    scales.
    ``first_microbatch`` is the argument of the call, ``weights`` are the stored quantized weights
    that the call used because of it.
    """

    label: str
    key: tuple[object, ...]
    versions: dict[str, int]
    scale: torch.Tensor | None
    first_microbatch: bool | None
    weights: dict[int, CachedWeight]


class Tape:
    """The layers of one checkpointed forward, in order; ``is_replaying`` in its recompute.

    ``is_grad_enabled`` is the setting of the checkpoint's caller, as a reentrant checkpoint runs
    its forward without gradients. ``outer`` is the tape of the checkpoint around this one: it
    records the same layers, and a recompute of the outer checkpoint replays them from there.
    """

    def __init__(self, is_grad_enabled: bool, outer: Tape | None = None) -> None:
        self.is_grad_enabled: bool = is_grad_enabled if outer is None else outer.is_grad_enabled
        self.is_replaying = False
        self.backward_pass: int | None = None
        self._outer = outer
        self._entries: list[TapeEntry] = []
        self._next = 0

    def replay(self) -> None:
        """Go back to the first layer, and check layers from now on instead of recording them."""
        self.is_replaying = True
        self._next = 0
        self.backward_pass = None if self._outer is None else self._outer.backward_pass
        if self.backward_pass is None and is_in_backward():  # a debugger may unpack outside
            self.backward_pass = join_backward()

    @property
    def is_repeating(self) -> bool:
        """Whether a recompute runs now: of this checkpoint, or of one around it."""
        return self.is_replaying or (self._outer is not None and self._outer.is_repeating)

    def visit(
        self,
        label: str,
        key: tuple[object, ...],
        layer: torch.nn.Module,
        state: DelayedState | None,
        first_microbatch: bool | None = None,
    ) -> TapeEntry:
        """Record the forward of ``layer``, or return the recorded one that it repeats.

        Raises:
            OperandError: another layer, recipe, dtype or weight than in forward.
        """
        if self.is_replaying:
            return self._take(label, key, layer)
        if self._outer is None:
            scale = None if state is None else state.scale.clone()
            versions = {name: version_of(weight) for name, weight in layer.named_parameters()}
            entry = TapeEntry(label, key, versions, scale, first_microbatch, {})
        else:
            entry = self._outer.visit(label, key, layer, state, first_microbatch)
        self._record(entry, layer)
        return entry

    def _record(self, entry: TapeEntry, layer: torch.nn.Module) -> None:
        """Have the recompute repeat ``entry``, a forward of ``layer``, after those before it."""
        self._entries.append(entry)

    def _take(self, label: str, key: tuple[object, ...], layer: torch.nn.Module) -> TapeEntry:
        if self._next >= len(self._entries):
            raise OperandError(f"recompute of {label}: the forward ran fewer layers.")
        entry = self._entries[self._next]
        self._next += 1
        if entry.label != label:
            raise OperandError(f"recompute of {label}: the forward ran {entry.label} here.")
        if entry.key != key:
            raise OperandError(
                f"recompute of {label}: recipe, dtype, device or backend differ from the forward: "
                f"{key} instead of {entry.key}."
            )
        if any(_version_now(layer, name) != seen for name, seen in entry.versions.items()):
            raise OperandError(
                f"recompute of {label}: a parameter was written between forward and backward; "
                f"step the optimizer after backward."
            )
        return entry


class _Thread(threading.local):
    def __init__(self) -> None:
        self.tape: Tape | None = None


_thread = _Thread()


def current() -> Tape | None:
    """Return the tape of the checkpoint in which the calling thread runs; None outside of one."""
    return _thread.tape


@contextmanager
def playing(tape: Tape) -> Iterator[None]:
    """Have the calling thread's layers record on ``tape``, or replay it."""
    outer, _thread.tape = _thread.tape, tape
    try:
        yield
    finally:
        _thread.tape = outer


def is_in_backward() -> bool:
    """Say whether the calling thread is running a backward pass."""
    return current_backward_pass() != NO_BACKWARD_PASS


def keep_scales(output: Any, states: Sequence[DelayedState]) -> None:
    """Keep the scales that ``states`` have now for recomputes in the backward of ``output``.

    ``output`` holds tensors in any nesting.
    """
    outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    outputs = [tensor for tensor in outputs if tensor.requires_grad]
    if not states or not outputs:
        return
    scales = present_scales(states)
    for tensor in outputs:
        tensor.register_hook(lambda grad: offer_scales(scales))  # type: ignore[no-untyped-call]  # torch's


@contextmanager
def scale_of(state: DelayedState | None, scale: torch.Tensor | None) -> Iterator[None]:
    """Have ``state`` hold ``scale`` while the context is open; None leaves it as it is."""
    if state is None or scale is None:
        yield
        return
    before = state.scale.clone()
    try:
        _write(state, scale)
        yield
    finally:
        _write(state, before)


def _write(state: DelayedState, scale: torch.Tensor) -> None:
    with torch.no_grad():
        state.scale.copy_(scale)


def _version_now(layer: torch.nn.Module, name: str) -> int | None:
    """Return the writes to what ``layer`` has by the name of a parameter; None if it has nothing.

    FSDP1 gathers a parameter in backward into an attribute, of which ``named_parameters`` does not
    tell.
    """
    try:
        return version_of(operator.attrgetter(name)(layer))
    except AttributeError:
        return None


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: object | None = None,
    tp_group: object | None = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Compute ``function(*args, **kwargs)`` keeping its inputs, and recompute it in backward.

    The recompute runs under the ``autocast`` and ``use_backend`` that were active in forward, draws
    the same random numbers and records no amax, so results and gradients equal those without
    checkpointing bit for bit, and delayed scales advance once.

    Args:
        function: a module or function of tensors.
        use_reentrant: as in ``torch.utils.checkpoint``, which this function calls.
        distribute_saved_activations, get_rng_state_tracker: tensor parallelism, not offered; a
            value that asks for it raises UnsupportedError.
        tp_group: the ranks to distribute saved activations over, so it changes nothing.
    """
    for name, value in (
        ("distribute_saved_activations", distribute_saved_activations),
        ("get_rng_state_tracker", get_rng_state_tracker),
    ):
        if value:
            raise UnsupportedError(f"checkpoint({name}={value!r}) is not offered.")
    active, chosen = active_name(), policy.chosen()
    tape = Tape(torch.is_grad_enabled(), outer=current())
    is_first = True
    # Of a forward that raises, torch 2.11 leaves the hooks open for as long as the error lives.
    error: BaseException | None = None

    def run(*inputs: Any, **named: Any) -> Any:
        nonlocal error, is_first
        is_forward, is_first = is_first, False
        if not is_forward:
            tape.replay()
        try:
            with activated(active), policy.activated(chosen), playing(tape):
                outputs = function(*inputs, **named)
        except BaseException as raised:
            if use_reentrant or not is_forward:
                raise
            error = raised
            return None
        return pytree.tree_map_only(torch.Tensor, _apart, outputs) if use_reentrant else outputs

    if use_reentrant and kwargs:  # torch takes no keywords there: gradients would get lost
        _refuse_gradients(kwargs)
        run, kwargs = partial(run, **kwargs), {}
    outputs = torch_checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
    if error is not None:
        try:
            raise error
        finally:
            error = None  # which its traceback refers to
    return outputs


def _refuse_gradients(keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise UnsupportedError(
                f"checkpoint({name}=tensor that requires gradients) needs use_reentrant=False, "
                f"or the tensor as a positional argument."
            )


def _apart(output: torch.Tensor) -> torch.Tensor:
    """Return ``output``, but a view of a parameter, as a layer with ``return_bias`` returns it.

    torch's function makes what it returns its own result: the parameter, a frozen one too, would be
    no leaf any more, and backward of the next step would run that of this one.
    """
    is_parameter = isinstance(output, torch.nn.Parameter) or output.requires_grad
    return output.view_as(output) if output.is_leaf and is_parameter else output
