"""Read by Python while it starts, in the processes of ``fp8core run --as-transformer-engine``.

Installs the finder, then runs the ``sitecustomize`` that this one hides, if there is one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


def _loaded(name: str, spec: Any) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _install() -> None:
    path = _HERE.parent / "finder.py"
    name = "_fp8core_alias_finder"
    finder: Any = _loaded(name, importlib.util.spec_from_file_location(name, path))
    version = os.environ.get(finder.ENVIRONMENT)
    if not version or finder.installed() is not None:
        return
    problem = finder.version_problem(version) or finder.obstacle()
    if problem is not None:
        sys.exit(f"fp8core run --as-transformer-engine: {problem}")
    finder.put(version)


def _run_hidden() -> None:
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        _loaded("sitecustomize", spec)


_install()
_run_hidden()
