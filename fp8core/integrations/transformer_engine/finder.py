"""The finder that answers for ``transformer_engine``: its modules, and its package metadata.

The module imports the standard library alone, so that a child process of ``fp8core run`` can
install it while Python starts, without importing torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = "transformer_engine"
NATIVE = "transformer_engine_torch"
"""The module of Transformer Engine's functions in C++, of which programs use the enumerations."""
VERSION = "2.14.0"
ENVIRONMENT = "FP8CORE_AS_TRANSFORMER_ENGINE"
"""The variable by which ``fp8core run`` tells child processes the version; also listed in
fp8core.dispatch.settings."""

# Not imported by name: this file is loaded without the package while Python starts.
_PACKAGE = "fp8core.integrations.transformer_engine"
_ORIGIN = Path(__file__).with_name("__init__.py")
_MINIMUM = (2, 0)
_DISTRIBUTIONS = (
    *("transformer-engine", "transformer-engine-torch"),
    *("transformer-engine-cu12", "transformer-engine-cu13"),
)
# Results of a search that modules of frameworks store: a flag, or a requirement with its result.
_FLAGS = ("HAVE_TE", "HAVE_TRANSFORMER_ENGINE")
_REQUIREMENT = "_TRANSFORMER_ENGINE_AVAILABLE"
_CACHED_CHECK = "is_te_available"


def is_within(name: str) -> bool:
    """Return whether ``name`` is that of the package, of a module inside, or of its C++ module."""
    return name.partition(".")[0] in (ROOT, NATIVE)


class _Distribution(importlib.metadata.Distribution):
    """The metadata of the package, which has no files."""

    def __init__(self, version: str) -> None:
        self._files = {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {version}\n"
                f"Summary: fp8core under the name of Transformer Engine\n"
            ),
            "top_level.txt": f"{ROOT}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """Return the text of a file of metadata, or None."""
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Path:
        """Return where a file of the package would lie."""
        return Path(__file__).parent / str(path)


class Finder(MetaPathFinder, Loader):
    """Finds and loads the modules of the package, and its metadata."""

    stands_for = ROOT

    def __init__(self, version: str) -> None:
        self.version = version

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a module of the package; None for modules of others.

        Raises:
            ModuleNotFoundError: the package has no such module or name; says what to use. Without
                a name, as Python would else replace the message of ``from ... import`` by its own.
        """
        if not is_within(fullname):
            return None
        if fullname != ROOT:  # a search for the package itself does not import torch
            package = importlib.import_module(_PACKAGE)
            if not package.has_module(fullname):
                raise ModuleNotFoundError(package.refusal(fullname))
        # A package each: Python asks this finder about names that a package does not have.
        return ModuleSpec(fullname, self, origin=str(_ORIGIN), is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give ``module`` its names, and load the modules below it."""
        package = importlib.import_module(_PACKAGE)
        package.fill(module, self.version)
        for child in package.children(module.__name__):
            # Importing binds a name only where it loads the module; a module of before stays
            # loaded where a program, as MindSpeed does, takes the package out of sys.modules.
            setattr(module, child.rpartition(".")[2], importlib.import_module(child))

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Yield the package's metadata if it is asked for, by either spelling or by none."""
        name = None if context is None else context.name
        if name is None or _normalized(name) == _normalized(ROOT):
            yield _Distribution(self.version)


def installed() -> Finder | None:
    """Return the finder on ``sys.meta_path``; None if there is none.

    Known by an attribute, as the process may have loaded this file as a module of another name.
    """
    for finder in sys.meta_path:
        if getattr(finder, "stands_for", None) == ROOT:
            assert isinstance(finder, MetaPathFinder)
            return finder  # type: ignore[return-value]  # a Finder, of this file under any name
    return None


def put(version: str) -> None:
    """Install the finder, before all others."""
    sys.meta_path.insert(0, Finder(version))


def version_problem(version: str) -> str | None:
    """Return why ``version`` cannot be claimed; None if it can."""
    numbers = re.match(r"(\d+)\.(\d+)(\.\d+)*", version) if isinstance(version, str) else None
    if numbers is None:
        return f"expected a version number, such as {VERSION!r}."
    if (int(numbers[1]), int(numbers[2])) < _MINIMUM:
        return (
            f"before {_MINIMUM[0]}.{_MINIMUM[1]} Transformer Engine had another interface; "
            f"expected a later version, such as {VERSION!r}."
        )
    return None


def obstacle() -> str | None:
    """Return why the finder cannot be installed, and what would help; None if it can."""
    if "mindspeed" in sys.modules and ROOT in sys.modules:
        return (
            f"{ROOT} is imported already, as MindSpeed's empty classes. Install fp8core under its "
            f"name before `import mindspeed.megatron_adaptor`, or leave it out."
        )
    if ROOT in sys.modules:
        where = getattr(sys.modules[ROOT], "__file__", None) or "without a file"
        return (
            f"another {ROOT} is imported already ({where}). Install fp8core under its name before "
            f"that import, in an environment without Transformer Engine."
        )
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return (
            f"{name} {version} is installed in this environment, and two packages cannot have one "
            f"name. Uninstall it, or use it and leave fp8core's alias out."
        )
    spec = importlib.util.find_spec(ROOT)
    if spec is not None:
        where = spec.origin or list(spec.submodule_search_locations or [])
        return (
            f"another {ROOT} can be imported ({where}), and two packages cannot have one name. "
            f"Remove it from sys.path, or leave fp8core's alias out."
        )
    framework = next(_frameworks_that_looked(), None)
    if framework is None:
        return None
    return (
        f"{framework} is imported already, and has noted that there is no Transformer Engine. "
        f"Install fp8core under its name before that import, or start the program by `fp8core run "
        f"--as-transformer-engine`."
    )


def _frameworks_that_looked() -> Iterator[str]:
    """Yield the modules that have looked for Transformer Engine and keep the result."""
    for name, module in sorted(sys.modules.items()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        requirement, check = names.get(_REQUIREMENT), names.get(_CACHED_CHECK)
        has_looked = any(names.get(flag) is False for flag in _FLAGS)
        has_looked |= getattr(requirement, "available", None) is False
        if check is not None and hasattr(check, "cache_info"):
            has_looked |= bool(check.cache_info().currsize) and not check()
        if has_looked:
            yield name


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
