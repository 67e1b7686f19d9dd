"""Arguments of Transformer Engine whose features are not offered.

A value that asks for no such feature passes, so that a script written for Transformer Engine runs;
any other value is refused, with the name of the argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping

import torch

from fp8core.errors import UnsupportedError

__all__ = ["refuse_arguments"]


def refuse_arguments(
    function: Callable[..., object],
    given: Mapping[str, object],
    names: Iterable[str],
    *,
    owner: str | None = None,
) -> None:
    """Raise UnsupportedError for the first of ``names`` whose value ``given`` asks for a feature.

    These values ask for none: the default that ``function`` declares; None or False where the
    default is None or False; a process group of one rank; options of tensor parallelism without
    effect on one rank, as more ranks are refused (``parallel_mode``, ``set_parallel_mode``,
    ``return_layernorm_output_gathered``); and the names ``rng_tracker_name`` and ``ub_name``, as
    the features that they name are refused. ``owner`` is the function's name in messages, by
    default its own.
    """
    parameters = inspect.signature(function).parameters
    owner = owner or function.__qualname__.removesuffix(".__init__")
    for name in names:
        value, default = given[name], parameters[name].default
        if _asks_for_nothing(value, default) or _is_idle(name, value):
            continue
        shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise UnsupportedError(f"{owner}({name}={shown}) is not offered; leave it at {default!r}.")


def _asks_for_nothing(value: object, default: object) -> bool:
    if isinstance(value, torch.Tensor):  # which has no truth value
        return False
    return value == default or (not value and not default)


def _is_idle(name: str, value: object) -> bool:
    """Return whether ``value``, which is not the default, changes nothing on a single rank."""
    match name:
        case "tp_group" | "tensor_parallel_group" | "dist_process_group":
            return _is_of_one_rank(value)
        case "parallel_mode" | "tensor_parallel_mode":
            return value in ("column", "row")
        case "set_parallel_mode" | "return_layernorm_output_gathered":
            return value is True
        case "rng_tracker_name" | "ub_name":
            return isinstance(value, str)
    return False


def _is_of_one_rank(group: object) -> bool:
    if not torch.distributed.is_available():
        return False
    return isinstance(group, torch.distributed.ProcessGroup) and group.size() == 1
