"""fp8core as the package ``transformer_engine``, so that frameworks which import it run unmodified.

::

    from fp8core import transformer_engine

    transformer_engine.install()  # before the framework is imported
    import accelerate

or, for a whole command and the processes that it starts::

    fp8core run --as-transformer-engine accelerate launch train.py

Nothing is installed on disk: one finder on ``sys.meta_path`` answers for the name. Every public
name of Transformer Engine that fp8core offers resolves, under all module paths that it has there;
any other raises an error that says what to use instead.
"""

from __future__ import annotations

import logging
import sys

from fp8core.errors import RecipeError, UnsupportedError
from fp8core.integrations.transformer_engine import finder
from fp8core.reporting import log_once, logger

__all__ = ["VERSION", "install", "is_installed", "uninstall"]

VERSION = finder.VERSION
"""The version of Transformer Engine that the package claims to be, unless told otherwise."""


def install(version: str = VERSION) -> None:
    """Have ``import transformer_engine`` give fp8core in this process, as ``version``.

    Call it before a framework is imported that looks for Transformer Engine. ``version`` is what
    ``transformer_engine.__version__`` and ``importlib.metadata`` say; frameworks decide by it which
    features they use. Does nothing if it is installed with the same version. Logs one line.

    Raises:
        UnsupportedError: another ``transformer_engine`` is installed or imported, or a framework
            has looked for it already; says which.
        RecipeError: ``version`` is no version number, or another one than that installed.
    """
    problem = finder.version_problem(version)
    if problem is not None:
        raise RecipeError(f"install(version={version!r}): {problem}")
    present = finder.installed()
    if present is not None:
        if present.version == version:
            return
        raise RecipeError(
            f"install(version={version!r}): fp8core stands for version {present.version} already. "
            f"Call uninstall() first."
        )
    obstacle = finder.obstacle()
    if obstacle is not None:
        raise UnsupportedError(obstacle)
    finder.put(version)
    logger.info("fp8core answers for transformer_engine %s in this process", version)
    if version != VERSION:
        log_once(
            f"as transformer_engine {version}: frameworks were run with {VERSION}; another version "
            f"may have them use features that fp8core does not have",
            logging.WARNING,
        )


def uninstall() -> None:
    """End :func:`install`: forget the finder and the modules that it gave.

    Objects that a framework took from these modules keep their classes. Does nothing if not
    installed.
    """
    present = finder.installed()
    if present is None:
        return
    sys.meta_path.remove(present)
    for name in [name for name in sys.modules if finder.is_within(name)]:
        del sys.modules[name]


def is_installed() -> bool:
    """Return whether ``import transformer_engine`` gives fp8core in this process."""
    return finder.installed() is not None
