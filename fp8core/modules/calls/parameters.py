"""The parameters of layers: device, memory and first values; and checks of constructors' arguments.

An argument of Transformer Engine whose feature is not offered passes with a value that asks for no
such feature, so that a script written for Transformer Engine runs; any other value is refused, with
the name of the argument.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from fp8core.collectives.base import is_process_group
from fp8core.dispatch import policy, select
from fp8core.errors import OperandError, RecipeError, UnsupportedError, checked_choice
from fp8core.tensors.parameter import parameter_dtype
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.private import DeviceContext, function_modes

InitMethod = Callable[[torch.Tensor], Any]

default_init_method: InitMethod = partial(torch.nn.init.normal_, mean=0.0, std=0.023)
"""Transformer Engine's default: normal with standard deviation 0.023."""

NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


def make_parameter(
    *size: int, device: torch.device, dtype: torch.dtype | None
) -> torch.nn.Parameter:
    """Return an unfilled parameter; torch's default dtype if None.

    Raises:
        OperandError: see :func:`fp8core.tensors.parameter.parameter_dtype`.
    """
    return torch.nn.Parameter(torch.empty(size, device=device, dtype=parameter_dtype(dtype)))


def fill(parameter: torch.Tensor | None, method: InitMethod) -> None:
    """Fill ``parameter`` by ``method``; None, and a parameter on the meta device, stay unchanged.

    For a quantized parameter ``method`` fills a high-precision tensor, which is then quantized.
    """
    if parameter is None or parameter.is_meta:
        return
    with torch.no_grad():
        if isinstance(parameter, QuantizedTensor):
            value = torch.empty_like(parameter)
            method(value)
            parameter.initialize(value)
        else:
            method(parameter)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device that a tensor created on ``device`` has: "cuda" is the current one.

    None is torch's default device if one was set, as by ``with torch.device(...)`` or
    ``torch.set_default_device``; else the selected backend's.

    Raises:
        UnsupportedError: torch has no such device here; says why backends cannot use it either.
    """
    if device is None:
        # torch.get_default_device() answers cpu also where nobody has set one.
        modes = [mode for mode in function_modes() if isinstance(mode, DeviceContext)]
        device = modes[-1].device if modes else select.default_device(policy.current())
    try:
        return torch.empty(0, device=device).device
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:
        raise UnsupportedError(select.why_no_device(device, str(error))) from None


def materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Give memory on ``device`` to the meta parameters of ``module``, not to those of its children.

    Each becomes a new, unfilled Parameter with the attributes and ``requires_grad`` of the old one;
    a DTensor goes to the device of its mesh. Names that shared a parameter share the new one. If
    ``device`` is meta, nothing changes.
    """
    if device.type == "meta":
        return
    replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, parameter in module._parameters.items():
        if parameter is None or not parameter.is_meta:
            continue
        if parameter not in replaced:
            replaced[parameter] = _with_memory(parameter, device)
        module._parameters[name] = replaced[parameter]


def _with_memory(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    mesh = getattr(parameter, "device_mesh", None)
    with torch.no_grad():
        value = torch.empty_like(parameter, device=device if mesh is None else mesh.device_type)
    new = torch.nn.Parameter(value, parameter.requires_grad)
    attributes = vars(new)
    attributes.update({n: value for n, value in vars(parameter).items() if n not in attributes})
    return new


def check_size(owner: str, name: str, value: int | None) -> int:
    """Return ``value`` if it is a positive integer.

    Raises:
        OperandError: it is not.
    """
    if not isinstance(value, int) or value < 1:
        raise OperandError(f"{owner}({name}={value!r}): expected an integer >= 1.")
    return value


def is_number(value: object) -> bool:
    """Return whether ``value`` is a real number of Python's or NumPy's."""
    return isinstance(value, numbers.Real)


def check_probability(owner: str, name: str, value: float) -> float:
    """Return ``value`` if it is a probability, 0 and 1 included.

    Raises:
        OperandError: it is not.
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise OperandError(f"{owner}({name}={value!r}): expected 0 <= {name} <= 1.")
    return float(value)


def check_normalization(owner: str, name: str) -> str:
    """Return the norm's kind in descriptors for ``"LayerNorm"`` or ``"RMSNorm"``.

    Raises:
        RecipeError: another name; lists these.
    """
    checked_choice(owner, "normalization", name, NORMALIZATIONS, RecipeError)
    return NORMALIZATIONS[name]


def refuse_arguments(
    function: Callable[..., object],
    arguments: Mapping[str, object],
    names: Iterable[str],
    *,
    owner: str | None = None,
) -> None:
    """Raise UnsupportedError for the first of ``names`` whose value asks for a feature.

    Values that ask for no feature: the default that ``function`` declares; None or False where the
    default is None or False; a process group of one rank; options of tensor parallelism without
    effect on one rank, as more ranks are refused (``parallel_mode``, ``set_parallel_mode``,
    ``return_layernorm_output_gathered``); and the names ``rng_tracker_name`` and ``ub_name``, as
    the features that they name are refused. ``owner`` is the function's name in messages, by
    default its own.
    """
    parameters = inspect.signature(function).parameters
    owner = owner or function.__qualname__.removesuffix(".__init__")
    for name in names:
        value, default = arguments[name], parameters[name].default
        is_tensor = isinstance(value, torch.Tensor)  # which has no truth value
        if not is_tensor and (value == default or not (value or default) or _is_idle(name, value)):
            continue
        shown = "a tensor" if is_tensor else repr(value)
        raise UnsupportedError(f"{owner}({name}={shown}) is not offered; leave it at {default!r}.")


def _is_idle(name: str, value: object) -> bool:
    """Return whether ``value``, which is not the default, changes nothing on a single rank."""
    match name:
        case "tp_group" | "tensor_parallel_group" | "dist_process_group":
            return is_process_group(value) and value.size() == 1
        case "parallel_mode" | "tensor_parallel_mode":
            return value in ("column", "row")
        case "set_parallel_mode" | "return_layernorm_output_gathered":
            return value is True
        case "rng_tracker_name" | "ub_name":
            return isinstance(value, str)
    return False
