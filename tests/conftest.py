"""What every test gets: a fixed seed, one marker for missing hardware, the golden vectors."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import logging
import subprocess
import types
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from fp8core.dispatch import process, table
from tests import device, forked
from tests.dispatch import toys
from tests.ranks import BACKENDS, DEVICE_TYPE, IMPORTS

ROOT = Path(__file__).resolve().parent.parent
NO_ACCELERATOR = "needs an accelerator"

# The examples are a function of the commit, so a failure in CI is one that everybody can repeat.
# No deadline: the first call of a torch operator is slower than the others.
settings.register_profile("fp8core", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fp8core")


def backends_folder() -> Path | None:
    """Folder that ``import fp8core_backends`` finds; None when fp8core is not installed."""
    spec = importlib.util.find_spec("fp8core_backends")
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def pytest_configure(config: pytest.Config) -> None:
    """Decide where the tensors of tests live before modules of tests make some.

    Python's collector would visit the modules and the thousands of tests again and again while they
    are collected: a third of the time.
    """
    gc.disable()
    if DEVICE_TYPE == "cuda":
        device.import_inductor()
    placement = contextlib.ExitStack()
    placement.enter_context(device.tensors_on(DEVICE_TYPE))
    config.add_cleanup(placement.close)
    for line in device.CUDA_WARNINGS if DEVICE_TYPE == "cuda" else ():
        config.addinivalue_line("filterwarnings", line)


def pytest_report_header() -> str:
    folder = backends_folder()
    return f"fp8core_backends: {folder or 'not installed, run `python -m pip install -e .`'}"


def pytest_sessionstart() -> None:
    """Refuse to test an installed copy that the checkout has left behind."""
    folder = backends_folder()
    if folder is None or folder == ROOT / "backends":
        return
    stale = [
        str(source.relative_to(ROOT))
        for tree, installed in ((ROOT / "backends", folder), (ROOT / "csrc", folder / "csrc"))
        for source in sorted(tree.rglob("*"))
        if source.is_file()
        and source.suffix != ".pyc"
        and (
            not (copy := installed / source.relative_to(tree)).exists()
            or copy.read_bytes() != source.read_bytes()
        )
    ]
    if stale:
        pytest.exit(
            f"the tests would run an old copy of the backends: {folder}, which differs in "
            f"{len(stale)} files, as {stale[0]}; install again: `python -m pip install -e .`",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


LONG = (
    *("backends/ascend/test_npu.py", "backends/cuda/test_attention_host.py"),
    *("chain/test_differentiable.py", "conformance/test_broken_backends.py"),
    *("conformance/test_command.py", "conformance/test_pytest_plugin.py"),
    *("conformance/test_reference.py", "distributed/test_state_of_ranks.py", "docs/test_pages.py"),
    *("doctor/test_collectives.py", "doctor/test_command.py", "integrations/test_frameworks.py"),
    *("integrations/test_huggingface.py", "integrations/test_megatron.py"),
    *("interchange/test_loading.py", "interchange/test_onnx_file.py"),
    *("interchange/test_programs.py", "test_compile.py", "test_compile_delayed.py"),
    *("test_layering.py", "test_public_names.py", "test_ways.py"),
)
"""Files that take ten seconds of processor time and more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long files: the last ones to begin decide how long a core has no work."""
    long = {ROOT / "tests" / name for name in LONG}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Spare Python's collector the thousands of tests in the time of the tests, too.

    It begins after more objects than by default: compiled graphs make millions, most of which live.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*forked.COLLECTING)
    gc.enable()
    for logger in logging.root.manager.loggerDict.values():
        # To those that keep their lines from the root, pytest adds its two handlers six times a
        # test, a quarter of the time of a short one.
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def missing_hardware(item: pytest.Item) -> str | None:
    """Reason to skip ``item``, or None when the device that it needs is here."""
    marker = item.get_closest_marker("needs_accelerator")
    if marker is None:
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    wanted = marker.args[0] if marker.args else None
    if found is not None and wanted in (None, found.type):
        return None
    return f"{NO_ACCELERATOR}{f' of kind {wanted}' if wanted else ''}, found {found}"


_cuda_is_available = torch.cuda.is_available
# For the generators of devices that start later, torch.manual_seed keeps the texts of three stacks,
# which takes a third of the time of a short test, and of each call of a function that seeds.
if torch.accelerator.current_accelerator(check_available=True) is None:
    for devices in (torch.cuda, torch.mtia, torch.xpu):
        devices.traceback = types.SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed before any fixture runs, so that a test alone sees the numbers it sees among others.

    A test that asks for no accelerator sees none: layers are made on the best device there is.
    """
    torch.manual_seed(0)
    is_marked = item.get_closest_marker("needs_accelerator") is not None or DEVICE_TYPE == "cuda"
    torch.cuda.is_available = _cuda_is_available if is_marked else lambda: False
    if reason := missing_hardware(item) or device.reason_to_skip(item.nodeid):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object],
) -> Generator[None, object, object]:
    try:
        with device.running_a_test():
            return (yield)
    except pytest.skip.Exception as skip:
        # pytest raises again, for the other tests of the fixture's scope, what it has kept.
        if fixturedef.cached_result is not None:
            _, key, _ = fixturedef.cached_result
            fixturedef.cached_result = (None, key, (skip, skip.__traceback__))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with device.running_a_test():
        return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests this machine could not run: a skip must never go unseen."""
    skipped = terminalreporter.stats.get("skipped", [])
    hardware = sum(NO_ACCELERATOR in str(report.longrepr) for report in skipped)
    terminalreporter.write_line(
        f"skipped for missing hardware: {hardware}; skipped for other reasons: "
        f"{len(skipped) - hardware}"
    )


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small GEMMs on a busy machine: waiting for a second core costs 20 times the work.

    In the processes of the tests, too.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def forks() -> Iterator[None]:
    """End the process that forks for the tests, which the first of them starts."""
    yield
    forked.close()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """The default group, of this process alone: over gloo, and NCCL for tensors on a GPU."""
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(device.DEVICE)
    dist.init_process_group(BACKENDS[DEVICE_TYPE], store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def isolated() -> Iterator[None]:
    """Plug-ins, formats, log lines and environment of the test's own."""
    with toys.isolation():
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``cli("doctor", ...)`` returns exit status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = importlib.import_module("fp8core.__main__").main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def forking_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of ``fp8core doctor`` are forks with a short self-test: seconds a process."""
    start = functools.partial(forked.start, imports=(*IMPORTS, "tests.doctor.short"))
    forking = types.SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(process, "subprocess", forking)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """``golden(name)`` returns the arrays of ``tests/golden/<name>.npz`` by key."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(ROOT / "tests" / "golden" / f"{name}.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    return load


@pytest.fixture
def first_algorithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have products run their first algorithm, the same for a group as for a linear of its own.

    One that is timed on a GPU may be cuBLASLt's for one of them, and a kernel for few rows, which
    adds up in float32, for the other.
    """
    monkeypatch.setenv("FP8CORE_AUTOTUNE", "0")
    table.forget()
    yield
    table.forget()
