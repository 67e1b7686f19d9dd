"""Tensors of tests live on one device, and draw the same numbers on every one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from fp8core.errors import UnsupportedError
from tests import device, forked, on_gpu
from tests.device import absent, reason_to_skip, run_program, tensors_on
from tests.on_gpu import ROOT

MESSAGE = """Traceback (most recent call last):
  File "page.py", line 3, in <module>
fp8core.errors.UnsupportedError: no backend runs GemmDesc on cuda:0
  cuda: MX block scales need compute capability 10.0
  reference: emulates it on any device
"""

SHARED = """
import pytest
from fp8core.errors import UnsupportedError
from tests import device
from tests.conftest import pytest_fixture_setup  # the hook

device.DEVICE_TYPE = "cuda"

@pytest.fixture(scope="module")
def shared():
    raise UnsupportedError("no backend runs it\\n  cuda: needs compute capability 10.0")
"""


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DEVICE_TYPE", "cuda")


def test_tensors_that_name_no_device_are_on_the_default_one() -> None:
    with tensors_on("meta"):
        tensors = [
            *(torch.zeros(2), torch.tensor([1.0]), torch.randn(2), torch.randperm(3)),
            torch.randn(2, generator=torch.Generator().manual_seed(0), requires_grad=True),
            torch.from_numpy(np.ones(2)),
        ]
        named = torch.zeros(2, device="cpu"), torch.randn(2, device="cpu")
    assert [one.device.type for one in tensors] == ["meta"] * len(tensors)
    assert [one.device.type for one in named] == ["cpu"] * len(named)
    assert tensors[4].is_leaf
    assert tensors[4].requires_grad
    assert torch.zeros(1).device.type == torch.from_numpy(np.ones(1)).device.type == "cpu"


def test_threads_have_the_same_default() -> None:
    devices: list[str] = []
    with tensors_on("meta"):
        thread = threading.Thread(target=lambda: devices.append(torch.zeros(1).device.type))
        thread.start()
        thread.join()
    assert devices == ["meta"]


def test_draws_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    expected = torch.randn(4), torch.randint(9, (4,))
    torch.manual_seed(0)
    # "cpu:0" is to torch another device than "cpu", and has the same memory.
    with tensors_on("cpu:0"):
        drawn = torch.randn(4), torch.randint(9, (4,))
        assert np.array_equal(drawn[0].numpy(), np.asarray(expected[0]))
    assert all(map(torch.equal, drawn, expected))


def test_absent_hardware_is_named_where_an_error_says_so(on_cuda: None) -> None:
    assert absent(MESSAGE) == "cuda: MX block scales need compute capability 10.0"
    assert (
        absent("""UnsupportedError: Linear(8, 8): no backend runs GemmDesc(a=hif8) on cuda:0
  ascend: runs on npu, not on cuda
  cuda: no kernels for format hif8
  reference: emulates it on any device""")
        == "cuda: no kernels for format hif8"
    )
    lacking = (
        "NotImplementedError: Could not run 'aten::x' with arguments from the 'NestedCUDA' backend."
    )
    assert "aten::x" in str(absent(lacking))


@pytest.mark.parametrize(
    "text",
    [
        "fp8core.errors.UnsupportedError: offered in no recipe",
        "UnsupportedError: no backend runs GemmDesc on cuda:0\n  reference: emulates it",
        f"{MESSAGE}\nDuring handling of it:\n\nValueError: 1",
        "AssertionError: compute capability 9.0",
        "",
    ],
)
def test_other_errors_are_about_more_than_the_device(text: str, on_cuda: None) -> None:
    assert absent(text) is None


def test_test_that_asks_for_absent_hardware_is_skipped(on_cuda: None) -> None:
    with pytest.raises(pytest.skip.Exception, match="MX block scales"), device.running_a_test():
        raise UnsupportedError(
            "no backend runs it\n  cuda: MX block scales need compute capability 10.0"
        )
    with pytest.raises(UnsupportedError, match="offered"), device.running_a_test():
        raise UnsupportedError("offered in no recipe")


def test_every_test_of_a_fixture_that_asks_for_absent_hardware_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SHARED)
    tests = "def test_first(shared): pass\ndef test_second(shared): pass\n"
    (tmp_path / "test_shared.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:warnings", "-c", os.devnull, "."]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = forked.run(command, cwd=tmp_path, env=variables)
    assert "== 2 skipped in" in done.stdout, done.stdout


def test_test_that_expects_another_error_than_of_absent_hardware_is_skipped(on_cuda: None) -> None:
    def fail(message: str) -> None:
        with device.running_a_test(), pytest.raises(UnsupportedError, match="frozen"):
            raise UnsupportedError(message)

    fail("frozen weights")
    with pytest.raises(pytest.skip.Exception, match="no kernels"):
        fail("no backend runs it on cuda:0\n  cuda: no kernels for format hif8")
    with pytest.raises(AssertionError, match="thawed"):
        fail("thawed weights")


def test_failed_test_leaves_no_checkpoint_open() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"{(x * x).numel()}")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="3") as caught, device.running_a_test():
        torch.utils.checkpoint.checkpoint(fails, x, use_reentrant=False)
    assert torch.equal(torch.func.grad(torch.sum)(x), torch.ones(3))  # refused while hooks are open
    assert caught.traceback[-1].name == "fails"


def test_process_whose_gpu_broke_ends(monkeypatch: pytest.MonkeyPatch, on_cuda: None) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    ended: list[int] = []
    monkeypatch.setattr(device.os, "_exit", ended.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with device.running_a_test():
        pass
    assert ended == []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(IndexError), device.running_a_test():
        raise IndexError
    assert ended == [1]


def test_nothing_is_absent_or_skipped_on_the_cpu() -> None:
    assert absent(MESSAGE) is None
    assert all(reason_to_skip(name) is None for name in device.NOT_ON_CUDA)


def test_reason_covers_a_file_or_a_function_with_its_parameters(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"tests/a.py": "of files", "tests/b.py::test_b": "of gloo"}
    monkeypatch.setattr(device, "NOT_ON_CUDA", table)
    names = ("tests/a.py::test_a", "tests/b.py::test_b[x::y]", "tests/b.py::test_other")
    assert [reason_to_skip(name) for name in names] == ["of files", "of gloo", None]
    table["tests/b.py::test_other[1]"] = "of one"
    numbers = (f"tests/b.py::test_other[{number}]" for number in (1, 2))
    assert [reason_to_skip(name) for name in numbers] == ["of one", None]


def test_program_begins_where_a_device_is_the_default(tmp_path: Path) -> None:
    text = "import sys, torch\nprint(torch.zeros(1).device, sys.argv[1:], __name__)\n"
    (tmp_path / "program.py").write_text(text)
    run = run_program(tmp_path / "program.py", "-x", folder=tmp_path, device="meta")
    assert run == "meta ['-x'] __main__\n"


def test_every_test_with_a_reason_exists() -> None:
    for name in device.NOT_ON_CUDA:
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text("utf-8"), name


def test_every_file_of_tests_is_run_by_a_part_or_has_a_reason() -> None:
    covered = {*on_gpu.LAYERS, *on_gpu.PAGES, on_gpu.CUDA_TESTS}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        places = {name, *(parent.as_posix() for parent in Path(name).parents)}
        assert (places & covered) or (places & on_gpu.LEFT_OUT.keys()), f"{name} is in no part"
    for name in {*covered, *on_gpu.LEFT_OUT}:
        assert (ROOT / name).exists(), name
