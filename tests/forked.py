"""Processes of Python that start with fp8core imported: forks of one that has imported it.

Importing torch and fp8core takes seconds of processor time, a fork milliseconds. A fork has what
``import fp8core`` gives a new interpreter, imported with warnings as errors: no plug-in, no test.
Forks that need more modules share those as well, if the caller names them: the process that has
imported those is a fork, too.
Tests of what an interpreter does while it starts or imports use ``subprocess``.

    done = forked.run([sys.executable, "-c", "import fp8core; print(fp8core.__version__)"])
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.01
ERROR = ("error", None, Warning, None, 0)
"""The filter of ``-W error``."""
COLLECTING = (20_000, 20, 20)
"""How many objects later Python's collector begins, in place of 700, 10 and 10: in the time of
compiled graphs, half of what it takes."""

Job = dict[str, Any]


class Server(NamedTuple):
    """A process that forks: where it reads and writes, and the first one's own handle."""

    requests: IO[str]
    answers: IO[str]
    process: subprocess.Popen[str] | None


class Child:
    """A forked process, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int, server: Server) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _answer(self._server, {"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    command: Sequence[str],
    *,
    stdout: IO[Any],
    stderr: IO[Any],
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    start_new_session: bool = False,
    imports: tuple[str, ...] = (),
) -> Child:
    """Start what ``subprocess.Popen`` would start for these arguments.

    ``command`` is ``[sys.executable, "-W", "error", "-c", code, *arguments]``, where the warnings
    may be left out and ``-m module`` or a path may stand for the code. The streams are named files.
    ``imports`` are the modules beside fp8core that the process finds imported, in their order.
    """
    assert command[0] == sys.executable, command
    assert stdin == subprocess.DEVNULL
    is_strict = list(command[1:3]) == ["-W", "error"]
    job = {
        "command": list(command[3 if is_strict else 1 :]),
        "is_strict": is_strict,
        "cwd": str(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env),
        "streams": [os.devnull, stdout.name, stderr.name],
        "is_leader": start_new_session,
    }
    server = _server(imports)
    return Child(_answer(server, job), server)


def run(
    command: Sequence[str],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    imports: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run what ``subprocess.run`` would with ``capture_output=True, text=True, check=False``."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        child = start(command, cwd=cwd, env=env, stdout=out, stderr=err, imports=imports)
        try:
            status = child.wait(timeout)
        finally:
            child.kill()
        texts = [Path(stream.name).read_text("utf-8", errors="replace") for stream in (out, err)]
    return subprocess.CompletedProcess(command, status, *texts)


_servers: list[Server] = []


def close() -> None:
    """End the processes that fork, if there are any; their forks go on."""
    while _servers:
        server = _servers.pop()  # the first one last
        server.requests.close()
        server.answers.close()
        if server.process is not None:
            server.process.wait()
    _server.cache_clear()


@functools.cache
def _server(imports: tuple[str, ...]) -> Server:
    """Return the process that has imported ``imports``, a fork of that without the last of them."""
    if imports:
        with tempfile.TemporaryDirectory() as folder:
            pipes = [os.path.join(folder, name) for name in ("requests", "answers")]
            for pipe in pipes:
                os.mkfifo(pipe)
            _answer(_server(imports[:-1]), {"import": imports[-1], "pipes": pipes})
            server = Server(open(pipes[0], "w"), open(pipes[1]), None)  # noqa: SIM115  until close()
    else:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.forked"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        server = Server(process.stdin, process.stdout, process)
    _servers.append(server)
    return server


def _answer(server: Server, request: Job) -> Any:
    server.requests.write(json.dumps(request) + "\n")
    server.requests.flush()
    line = server.answers.readline()
    assert line, "the process that forks has ended; its error is above"
    return json.loads(line)


# --- in the process that forks ---


def serve(requests: IO[str], answers: IO[str]) -> Job | None:
    """Fork as asked, until the input ends; return the request in a fork, None in this process."""
    with requests, answers:
        while line := requests.readline():
            request = json.loads(line)
            if "poll" in request:
                pid, status = os.waitpid(request["poll"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            else:
                answer = os.fork()
                if not answer:
                    return request
            answers.write(f"{json.dumps(answer)}\n")
            answers.flush()
    return None


def become(job: Job) -> None:
    """Run the job's program as the main module of this process."""
    if job["is_leader"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    for number, name in enumerate(job["streams"]):
        opened = os.open(name, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    if not job["is_strict"]:
        kept = [one for one in warnings.filters if one != ERROR]
        warnings.resetwarnings()
        warnings.filters.extend(kept)
    first, *rest = job["command"]
    if first in ("-c", "-m"):
        program, *rest = rest
    paths = filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep))
    folder = {"-c": "", "-m": job["cwd"]}.get(first, str(Path(first).parent))
    sys.path[:1] = [folder, *paths]
    importlib.invalidate_caches()
    sys.argv = [first if first == "-c" else program if first == "-m" else first, *rest]
    if first == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    text = program if first == "-c" else Path(first).read_text("utf-8")
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = first
    sys.modules["__main__"] = module
    exec(compile(text, "<string>" if first == "-c" else first, "exec"), vars(module))


def leave(status: int) -> NoReturn:
    """End this process as Python does, but for the modules that it shares with other forks.

    Python takes those apart in ten times the time of a fork. What the program has made ends here.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    if vars(program := sys.modules["__main__"]) is not globals():
        vars(program).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    import torch

    import fp8core  # noqa: F401  what the forks share

    torch.set_num_threads(1)
    gc.set_threshold(*COLLECTING)
    gc.freeze()
    streams = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    while (asked := serve(*streams)) is not None and "import" in asked:
        read, write = asked["pipes"]
        streams = open(read), open(write, "w")  # noqa: SIM115  serve closes them
        importlib.import_module(asked["import"])
        gc.freeze()
    if asked is not None:
        ended = 0
        try:
            become(asked)
        except SystemExit as error:
            if not isinstance(error.code, int | None):
                raise
            ended = error.code or 0
        leave(ended)
