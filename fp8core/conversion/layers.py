"""The classes of converted layers, and the swap of a layer's class.

Only ``__class__`` changes, so that every reference to the module or its parameters stays valid, and
names, hooks, buffers and training mode stay. A converted class derives from fp8core's layer and
from torch's, so that ``isinstance(layer, torch.nn.Linear)`` stays true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fp8core.context.autocast import Active
from fp8core.errors import UnsupportedError
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.linear import Linear
from fp8core.modules.norm import LayerNorm, RMSNorm
from fp8core.parameter.init import quantized_model_init

__all__ = [
    "RECORD",
    "Conversion",
    "Converted",
    "ConvertedLayerNorm",
    "ConvertedLinear",
    "ConvertedRMSNorm",
    "Record",
    "Source",
    "adopt",
    "release",
]

Source: TypeAlias = torch.nn.Linear | torch.nn.LayerNorm | torch.nn.RMSNorm
"""The layers that can be converted."""

RECORD = "_fp8core_record"
"""Attribute of a layer that takes part in a conversion; it holds the :class:`Record`."""


class Conversion:
    """One call of convert(): the recipe of its layers outside any autocast. Compared by identity.

    All layers of the call share it; a deep copy of the model has its own.
    """

    def __init__(self, outside_autocast: Active | None) -> None:
        self.outside_autocast = outside_autocast


@dataclass(frozen=True)
class Record:
    """The state of a layer before ``conversion``, from which :func:`release` restores it.

    ``original`` is its class, None for a layer of fp8core; ``added`` names the attributes that
    :func:`adopt` set, ``hidden`` holds their former values if they had one.
    """

    conversion: Conversion
    original: type[Source] | None
    added: tuple[str, ...]
    hidden: dict[str, Any]


class Converted(LowPrecisionModule):
    """Base of the converted classes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise UnsupportedError(
            f"{type(self).__name__} is the class of a layer that fp8core.convert has converted; "
            f"construct fp8core.{type(self).__name__.removeprefix('Converted')} or the layer of "
            f"torch.nn."
        )

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters as torch's layer does, also on meta; reset the delayed state."""
        if not defer_init:
            self.reset_delayed_state()
            self._fill_parameters()


class ConvertedLinear(Converted, Linear, torch.nn.Linear):  # type: ignore[misc]  # takes more arguments than torch's
    """A ``torch.nn.Linear`` that computes as :class:`fp8core.Linear` does."""

    def _fill_parameters(self) -> None:
        torch.nn.Linear.reset_parameters(self)


class ConvertedLayerNorm(Converted, LayerNorm, torch.nn.LayerNorm):
    """A ``torch.nn.LayerNorm`` that computes as :class:`fp8core.LayerNorm` does."""

    def _fill_parameters(self) -> None:
        torch.nn.LayerNorm.reset_parameters(self)


class ConvertedRMSNorm(Converted, RMSNorm, torch.nn.RMSNorm):  # type: ignore[misc]  # eps: never None here
    """A ``torch.nn.RMSNorm`` that computes as :class:`fp8core.RMSNorm` does."""

    def _fill_parameters(self) -> None:
        torch.nn.RMSNorm.reset_parameters(self)


_CLASSES: dict[type[Source], type[Converted]] = {
    torch.nn.Linear: ConvertedLinear,
    torch.nn.LayerNorm: ConvertedLayerNorm,
    torch.nn.RMSNorm: ConvertedRMSNorm,
}


def adopt(module: Source | LowPrecisionModule, name: str, conversion: Conversion) -> None:
    """Add ``module`` to ``conversion`` under ``name``; a layer of torch changes its class."""
    if isinstance(module, LowPrecisionModule):
        given = {"name": name or module.name, "outside_autocast": conversion.outside_autocast}
        original = None
    else:
        original = type(module)
        kept = {*vars(torch.nn.Module()), *original.__constants__}
        given = {key: value for key, value in vars(_like(module, name)).items() if key not in kept}
        given["outside_autocast"] = conversion.outside_autocast
    attributes = vars(module)
    hidden = {key: attributes[key] for key in given if key in attributes}
    attributes.update(given)
    attributes[RECORD] = Record(conversion, original, tuple(given), hidden)
    if original is not None:
        module.__class__ = _CLASSES[original]
    else:
        assert isinstance(module, LowPrecisionModule)
        module.unbind()


def release(module: LowPrecisionModule) -> None:
    """Undo :func:`adopt`: restore class and attributes; parameters keep their present values."""
    attributes = vars(module)
    record: Record = attributes.pop(RECORD)
    if record.original is not None:
        module.forget_delayed_state()
    else:
        module.unbind()
    for key in record.added:
        attributes.pop(key, None)
    attributes.update(record.hidden)
    if record.original is not None:
        module.__class__ = record.original  # type: ignore[assignment]  # that is the swap


def _like(module: Source, name: str) -> LowPrecisionModule:
    """Return fp8core's layer of the same sizes, on meta, whose attributes the swap copies."""
    parameter = next(module.parameters())
    device = torch.device("meta")
    with quantized_model_init(enabled=False):
        if isinstance(module, torch.nn.Linear):
            return Linear(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                params_dtype=parameter.dtype,
                device=device,
                name=name or None,
            )
        cls = LayerNorm if isinstance(module, torch.nn.LayerNorm) else RMSNorm
        assert module.eps is not None
        (size,) = module.normalized_shape
        return cls(size, module.eps, params_dtype=parameter.dtype, device=device, name=name or None)
