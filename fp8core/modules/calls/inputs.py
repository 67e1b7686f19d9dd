"""Which inputs a layer takes: dense floating-point tensors whose size, dtype and device fit."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from fp8core.chain.node import is_under_torch_autocast
from fp8core.chain.shape import input_columns_of
from fp8core.chain.unwrap import PLAIN
from fp8core.dispatch import table
from fp8core.errors import OperandError, elsewhere
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.tensors.parameter import DTYPES
from fp8core.torch_ops.private import FakeTensor


def check_input(
    layer: LowPrecisionModule, input: torch.Tensor, weight: torch.Tensor | None, size: int | None
) -> torch.dtype:
    """Return the activation dtype of ``input [..., size]``, or refuse the input.

    ``weight`` is a parameter to compare dtype and device with; ``size`` None allows any size.

    Raises:
        OperandError: no dense floating-point tensor, wrong last dimension, a DTensor where the
            parameters are none, a FakeTensor outside of its mode, another device than they, or,
            outside torch.autocast, another dtype.
    """
    layout = getattr(input, "layout", None)
    if layout is not torch.strided or input.dtype not in DTYPES or input.is_nested:
        check_kind(layer.label, "input", input)
    if input.dim() == 0 or (size is not None and input.shape[-1] != size):
        state = f"has k={input.shape[-1]}" if input.dim() else "has no dimension"
        of_weight = "" if weight is None else f", but the weight is {list(weight.shape)}"
        raise OperandError(
            f"fprop of {layer.label}: input {list(input.shape)} {state}{of_weight}; "
            f"the layer takes [..., {size}]."
        )
    if type(input) not in PLAIN or type(weight) not in PLAIN:
        check_mode(layer.label, input, weight)
    if weight is None:
        return input.dtype
    if type(input) not in PLAIN and type(weight) in PLAIN:  # else both may be DTensors
        check_is_whole(layer.label, "input", input)
    if input.device != weight.device:
        raise elsewhere(f"{layer.label}: input", input.device, "the layer", weight.device)
    if is_under_torch_autocast(input):
        return torch.get_autocast_dtype(input.device.type)
    if input.dtype != weight.dtype:
        raise OperandError(
            f"{layer.label}: input is {input.dtype}, the weight {weight.dtype}. Convert "
            f"one, or run under torch.autocast({input.device.type!r}, dtype=...)."
        )
    return input.dtype


def check_mode(label: object, *tensors: torch.Tensor | None) -> None:
    """Refuse tensors of a FakeTensorMode outside of it, where kernels would read their memory.

    Raises:
        OperandError: one is of such a mode; says to enter it.
    """
    if any(isinstance(x, FakeTensor) for x in tensors) and not table.is_captured():
        raise OperandError(
            f"{label}: a FakeTensor outside of its mode, whose memory a kernel would read. Run "
            f"the layer in it: with tensor.fake_mode: ..."
        )


def check_chained(owner: str, layers: Sequence[LowPrecisionModule], first: int = 0) -> None:
    """Refuse ``layers`` of which one does not take the columns that the layer before it returns.

    ``owner`` names them in messages, and ``first`` is the number of the first of them.

    Raises:
        OperandError: a layer takes another number of columns than it gets.
    """
    width = input_columns_of([shape for layer in layers for shape in layer.link_shapes()])
    if width is None:  # no layer has a size
        return
    for number, layer in enumerate(layers, first):
        for shape in layer.link_shapes():
            expected = shape.expected_columns(width)
            if expected is not None:
                raise OperandError(
                    f"{owner} {number}, {layer.label}, takes {expected} columns, but gets {width}."
                )
            width = shape.columns(width)


def check_is_whole(label: object, name: str, tensor: torch.Tensor) -> None:
    """Refuse a DTensor, which may hold a part of its values, where an operation needs them all.

    Raises:
        OperandError: it is one; says how to get a plain tensor.
    """
    if type(tensor) in PLAIN or not hasattr(tensor, "to_local"):
        return
    raise OperandError(
        f"{label}: {name} {list(tensor.shape)} is a {type(tensor).__name__}, whose values may lie "
        f"on several ranks; expected a plain tensor. Pass {name}.to_local(), the part of this "
        f"rank (of whole heads and sequences), or {name}.full_tensor()."
    )


def cast_to_weight(input: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return ``input`` in the dtype of a parameter, in which an operation computes.

    Under torch.autocast, and where there is nothing to cast, ``input`` itself.
    """
    if (
        weight is None
        or not isinstance(input, torch.Tensor)
        or input.dtype == weight.dtype
        or input.dtype not in DTYPES
        or is_under_torch_autocast(input)
    ):
        return input
    return input.to(weight.dtype)


def check_kind(label: object, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not dense or has a dtype in which layers do not compute.

    ``name`` is what messages call it, ``label`` the layer.

    Raises:
        OperandError: it is no tensor, integer, complex, in 8 bits, sparse, nested, or in a layout
            of oneDNN.
    """
    if not isinstance(tensor, torch.Tensor):
        raise OperandError(f"{label}: {name} is {type(tensor).__name__}; expected a torch.Tensor.")
    if tensor.is_nested:
        raise OperandError(
            f"{label}: {name} is a nested tensor; expected a dense one. Give the rows of all parts "
            f"in one, as values() of a jagged one has them, or torch.nested.to_padded_tensor."
        )
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        raise OperandError(
            f"{label}: {name} {list(tensor.shape)} is in layout {layout}; expected a dense one, "
            f"as to_dense() gives it."
        )
    if tensor.dtype not in DTYPES:
        raise OperandError(
            f"{label}: {name} {list(tensor.shape)} is {tensor.dtype}; "
            f"expected bfloat16, float16 or float32."
        )


def takes_keyword(module: torch.nn.Module, name: str) -> bool:
    """Return whether the forward of ``module`` takes an argument ``name`` by keyword."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
