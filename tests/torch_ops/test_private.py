"""torch's private names: what a torch without one of them leads to, and what each one answers."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.optim import optimizer

from fp8core.torch_ops import private


def imported_again() -> dict[str, Any]:
    assert private.__file__ is not None
    return runpy.run_path(private.__file__)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch._C, "_current_graph_task_id"),
        (torch._C, "_TensorMeta"),
        (torch.nn.Module, "_compiled_call_impl"),
        (forward_ad, "_current_level"),
    ],
)
def test_a_torch_without_a_needed_name_is_refused_by_that_name(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=rf"torch {torch.__version__[:3]}.* lacks one: .*{name}"):
        imported_again()


def test_without_the_one_autocast_query_every_device_type_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    assert imported_again()["is_any_autocast_enabled"]()


def test_without_the_list_of_foreach_types_none_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(optimizer, "_foreach_supported_types")
    assert imported_again()["foreach_types"] == []


def test_queries_are_c_functions_and_cost_no_python_frame() -> None:
    for query in (
        private.current_backward_pass,
        private.current_node,
        private.forward_mode_level,
        private.is_any_autocast_enabled,
        private.is_functional,
        private.is_legacy_batched,
        private.is_transform_active,
        private.is_transform_wrapped,
        private.is_zero_tensor,
        private.next_node_number,
        private.node_number,
        private.saved_tensor_hooks,
        private.schema_of,
    ):
        assert not hasattr(query, "__code__"), query


def test_nothing_is_captured_before_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a torch that was built with CUDA, on a machine without a visible device."""

    def refuse() -> bool:
        raise RuntimeError("CUDA error: no CUDA-capable device is detected")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    assert not private.is_capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert private.is_capturing()


def test_the_front_end_asks_torch_for_a_capture_in_one_place() -> None:
    package = Path(private.__file__).parent.parent
    asking = [f for f in package.rglob("*.py") if "is_current_stream_capturing" in f.read_text()]
    assert asking == [Path(private.__file__)]


def test_the_level_of_forward_mode_follows_torch() -> None:
    assert private.forward_mode_level() == -1
    with forward_ad.dual_level():  # type: ignore[no-untyped-call]  # torch's
        assert private.forward_mode_level() == 0


def test_the_backward_pass_is_known_inside_it_alone() -> None:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(private.current_backward_pass()))  # type: ignore[no-untyped-call]  # torch's
    assert private.current_backward_pass() == private.NO_BACKWARD_PASS
    y.backward()  # type: ignore[no-untyped-call]  # torch's
    assert len(seen) == 1
    assert seen[0] != private.NO_BACKWARD_PASS


def test_node_numbers_grow_in_the_order_of_the_forward() -> None:
    x = torch.ones(1, requires_grad=True)
    before = private.next_node_number()
    y = x * 2
    assert before <= private.node_number(y.grad_fn) < private.next_node_number()
