"""Functions run by the ranks of a group, a process each: over gloo on the CPU, or, where the
environment has TEST_DEVICE=cuda, over NCCL on a GPU each, which is torch's default device then.

A test hands over a function of its module; each process imports that module and runs it:

    def work(rank: int, kind: str) -> dict[str, Any]: ...

    def test_ranks(tmp_path: Path) -> None:
        first, second = run_ranks(work, tmp_path, "flat")
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 240
ENDING_S = 30
DEVICE_TYPE = os.environ.get("TEST_DEVICE", "cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Exit|Failed|Skipped): .*)", re.MULTILINE
)
IMPORTS = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._functorch.aot_autograd"),
    *("torch._dynamo", "pytest"),
)
"""What ranks find imported: most of the time of a short test, where each imports it for itself."""


def device() -> torch.device:
    """The device of this rank; in the process of a test, that of what ranks are compared with."""
    if DEVICE_TYPE == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(DEVICE_TYPE)


@contextlib.contextmanager
def emulated(recipe: str) -> Iterator[None]:
    """The reference backend for a recipe whose products the GPUs of tests cannot compute."""
    if DEVICE_TYPE == "cuda" and recipe in ("mxfp8", "nvfp4"):
        with fp8core.use_backend("reference"):
            yield
    else:
        yield


def run_ranks(
    work: Callable[..., Any], folder: Path, *arguments: str, world_size: int = 2
) -> list[Any]:
    """Run ``work(rank, *arguments)`` in ``world_size`` processes of one group; their returns.

    ``work`` is a function at the top of an importable module. It returns tensors, numbers, strings,
    lists and dicts of them, which travel through files in ``folder``. A rank that fails fails the
    test with what all ranks wrote. A test of more ranks than there are GPUs is skipped.
    """
    command = [sys.executable, "-m", "tests.ranks", work.__module__, work.__qualname__]
    environment = dict(os.environ)
    if DEVICE_TYPE == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(world_size))
    with contextlib.ExitStack() as stack:
        processes, outputs = [], [folder / f"rank{rank}.txt" for rank in range(world_size)]
        for rank, output in enumerate(outputs):
            stream = stack.enter_context(output.open("w"))
            process = forked.start(
                [*command, str(folder), str(rank), str(world_size), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=stream,
                # An import that counts GPUs would keep the forks from them.
                imports=IMPORTS if DEVICE_TYPE == "cpu" else (),
            )
            stack.callback(process.kill)
            processes.append(process)
        statuses = [ending(process) for process in processes]
    texts = [output.read_text("utf-8", errors="replace") for output in outputs]
    if any(statuses):
        raise AssertionError("\n".join([ended(statuses, texts), *texts]))
    results = [result_of(folder, rank) for rank in range(world_size)]
    return [torch.load(one, device(), weights_only=True) for one in results]


def ending(process: forked.Child) -> int:
    """The status of a process, which is killed if it does not end in time."""
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def ended(statuses: Sequence[int], texts: Sequence[str]) -> str:
    """How each rank ended, and the last error in what it wrote: what a line of a report has."""
    lines = []
    for rank, (status, text) in enumerate(zip(statuses, texts, strict=True)):
        errors = ERROR.findall(text)
        last = errors[-1] if errors else (text.splitlines() or ["no output"])[-1]
        lines.append(f"rank {rank} ended with {status}{f': {last}' if status else ''}")
    return "; ".join(lines)


def visible_gpus() -> list[str]:
    """The GPUs of this process, by CUDA's names."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [*map(str, range(torch.cuda.device_count()))]


def gpus_of(world_size: int) -> list[str]:
    """The GPUs of the ranks of a test, by CUDA's names: processes of pytest take other ones each,
    if there are enough."""
    names = visible_gpus()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = worker % (len(names) // world_size) * world_size
    return names[first : first + world_size]


def result_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def main(
    module: str, function: str, folder: str, rank: str, world_size: str, *arguments: str
) -> None:
    """Run as one rank and leave what the function returns in ``folder``."""
    torch.set_num_threads(1)
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        BACKENDS[DEVICE_TYPE],
        init_method=Path(folder, "rendezvous").as_uri(),
        rank=int(rank),
        world_size=int(world_size),
        device_id=device() if DEVICE_TYPE == "cuda" else None,
    )
    dist.all_reduce(torch.zeros(1))  # a rank that ends before others have connected fails them
    from tests.device import tensors_on  # which reads this module

    with tensors_on(str(device())):
        returned = getattr(importlib.import_module(module), function)(int(rank), *arguments)
    torch.save(returned, result_of(Path(folder), int(rank)))
    # NCCL waits until no captured graph holds one of its collectives, and graphs of modules are
    # in reference cycles. What still holds one is named instead of waited for.
    gc.collect()
    faulthandler.dump_traceback_later(ENDING_S, exit=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without Python's teardown: models and meshes keep their groups, and a thread of gloo that
    # then releases a collective's Python state, once the interpreter is on its way out, aborts
    # the process ("terminate called without an active exception", seen with torch 2.13).
    sys.stderr.flush()
    os._exit(0)
