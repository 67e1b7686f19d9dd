"""Begin and end of a step of a converted model, which delayed scaling needs.

Outside an autocast, one forward of the model is one step: its hooks act as entering and leaving an
autocast does. A forward of a layer that is not called through its model is one step too.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from fp8core.context.recompute import keep_scales
from fp8core.context.scopes import begin_step, end_step, forget_interrupted, is_in_step, touched_in
from fp8core.conversion.layers import RECORD, Conversion, Record
from fp8core.torch_ops.private import (
    MODULE_CALL,
    always_called_hooks,
    forward_hooks,
    forward_pre_hooks,
)

__all__ = ["ROOT", "delimit", "undelimit"]

ROOT = "_fp8core_conversion"
"""Attribute of the model that convert() was called with; it holds the :class:`Conversion`."""


def delimit(module: torch.nn.Module) -> None:
    """Make each forward of ``module``, a converted model or one of its layers, a step."""
    undelimit(module)
    module.register_forward_pre_hook(_begin, prepend=True)
    module.register_forward_hook(_end, always_call=True)


def undelimit(module: torch.nn.Module) -> None:
    """Remove the hooks of :func:`delimit`."""
    for hooks, added in ((forward_pre_hooks(module), _begin), (forward_hooks(module), _end)):
        for key, hook in list(hooks.items()):
            if hook is added:
                del hooks[key]
                always_called_hooks(module).pop(key, None)


def _owner(module: torch.nn.Module) -> object:
    """Return the owner of the step that a forward of ``module`` is: its conversion, if it is the
    converted model, else the module itself."""
    attributes = vars(module)
    conversion: Conversion | None = attributes.get(ROOT)
    return module if conversion is None else conversion


def _begin(module: torch.nn.Module, arguments: Any) -> None:
    if torch.compiler.is_compiling():
        return
    forget_interrupted()
    record: Record | None = vars(module).get(RECORD)
    if ROOT not in vars(module) and record is not None and is_in_step(record.conversion):
        return
    owner = _owner(module)
    if not (is_in_step(owner) and _is_within_itself(module)):
        begin_step(owner, partial(_is_running, module))


def _end(module: torch.nn.Module, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or not is_in_step(_owner(module)) or _is_within_itself(module):
        return
    # torch calls this hook from its except clause if forward raised, with None for the output.
    failed = output is None and sys.exc_info()[1] is not None
    owner = _owner(module)
    if torch.is_grad_enabled() and not failed:
        keep_scales(output, touched_in(owner))
    end_step(owner, failed=failed)


def _is_within_itself(module: torch.nn.Module) -> bool:
    """Whether ``module``, whose hook is running, was called by its own forward.

    An open step is no proof: after a KeyboardInterrupt torch calls no hook, so the step stays open.
    """
    return _is_running(module, times=2)


def _is_running(module: torch.nn.Module, times: int = 1) -> bool:
    """Whether the calling thread is in ``times`` calls of ``module``."""
    calls, frame = 0, sys._getframe().f_back
    while frame is not None and calls < times:
        calls += frame.f_code is MODULE_CALL and frame.f_locals["self"] is module
        frame = frame.f_back
    return calls == times
