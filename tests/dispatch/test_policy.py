"""``use_backend``: nested, re-entrant, per thread, and checked when it is made; ``leaving_out``."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest

import fp8core
from fp8core.backend_api import OPS, OpDesc
from fp8core.dispatch import policy, select, table
from fp8core.dispatch.policy import NO_POLICY, Policy
from fp8core.errors import PluginError, RecipeError, UnsupportedError
from tests.dispatch import toys


@pytest.fixture(autouse=True)
def two_toys(isolated: None) -> None:
    toys.register(toys.backend("one"), toys.backend("two"))


def test_there_is_no_policy_outside() -> None:
    assert policy.current() == NO_POLICY


USED: dict[str, tuple[list[tuple[tuple[str, ...], dict[str, str]]], Policy]] = {
    "a whole backend": ([(("one",), {})], Policy("one")),
    "single operations": (
        [((), {"quantize": "two", "gemm": "one"})],
        Policy(None, (("gemm", "one"), ("quantize", "two"))),
    ),
    "exceptions to a whole backend": (
        [(("one",), {"gemm": "two"})],
        Policy("one", (("gemm", "two"),)),
    ),
    "an inner operation refines an outer backend": (
        [(("one",), {}), ((), {"gemm": "two"})],
        Policy("one", (("gemm", "two"),)),
    ),
    "inner operations add to outer ones": (
        [((), {"gemm": "one", "amax": "one"}), ((), {"gemm": "two"})],
        Policy(None, (("amax", "one"), ("gemm", "two"))),
    ),
    "an inner backend takes back outer operations": (
        [((), {"gemm": "one"}), (("two",), {})],
        Policy("two"),
    ),
}


def test_what_is_used_is_in_force_inside() -> None:
    for case, (uses, expected) in USED.items():
        with contextlib.ExitStack() as stack:
            for backend, operations in uses:
                stack.enter_context(fp8core.use_backend(*backend, **operations))
            assert policy.current() == expected, case


def test_exit_restores_the_outer_policy() -> None:
    with fp8core.use_backend("one"):
        with fp8core.use_backend("two"):
            assert policy.current() == Policy("two")
        assert policy.current() == Policy("one")
    assert policy.current() == NO_POLICY


def test_one_object_can_be_entered_while_it_is_active() -> None:
    one = fp8core.use_backend("one")
    with one, fp8core.use_backend("two"):
        with one:
            assert policy.current() == Policy("one")
        assert policy.current() == Policy("two")
    assert policy.current() == NO_POLICY


def test_one_object_can_be_entered_again() -> None:
    one = fp8core.use_backend("one")
    for _ in range(2):
        with one:
            assert policy.current() == Policy("one")
    assert policy.current() == NO_POLICY


def test_exception_restores_the_outer_policy_and_passes() -> None:
    with fp8core.use_backend("one"):
        with pytest.raises(KeyError, match="body"), fp8core.use_backend("two"):
            raise KeyError("body")
        assert policy.current() == Policy("one")


def test_another_thread_has_its_own_policy() -> None:
    seen: list[Policy] = []

    def work() -> None:
        seen.append(policy.current())
        with fp8core.use_backend("two"):
            seen.append(policy.current())

    with fp8core.use_backend("one"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert policy.current() == Policy("one")
    assert seen == [NO_POLICY, Policy("two")]


def test_one_object_can_be_active_in_two_threads() -> None:
    one = fp8core.use_backend("one")
    both_inside = threading.Barrier(2, timeout=60)
    seen: list[Policy] = []

    def work() -> None:
        with one:
            both_inside.wait()
            seen.append(policy.current())
        seen.append(policy.current())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, seen)) == sorted(map(str, 2 * [Policy("one"), NO_POLICY]))


def test_unknown_backend_is_refused_at_once_with_the_list_and_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        fp8core.use_backend("refrence")
    message = str(caught.value)
    assert "use_backend() asks for backend 'refrence'" in message
    assert "installed: one, reference, two" in message
    assert "Did you mean 'reference'?" in message


def test_unknown_backend_of_an_operation_is_refused_at_once() -> None:
    with pytest.raises(RecipeError, match="backend 'three', which is not installed"):
        fp8core.use_backend("one", gemm="three")


def test_unknown_operation_is_refused_at_once_with_the_list_and_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        fp8core.use_backend(gem="one")
    message = str(caught.value)
    assert "use_backend() names the operation 'gem'" in message
    assert ", ".join(OPS) in message
    assert "Did you mean 'gemm'?" in message


def test_refused_request_changes_nothing() -> None:
    with fp8core.use_backend("one"):
        with pytest.raises(RecipeError):
            fp8core.use_backend("three").__enter__()
        assert policy.current() == Policy("one")


def test_backend_of_a_broken_plugin_is_refused_with_its_reason(install: toys.Install) -> None:
    install(toy_broken="import toy_nowhere")
    fp8core.dispatch.plugins.reload()
    with pytest.raises(PluginError, match="No module named 'toy_nowhere'"):
        fp8core.use_backend("toy_broken")


def refused(desc: OpDesc, asked: str | None = None) -> str:
    """Return why dispatch refuses ``desc`` on the CPU, asked for a backend as an argument."""
    with pytest.raises(UnsupportedError) as caught:
        select.choose(desc, toys.CPU, policy.current(), asked)
    return str(caught.value)


def test_a_backend_that_is_left_out_is_not_chosen_and_says_why() -> None:
    first, second = (select.choose(toys.GEMM, toys.CPU, NO_POLICY).backend, "two")
    assert first == "one"
    with policy.leaving_out("one", "gemm", because="it is slow"):
        choice = select.choose(toys.GEMM, toys.CPU, policy.current())
        assert choice.backend == second
        assert choice.because == "one is left out: it is slow"
        assert choice.substitution is None
        assert "one: left out: it is slow" in str(choice)
        assert not select.declined(choice)
        assert table.resolve(toys.GEMM, toys.CPU).choice.backend == second
        assert table.resolve_optional(toys.GEMM, toys.CPU, "one") is None
        assert table.resolve(toys.QUANTIZE, toys.CPU).choice.backend == first
        reference = policy.leaving_out("reference", "gemm", because="it emulates")
        with policy.leaving_out("two", because="it is new"), reference:
            message = refused(toys.GEMM)
            assert "one: left out: it is slow" in message
            assert "two: left out: it is new" in message
            assert "reference: left out: it emulates" in message
            assert select.choose(toys.QUANTIZE, toys.CPU, policy.current()).backend == first
        assert select.choose(toys.GEMM, toys.CPU, policy.current()).backend == second
    assert table.resolve(toys.GEMM, toys.CPU).choice.backend == first


def test_a_backend_that_is_left_out_is_refused_to_whoever_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "asks for one, which is left out of gemm: it is slow"
    one = functools.partial(policy.leaving_out, "one", "gemm", because="it is slow")
    pairs = ((one(), fp8core.use_backend("one")), (fp8core.use_backend(gemm="one"), one()))
    for outer, inner in pairs:
        with outer, inner:
            assert f"use_backend() {said}" in refused(toys.GEMM)
            assert f"use_backend() {said}" in refused(toys.PLAIN_GEMM)
    with one(), fp8core.use_backend("two"):
        assert f"the argument backend= {said}" in refused(toys.GEMM, "one")
        assert select.choose(toys.GEMM, toys.CPU, policy.current()).backend == "two"
    with one(), fp8core.use_backend("one", gemm="two"):
        assert select.choose(toys.GEMM, toys.CPU, policy.current()).backend == "two"
    monkeypatch.setenv("FP8CORE_BACKEND", "one")
    with one():
        assert f"FP8CORE_BACKEND {said}" in refused(toys.GEMM)
    assert select.choose(toys.GEMM, toys.CPU, policy.current()).backend == "one"


def test_what_is_left_out_is_of_one_thread_and_checked() -> None:
    one = functools.partial(policy.leaving_out, "one", "gemm", because="it is slow")
    seen: list[Policy] = []
    with one(), one():
        assert policy.current() == Policy(left_out=(("one", "gemm", "it is slow"),))
        assert Policy(*policy.current().values()) == policy.current()
        thread = threading.Thread(target=lambda: seen.append(policy.current()))
        thread.start()
        thread.join()
    assert seen == [NO_POLICY] == [policy.current()]
    for backend, op, because, said in (
        ("three", "gemm", "it is slow", r"leaving_out\(\) asks for backend 'three'"),
        ("one", "gem", "it is slow", r"leaving_out\(\) names the operation 'gem'"),
        ("one", "gemm", "", "say why"),
        (["one"], "gemm", "it is slow", r"got \['one'\] \(list\)"),
        ("one", 3, "it is slow", r"got 3 \(int\)"),
        ("one", "gemm", 3, r"got 3 \(int\)"),
    ):
        with pytest.raises(RecipeError, match=said):
            policy.leaving_out(backend, op, because=because).__enter__()
        assert policy.current() == NO_POLICY
