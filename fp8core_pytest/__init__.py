"""The pytest plug-in: ``pytest --fp8core-backend=NAME`` adds the conformance kit's checks.

Every pytest run in an environment that has fp8core loads this module, so it imports nothing until
the option is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption", "pytest_configure"]

_NAMES = ("device", "json", "xfail", "strict")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("fp8core", "conformance of an fp8core backend")
    group.addoption(
        "--fp8core-backend",
        metavar="NAME",
        help="hold this installed backend to fp8core's laws; without paths, nothing else is run",
    )
    group.addoption(
        "--fp8core-device",
        metavar="DEVICE",
        help="the device to test it on; default: the backend's preferred one",
    )
    group.addoption("--fp8core-json", metavar="FILE", help="write the results to FILE")
    group.addoption(
        "--fp8core-xfail", metavar="FILE", help="expected failures: 'PATTERN  # REASON' to a line"
    )
    group.addoption(
        "--fp8core-strict",
        action="store_true",
        default=False,
        help="fail also if an operation has a method but no support, or no judge",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the kit if the option is used."""
    options = config.option
    if options.fp8core_backend is None:
        flags = [f"--fp8core-{name}" for name in _NAMES if getattr(options, f"fp8core_{name}")]
        if flags:
            import pytest

            raise pytest.UsageError(
                f"{', '.join(flags)}: which backend? Give --fp8core-backend=NAME."
            )
        return
    from fp8core.conformance.collection import Kit

    config.pluginmanager.register(Kit.from_options(options), "fp8core-kit")
    if config.args_source is not config.ArgsSource.ARGS:
        config.args = []  # the kit alone, without the tests that the project's configuration names
