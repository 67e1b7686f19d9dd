"""``fp8core build``: compile a backend's native code now, which it would compile on first use."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.errors import UnsupportedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("backend", help="name of the backend, such as cuda")
    parser.add_argument(
        "--arch", nargs="+", metavar="ARCH", help="architectures; default: those of this machine"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="copy the compiled files to this folder as well"
    )


def run(args: argparse.Namespace) -> int:
    """Build, and print the path of the compiled files."""
    spec = plugins.load().spec(args.backend, "fp8core build")
    if not spec.builder:
        raise UnsupportedError(f"backend {spec.name!r} has nothing to compile.")
    module, _, name = spec.builder.partition(":")

    def build() -> object:
        builder: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return builder(args.arch, output=args.output)

    path = attempt(build)
    if isinstance(path, Failure):
        path.fail(f"backend {spec.name!r}: its builder {spec.builder!r} failed")
    print(path)
    return 0
