"""``use_backend``: nested, re-entrant, per thread, and checked when it is made."""

from __future__ import annotations

import contextlib
import threading

import pytest

import fp8core
from fp8core.backend_api import OPS
from fp8core.dispatch import policy
from fp8core.dispatch.policy import NO_POLICY, Policy
from fp8core.errors import PluginError, RecipeError
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
