"""Capturing a model as a program, with what forward changes where a program shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from fp8core.errors import UnsupportedError
from fp8core.torch_ops.private import pytree

__all__ = ["capture"]

_CONSTANTS = (bool, int, float, complex, str, type(None))
_ABSENT = object()
_DATA: Any = torch.Tensor.data  # the property


def capture(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """Return the program of ``model``, which is left as it was.

    Raises:
        UnsupportedError: forward assigns to ``data`` of a tensor, or changes a number, a string or
            None that a module holds.
    """
    with _DataInGraph(), _attributes_kept(model):
        program: ExportedProgram = torch.export.export(
            model, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes
        )
    return program


class _DataInGraph(TorchFunctionMode):
    """Reads ``tensor.data`` as ``tensor.detach()``, whose writes are in the graph: torch 2.13
    captures no other use of ``data``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == _DATA.__get__:
            return args[0].detach()
        if func == _DATA.__set__:
            raise UnsupportedError(
                f"to_onnx: forward assigns to .data of a tensor {list(args[0].shape)}, and a file "
                f"holds no state. Export a model that computes a new tensor instead."
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Refuse changes of constants by forward, and remove what it adds; torch puts back the rest."""
    names = {module: set(vars(module)) for module in model.modules()}
    before: dict[str, Any] = {}

    def begin(*ignored: object) -> None:
        before.update(_constants(model))

    def end(*ignored: object) -> None:
        after = _constants(model)
        for name in {**before, **after}:
            old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
            if old is not new and old != new:
                raise _changed(name, old, new)

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, held in names.items():
            for name in set(vars(module)) - held:
                del vars(module)[name]


def _constants(model: torch.nn.Module) -> dict[str, Any]:
    """Return what a graph takes for constants of the attributes of modules, by its path."""
    found = {}
    path: Any
    for name, module in model.named_modules():
        for path, value in pytree.tree_flatten_with_path(vars(module))[0]:
            if type(value) in _CONSTANTS:
                attribute = f"{path[0].key}{pytree.keystr(path[1:])}"
                found[f"{name}.{attribute}" if name else attribute] = value
    return found


def _changed(name: str, old: object, new: object) -> UnsupportedError:
    was, is_now = ("absent" if value is _ABSENT else repr(value) for value in (old, new))
    return UnsupportedError(
        f"to_onnx: forward changes {name!r} ({was} before, {is_now} after), which a file would "
        f"hold as a constant. Call the model once before if forward sets it once; else export a "
        f"model that does not change it."
    )
