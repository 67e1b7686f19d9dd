"""Where the tensors of tests live: on the CPU, or on a GPU where TEST_DEVICE=cuda is set.

Tests name no device: :func:`tensors_on` makes one torch's default while they are collected and run.
What they draw has the numbers of the CPU on every device, so that a test that fails on one of them
had the same inputs as on the other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests import forked
from tests.ranks import DEVICE_TYPE

DEVICE = torch.device("cuda", 0) if DEVICE_TYPE == "cuda" else torch.device("cpu")
"""For tests that have to name the device."""

CUDA_WARNINGS = (
    "ignore:The AccumulateGrad node's stream",
    "ignore:The CUDA Graph is empty:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
)
"""Of torch, about what tests do by intent on a GPU."""

NOT_ON_CUDA: dict[str, str] = {
    "tests/modules/test_meta.py": "about the meta device and the CPU",
    "tests/tensors/test_views.py::test_an_index_out_of_range_is_an_error": (
        "torch's kernel of an index asserts on the GPU, which ends CUDA in the process"
    ),
}
"""Tests of one device alone among those that ``python -m tests --gpu layers`` runs: a file, or a
function of it as pytest names it without parameters, and the reason."""

_DRAWS = {torch.randn, torch.rand, torch.randint, torch.randperm}
_TO_NUMPY = {torch.Tensor.numpy, torch.Tensor.__array__}
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+Error): ", re.MULTILINE)
_ABSENT = {
    "UnsupportedError": re.compile(
        r"no backend runs .*\n(?:.*\n)*?.*?\b(cuda: .*)|.*\bcompute capability \d+\.\d+.*"
    ),
    "NotImplementedError": re.compile(
        r"Could not run '\w+::.*?CUDA\w*' backend|.* not implemented for.*"
    ),
}
"""What an error of a name says where it is about the device; a group is the part that says it."""
# A program given by its path, begun where a device is torch's default.
_BEGIN = """
import runpy, sys, torch
torch.set_default_device(sys.argv[1])
del sys.argv[:2]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class _Numbers(TorchFunctionMode):
    """Draw on the CPU what is asked of the default device, and give numpy what is on it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS and kwargs.get("device") is None and "out" not in kwargs:
            needs_grad = kwargs.get("requires_grad", False)
            drawn = func(*args, **{**kwargs, "device": "cpu", "requires_grad": False})
            return drawn.to(self._device).requires_grad_(needs_grad)
        if func in _TO_NUMPY:
            return func(args[0].cpu(), *args[1:], **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Put the tensors that name no device on ``device`` inside of this context."""
    if device == "cpu":
        yield
        return
    from_numpy, run = torch.from_numpy, threading.Thread.run

    def run_on_device(thread: threading.Thread) -> None:
        with torch.device(device), _Numbers(device):  # torch's modes are a thread's own
            run(thread)

    with pytest.MonkeyPatch.context() as patch, torch.device(device), _Numbers(device):
        patch.setattr(torch, "from_numpy", lambda array: from_numpy(array).to(device))
        patch.setattr(threading.Thread, "run", run_on_device)
        yield


def import_inductor() -> None:
    """Import what ``torch.compiler.reset()`` does: torch says of it that parts are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.cudagraph_trees")


def reason_to_skip(nodeid: str) -> str | None:
    """The reason why a test does not run where the tensors of tests live, or None."""
    if DEVICE_TYPE == "cpu":
        return None
    function = nodeid.partition("[")[0]
    return NOT_ON_CUDA.get(function) or NOT_ON_CUDA.get(nodeid.partition("::")[0])


def absent(text: str) -> str | None:
    """What the last error of a traceback says that the GPU, or torch on it, lacks; else None."""
    errors = list(_ERROR.finditer(text))
    if DEVICE_TYPE == "cpu" or not errors or errors[-1][1] not in _ABSENT:
        return None
    found = _ABSENT[errors[-1][1]].search(text, errors[-1].end())
    return found and found[found.lastindex or 0].strip()


def skip_if_absent(error: BaseException) -> None:
    """Skip the test that raised ``error`` if that is about what the device lacks."""
    reason = absent(f"{type(error).__name__}: {error}")
    if reason is not None:
        pytest.skip(reason)


@contextlib.contextmanager
def running_a_test() -> Iterator[None]:
    """Run a test: skip it for what the GPU lacks, and end the process with a GPU that it broke.

    After an assertion of a kernel or an illegal access, nothing runs on CUDA in this process. Of
    pytest's processes another one takes over, and the test is named.
    """
    try:
        yield
    except NotImplementedError as error:
        skip_if_absent(error)
        raise
    except AssertionError as error:
        # pytest.raises, of an error that says something else than the test expects.
        if isinstance(error.__context__, NotImplementedError):
            skip_if_absent(error.__context__)
        raise
    finally:
        if DEVICE_TYPE == "cuda" and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"CUDA cannot go on in this process: {error}", file=sys.stderr, flush=True)
                os._exit(1)


def run_program(
    path: Path,
    *arguments: str,
    folder: Path,
    options: Sequence[str] = (),
    device: str = DEVICE_TYPE,
) -> str:
    """What a file of Python prints in ``folder`` where ``device`` is torch's default."""
    begin = [] if device == "cpu" else ["-c", _BEGIN, device]
    return run(*options, *begin, str(path), *arguments, folder=folder)


def run(*arguments: str, folder: Path, num_devices: int = 1) -> str:
    """What Python prints for ``arguments`` in ``folder``; skip the test for what the GPU lacks.

    The process sees GPUs only if tests run on one: programs take the best device there is.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if DEVICE_TYPE == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif torch.cuda.device_count() < num_devices:
        pytest.skip(f"needs {num_devices} GPUs")
    done = forked.run([sys.executable, *arguments], cwd=folder, env=variables)
    if done.returncode and (reason := absent(done.stderr)):
        pytest.skip(reason)
    assert done.returncode == 0, done.stderr
    return done.stdout
