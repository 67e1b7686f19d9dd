"""Laws 5 and 7 for every operation: a supported descriptor runs, no input is written, and a result
depends on the arguments of its call alone: on no garbage, earlier call, thread or generator."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8core.backend_api import AddNormDesc, FusedDesc, OpDesc
from fp8core.conformance import inputs
from fp8core.conformance.calls import ORDINARY, Case, OpCall, arguments
from fp8core.conformance.checks import EVERY_OP, law
from fp8core.conformance.compare import Broken, require, same_bits, same_tensors, signature
from fp8core.conformance.laws.fused import add_pair, pair
from fp8core.conformance.subject import Subject, on_cpu
from fp8core.torch_ops.private import TorchDispatchMode, pytree

TOLERANCE = 2.0**-6
"""The largest difference of two results of one computation, as a share of the largest value.

Two runs may add in different orders, and differ in their bits; a result of garbage differs by more.
"""

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Garbage(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Fills the memory of every new uninitialised tensor with one byte; 0xff is NaN in most
    formats."""

    def __init__(self, byte: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._byte = byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = func(*args, **(kwargs or {}))
        if func in _EMPTY and x.untyped_storage().nbytes():
            memory = torch.empty(0, dtype=torch.uint8, device=x.device)
            memory.set_(x.untyped_storage()).fill_(self._byte)
        return x


def _same_but_for_order(name: str, ours: Any, theirs: Any) -> None:
    """Require the results of two calls to be equal, or as near as another order of sums allows."""
    require(signature(ours) == signature(theirs), f"{name}: another shape or dtype")
    for mine, yours in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if not isinstance(mine, torch.Tensor):
            continue
        if not mine.is_floating_point():
            same_bits(name, mine, yours)
            continue
        mine, yours = mine.double(), yours.double()
        finite = yours.isfinite()
        require(
            torch.equal(mine[~finite].nan_to_num(), yours[~finite].nan_to_num()),
            f"{name}: non-finite values in other places",
        )
        if finite.any():
            allowed = TOLERANCE * float(yours[finite].abs().max())
            error = (mine[finite] - yours[finite]).abs().nan_to_num(nan=torch.inf)
            worst = float(error.max())
            require(worst <= allowed, f"{name}: differs by {worst:.3g}, at most {allowed:.3g}")


@law(7, *EVERY_OP)
def what_is_declared_runs(subject: Subject, desc: OpDesc) -> None:
    """A supported descriptor runs, and returns tensors of the right shapes, dtypes and device."""
    call = arguments(subject, desc)
    expected = signature(judged(subject, call)[0])
    try:
        result = call.run(subject)
    except Exception as error:  # a third party's backend may raise anything
        raise Broken(
            f"says that it supports {desc}, but raises {type(error).__name__}: {error}"
        ) from error
    require(signature(result) == expected, f"returned {signature(result)}, expected {expected}")
    for part in pytree.tree_leaves(result):
        if isinstance(part, torch.Tensor):
            require(part.device == subject.device, f"returned a tensor on {part.device}")


@law(5, *EVERY_OP)
def inputs_are_not_written(subject: Subject, desc: OpDesc) -> None:
    """Only out and amax_out are written, and the result shares no memory with another argument."""
    call = arguments(subject, desc)
    before = on_cpu(call.protected())
    result = call.run(subject)
    leaves = zip(pytree.tree_leaves(call.protected()), pytree.tree_leaves(before), strict=True)
    results = {_memory(part): at for at, part in enumerate(pytree.tree_leaves(result))}
    for at, (after, saved) in enumerate(leaves):
        if isinstance(after, torch.Tensor):
            same_bits(f"input tensor {at}", after, saved)
            shared = results.get(_memory(after))
            require(shared is None, f"tensor {shared} of the result is memory of input tensor {at}")


def _memory(leaf: Any) -> object:
    """Return a key of the memory of ``leaf``: equal for a tensor and its views, unique without
    memory."""
    is_stored = isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes()
    return leaf.untyped_storage().data_ptr() if is_stored else object()


@law(7, *EVERY_OP)
def no_result_depends_on_uninitialised_memory(subject: Subject, desc: OpDesc) -> None:
    """Results do not depend on the bytes that new memory holds."""
    outcomes = []
    for byte in (None, 0xFF, 0x5A):
        call = arguments(subject, desc)
        if byte is None:
            result = call.run(subject)
        else:
            with _Garbage(byte):
                result = call.run(subject)
        outcomes.append(outcome(call, result))
    for byte, changed in zip((0xFF, 0x5A), outcomes[1:], strict=True):
        _same_but_for_order(f"with new memory full of {byte:#x}", changed, outcomes[0])


_NOT_VIEWED = ("gemm", "grouped_gemm", "scale_update", "adam")  # adam has a law of its own
VIEWED = tuple(op for op in EVERY_OP if op not in _NOT_VIEWED)
SIZES = ((), (64, 64))  # only strides tell the rows of a square matrix from its columns


@law(7, *VIEWED)
def inputs_may_have_any_strides(subject: Subject, desc: OpDesc) -> None:
    """Inputs with gaps, stored by columns, at odd addresses or with stride 0 are read right."""
    views = {
        "strided": inputs.strided,
        "aligned": inputs.aligned,
        "shifted": inputs.shifted,
        "transposed": inputs.transposed,
        "expanded": inputs.expanded,
    }
    for size, (layout, view) in itertools.product(SIZES, views.items()):
        call = arguments(subject, desc, Case(size=size))

        def view_of(x: torch.Tensor, view: Any = view) -> torch.Tensor:
            # Rows that repeat are no valid argument where they are indices.
            is_viewable = x.is_floating_point() or view is not inputs.expanded
            return view(x) if x.dtype != torch.int64 and is_viewable else x

        views_of = pytree.tree_map_only(torch.Tensor, view_of, call.arguments)
        viewed = call._replace(arguments=views_of)
        plain = viewed._replace(
            arguments=pytree.tree_map_only(torch.Tensor, _contiguous, viewed.arguments),
            keywords=viewed.again().keywords,
        )
        of_views, of_copies = viewed.run(subject), plain.run(subject)
        shape = f" of {list(size)}" if size else ""
        _same_but_for_order(
            f"{layout} input{shape}", outcome(viewed, of_views), outcome(plain, of_copies)
        )


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


SECOND = Case(seed=1)
ROUNDS = 2
"""Repeats of a call, and calls of each of two threads at once."""


def outcome(call: OpCall, result: Any) -> Any:
    """Return the result of a call and the arguments that it wrote, copied to the CPU."""
    written = [value for at, value in enumerate(call.arguments) if at in call.written]
    written += [value for name, value in call.keywords.items() if name in call.written]
    return on_cpu((result, written))


def judged(subject: Subject, call: OpCall) -> Any:
    """Return the :func:`outcome` of ``call`` on the judge, a fusion as its unfused pair."""
    on_host = call._replace(arguments=on_cpu(call.arguments), keywords=dict(on_cpu(call.keywords)))

    def run(desc: OpDesc, *positional: Any, **named: Any) -> Any:
        return subject.judging(desc)(*positional, **named)

    if isinstance(call.desc, FusedDesc):
        return outcome(on_host, pair(run, on_host))
    if isinstance(call.desc, AddNormDesc):
        return outcome(on_host, add_pair(run, on_host))
    return outcome(on_host, run(on_host.desc, *on_host.arguments, **on_host.keywords))


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _overwrite(call: OpCall, source: OpCall) -> None:
    """Copy values from the tensors of ``source`` to those of ``call``, past version counters."""
    ours, theirs = (_leaves((op_call.arguments, op_call.keywords)) for op_call in (call, source))
    for target, value in zip(ours, theirs, strict=True):
        target.data.copy_(value)


def _num_different(first: torch.Tensor, second: torch.Tensor) -> int:
    if first.shape != second.shape:
        return first.numel()
    same = (first == second) | (first != first) & (second != second)
    return int((~same).sum())


@law(7, *EVERY_OP)
def no_result_is_kept_from_another_call(subject: Subject, desc: OpDesc) -> None:
    """New values give new results, whether in the same tensors or in new ones of their shapes."""
    call, second_call = (arguments(subject, desc, case).again() for case in (ORDINARY, SECOND))
    expected = [_leaves(judged(subject, op_call)) for op_call in (call, second_call)]
    again = second_call.again()
    first = outcome(call, call.run(subject))
    _overwrite(call, second_call.again())
    second = outcome(call, call.run(subject))
    third = outcome(again, again.run(subject))
    same_tensors("the same values in other tensors", third, second)
    ours = zip(_leaves(first), _leaves(second), strict=True)
    for at, (result_pair, expected_pair) in enumerate(
        zip(ours, zip(*expected, strict=True), strict=True)
    ):
        changed, due = _num_different(*result_pair), _num_different(*expected_pair)
        require(
            2 * changed >= due,
            f"tensor {at} of the result: other values change {changed} of {result_pair[0].numel()} "
            f"entries, expected about {due}",
        )


@law(7, *EVERY_OP)
def results_stay_when_it_runs_again(subject: Subject, desc: OpDesc) -> None:
    """The result of a call belongs to the caller: no later call writes into it."""
    call, second = arguments(subject, desc), arguments(subject, desc, SECOND)
    result = call.run(subject)
    before = outcome(call, result)
    second.run(subject)
    same_tensors("after another call", outcome(call, result), before)


@law(7, *EVERY_OP)
def every_run_gives_the_same_bits(subject: Subject, desc: OpDesc) -> None:
    """Each call with the same values gives the same bits: a recompute of activations needs them."""
    calls = [arguments(subject, desc)]
    calls += [calls[0].again() for _ in range(ROUNDS)]
    outcomes = [outcome(call, call.run(subject)) for call in calls]
    for number, result in enumerate(outcomes[1:], 2):
        same_tensors(f"call {number} of the same values", result, outcomes[0])


def _in_threads(*tasks: Callable[[], None]) -> None:
    """Run all tasks at once, each in a thread of its own; raise the first error of a task."""
    errors: list[BaseException] = []

    def run_task(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run_task, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@law(7, *EVERY_OP)
def every_thread_gets_the_same_results(subject: Subject, desc: OpDesc) -> None:
    """A call in a second thread gives the same results, also while two threads call at once.

    Autograd runs backward passes in threads that it starts itself.
    """
    calls = [arguments(subject, desc), arguments(subject, desc, SECOND)]
    of_threads = [[call.again() for _ in range(ROUNDS)] for call in calls]
    alone = calls[0].again()
    expected = [outcome(call, call.run(subject)) for call in calls]
    results: list[list[Any]] = [[], []]
    gate = threading.Barrier(2)

    def run_calls(thread: int) -> None:
        for call in of_threads[thread]:
            gate.wait(60)
            results[thread].append(outcome(call, call.run(subject)))

    _in_threads(
        lambda: same_tensors("in a second thread", outcome(alone, alone.run(subject)), expected[0])
    )
    with _switching_often():
        _in_threads(lambda: run_calls(0), lambda: run_calls(1))
    for results_of_thread, due in zip(results, expected, strict=True):
        for result in results_of_thread:
            same_tensors("in one of two threads at once", result, due)


def _generators(device: torch.device) -> list[Any]:
    """Return the states of the process's generators of random numbers."""
    states: list[Any] = [torch.get_rng_state(), random.getstate()]
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        states.append(module.get_rng_state(device))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, words, *position = numpy.random.get_state()
        states.append((words.tobytes(), *position))
    return states


@law(7, *EVERY_OP)
def no_global_generator_is_used(subject: Subject, desc: OpDesc) -> None:
    """Random numbers come from ``rng`` alone, never from torch's, Python's or numpy's generator."""
    call = arguments(subject, desc)
    before = _generators(subject.device)
    call.run(subject)
    pairs = zip(_generators(subject.device), before, strict=True)
    for name, (now, was) in zip(("torch's", "Python's", "another", "numpy's"), pairs, strict=False):
        is_same = torch.equal(now, was) if isinstance(now, torch.Tensor) else now == was
        require(is_same, f"{name} global generator was advanced")
    outcomes = []
    is_device = subject.device.type not in ("cpu", "meta")
    devices = [subject.device] if is_device else []
    with torch.random.fork_rng(devices, device_type=subject.device.type if is_device else "cuda"):
        for seed in (1, 2):
            torch.manual_seed(seed)
            seeded = arguments(subject, desc)
            outcomes.append(outcome(seeded, seeded.run(subject)))
    same_tensors("with another seed of torch's global generator", outcomes[1], outcomes[0])
