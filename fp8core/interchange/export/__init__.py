"""Models for other runtimes: :func:`to_onnx` writes an ONNX file.

torch.export and AOTInductor take models of fp8core as they are; docs/export.md shows all three.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from fp8core.context.autocast import autocast
from fp8core.dispatch.policy import use_backend
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.interchange.export.program import lower
from fp8core.recipe import Recipe
from fp8core.torch_ops.private import pytree

__all__ = ["to_onnx"]

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
    with _DataInGraph(), _restored_attributes(model):
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
def _restored_attributes(model: torch.nn.Module) -> Iterator[None]:
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
        for module, before_forward in names.items():
            for name in set(vars(module)) - before_forward:
                del vars(module)[name]


def _constants(model: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of modules that a graph takes for constants, by path."""
    constants = {}
    path: Any
    for name, module in model.named_modules():
        for path, value in pytree.tree_flatten_with_path(vars(module))[0]:
            if type(value) in _CONSTANTS:
                attribute = f"{path[0].key}{pytree.keystr(path[1:])}"
                constants[f"{name}.{attribute}" if name else attribute] = value
    return constants


def _changed(name: str, old: object, new: object) -> UnsupportedError:
    was, is_now = ("absent" if value is _ABSENT else repr(value) for value in (old, new))
    return UnsupportedError(
        f"to_onnx: forward changes {name!r} ({was} before, {is_now} after), which a file would "
        f"hold as a constant. Call the model once before if forward sets it once; else export a "
        f"model that does not change it."
    )


_OPSET = 21
_NEEDED = ("onnx", "onnxscript")


def to_onnx(
    model: torch.nn.Module,
    args: Sequence[Any],
    path: str | os.PathLike[str],
    recipe: Recipe | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int = _OPSET,
) -> torch.onnx.ONNXProgram:
    """Write ``model``, called with ``args``, as the ONNX file ``path``, and return its program.

    Weights are stored as the codes and scales that forward uses, inputs are quantized by
    QuantizeLinear nodes with scales from their own amax, and a GEMM is a MatMul of dequantized
    values in float32. Codes and scales are those of the ``reference`` backend bit for bit, sums of
    a runtime in its own order.

    Args:
        model: on the CPU, in eval mode.
        args: example inputs, positional; their sizes are fixed where ``dynamic_shapes`` frees none.
        path: where the file is written; weights beyond 2 GB lie beside it.
        recipe: as in ``autocast``; None leaves the recipe that is active, or that of ``convert``.
        kwargs: example inputs by keyword.
        dynamic_shapes: as in ``torch.export.export``.
        input_names: of the inputs in the file; by default those of forward.
        output_names: of the outputs in the file.
        opset_version: of the file, from 21 on: earlier ones quantize no blocks.

    Raises:
        UnsupportedError: the model or its recipe holds what ONNX has no translation of, by name.
        OperandError: the model is training or not on the CPU.
        RecipeError: the recipe has no such name, or the opset is too old.
        ImportError: ``onnx`` or ``onnxscript`` is not installed.
    """
    _check(model, opset_version)
    scope = contextlib.nullcontext() if recipe is None else autocast(recipe=recipe)
    with warnings.catch_warnings():
        # torch's own exporter copies a container that torch has deprecated (torch 2.13).
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        with torch.no_grad(), use_backend("reference"), scope:
            # Copies: torch takes an input that is given twice for one.
            positional, named = pytree.tree_map_only(
                torch.Tensor, torch.clone, (tuple(args), dict(kwargs or {}))
            )
            lowered = lower(capture(model, positional, named, dynamic_shapes))
        exported = torch.onnx.export(
            lowered,
            input_names=input_names,
            output_names=output_names,
            opset_version=opset_version,
            dynamo=True,
            verbose=False,
        )
    assert exported is not None  # dynamo=True returns it
    exported.save(path)
    return exported


def _check(model: torch.nn.Module, opset_version: int) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"to_onnx needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            f"not installed: pip install {' '.join(missing)}."
        )
    if opset_version < _OPSET:
        raise RecipeError(
            f"to_onnx: opset_version={opset_version} quantizes no blocks. Use {_OPSET} or later."
        )
    if model.training:
        raise OperandError("to_onnx: the model is training. Call model.eval() first.")
    elsewhere = [
        (name, tensor.device)
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
        if tensor.device.type != "cpu"
    ]
    if elsewhere:
        name, device = elsewhere[0]
        raise OperandError(
            f"to_onnx: {name!r} is on {device}, but weights are quantized on the CPU. Call "
            f"model.cpu() first."
        )


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
