"""Law 7 for any operation: a result depends on the arguments of its call, and on nothing else."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8core.backend_api import AddNormDesc, FusedDesc, OpDesc
from fp8core.conformance.calls import ORDINARY, Case, OpCall, arguments
from fp8core.conformance.checks import EVERY_OP, law
from fp8core.conformance.compare import require, same_bits, signature
from fp8core.conformance.laws.fused import add_pair, pair
from fp8core.conformance.subject import Subject, on_cpu
from fp8core.torch_ops.private import pytree

SECOND = Case(seed=1)
ROUNDS = 2
"""Calls of each of two threads that run at once."""


def outcome(call: OpCall, result: Any) -> Any:
    """Return the result of a call and the arguments that it wrote, copied to the CPU."""
    written = [value for at, value in enumerate(call.arguments) if at in call.written]
    written += [value for name, value in call.keywords.items() if name in call.written]
    return on_cpu((result, written))


def judged(subject: Subject, call: OpCall) -> Any:
    """Return the :func:`outcome` of a call that the judge runs."""
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


def _same(title: str, ours: Any, theirs: Any) -> None:
    require(signature(ours) == signature(theirs), f"{title}: another shape or dtype")
    for at, (mine, yours) in enumerate(zip(_leaves(ours), _leaves(theirs), strict=True)):
        same_bits(f"{title}: tensor {at}", mine, yours)


def _overwrite(call: OpCall, source: OpCall) -> None:
    """Copy the values of ``source``'s tensors to those of ``call``, unseen by version counters."""
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
    """Other values, in the same tensors or in others of their shapes, give other results."""
    call, second_call = (arguments(subject, desc, case).again() for case in (ORDINARY, SECOND))
    expected = [_leaves(judged(subject, op_call)) for op_call in (call, second_call)]
    again = second_call.again()
    first = outcome(call, call.run(subject))
    _overwrite(call, second_call.again())
    second = outcome(call, call.run(subject))
    third = outcome(again, again.run(subject))
    _same("the same values in other tensors", third, second)
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
    _same("after another call", outcome(call, result), before)


@law(7, *EVERY_OP)
def every_run_gives_the_same_bits(subject: Subject, desc: OpDesc) -> None:
    """The same values give the same bits each time, as a recompute of activations relies on."""
    calls = [arguments(subject, desc)]
    calls += [calls[0].again() for _ in range(ROUNDS)]
    outcomes = [outcome(call, call.run(subject)) for call in calls]
    for number, result in enumerate(outcomes[1:], 2):
        _same(f"call {number} of the same values", result, outcomes[0])


def _in_threads(*tasks: Callable[[], None]) -> None:
    """Run each task in a thread, all at once; raise the first error of a task."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
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
    """A second thread gets the results of the first, also while both run at once.

    Autograd runs backward passes in threads that it starts itself.
    """
    calls = [arguments(subject, desc), arguments(subject, desc, SECOND)]
    spare = [[call.again() for _ in range(ROUNDS)] for call in calls]
    alone = calls[0].again()
    expected = [outcome(call, call.run(subject)) for call in calls]
    results: list[list[Any]] = [[], []]
    gate = threading.Barrier(2)

    def work(which: int) -> None:
        for call in spare[which]:
            gate.wait(60)
            results[which].append(outcome(call, call.run(subject)))

    _in_threads(
        lambda: _same("in a second thread", outcome(alone, alone.run(subject)), expected[0])
    )
    with _switching_often():
        _in_threads(lambda: work(0), lambda: work(1))
    for which, of_thread in enumerate(results):
        for result in of_thread:
            _same("in one of two threads at once", result, expected[which])


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
    """No operation draws from torch's, Python's or numpy's generator; rng alone gives noise."""
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
    _same("with another seed of torch's global generator", outcomes[1], outcomes[0])
