"""Recipes that take the arguments of Transformer Engine's, where fp8core's refuse unknown ones.

An argument that changes nothing passes with one warning. ``override_linear_precision`` changes the
plan, where Transformer Engine ignores it; one warning says so. Every other unknown argument is an
error, where Transformer Engine drops it.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from fp8core import recipe
from fp8core.context.autocast import active
from fp8core.errors import RecipeError, no_argument
from fp8core.functional.quantizers import IdentityQuantizer, Quantizer, quantizer_of
from fp8core.inspection import explain
from fp8core.modules.models import graphs as fp8core_graphs
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.base import explains_writes
from fp8core.recipe.plan import GemmPlan, LayerRole, LinearPlan, Plan
from fp8core.reporting import log_once
from fp8core.tensors.parameter import is_initializing_quantized


def check_fp8_support() -> tuple[bool, str]:
    """Return whether the selected backend runs FP8 with one scale a tensor, and why not."""
    return _pair(explain.is_fp8_available(True))


def check_mxfp8_support() -> tuple[bool, str]:
    """Return whether the selected backend runs MXFP8, and why not."""
    return _pair(explain.is_mxfp8_available(True))


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """Return whether the selected backend runs FP8 with a scale for 128 elements, and why not."""
    return _pair(explain.is_fp8_block_scaling_available(True))


def check_nvfp4_support() -> tuple[bool, str]:
    """Return whether the selected backend runs NVFP4, and why not."""
    return _pair(explain.is_nvfp4_available(True))


def _pair(answer: bool | tuple[bool, str]) -> tuple[bool, str]:
    assert isinstance(answer, tuple)
    return answer


class _Refusing(type):
    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"FP8GlobalStateManager.{name} is not offered: fp8core keeps no global state of scales "
            f"and buffers. A layer holds its own, and autocast updates it on exit."
        )


class FP8GlobalStateManager(metaclass=_Refusing):
    """The settings of the innermost ``autocast`` of the calling thread."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether layers compute in low precision."""
        return active().quantize is not None

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether layers record amaxes while they compute in high precision."""
        return active().observe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the active recipe; outside of any autocast, the default one."""
        request = active()
        return request.quantize or request.observe or get_default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """Return the process group over which delayed amaxes are reduced, or None."""
        return active().process_group

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether layers constructed now store their weights in low precision."""
        return is_initializing_quantized()

    @classmethod
    def reset(cls) -> None:
        """Do nothing: there is no state besides that of layers and open autocasts."""

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)


_EARLIER = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
}


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call :func:`fp8core.make_graphed_callables`, by the names and in the order that Transformer
    Engine has, the earlier names of the recipe's arguments included."""
    if len(args) > 2 * len(_EARLIER):
        last = list(_EARLIER.values())[-1]
        raise RecipeError(f"make_graphed_callables: give the arguments behind {last} by name.")
    positional = dict(zip((*_EARLIER, *_EARLIER.values()), args, strict=False))
    for name in positional.keys() & kwargs.keys():
        raise RecipeError(f"make_graphed_callables({name}=...) is given by position and by name.")
    arguments = {name: v for name, v in {**positional, **kwargs}.items() if v is not None}
    for earlier, name in _EARLIER.items():
        if earlier in arguments and name in arguments:
            raise RecipeError(
                f"make_graphed_callables({earlier}=..., {name}=...): give one of them."
            )
        if earlier in arguments:
            arguments[name] = arguments.pop(earlier)
    return fp8core_graphs.make_graphed_callables(
        modules, sample_args, num_warmup_iters, allow_unused_input, sample_kwargs, **arguments
    )


_GEMMS = ("fprop", "dgrad", "wgrad")
_NO_OVERRIDE = (False, False, False)
# Arguments that frameworks pass to recipes, and that no recipe has had a use for.
_WITHOUT_EFFECT = ("config", "params_dtype", "device")


def _effective(owner: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` without those that change nothing, which is logged once."""
    dropped = [name for name in kwargs if name in _WITHOUT_EFFECT]
    if kwargs.get("interval") == 1:  # scales are updated in every step
        dropped.append("interval")
    elif "interval" in kwargs:
        raise RecipeError(
            f"{owner}(interval={kwargs['interval']!r}): scales are updated in every step. Leave it "
            f"out, or give 1."
        )
    if dropped:
        names = ", ".join(dropped)
        log_once(f"{owner}: {names} change nothing in a recipe", logging.WARNING)
    return {name: value for name, value in kwargs.items() if name not in dropped}


def _override(owner: str, value: Any) -> tuple[bool, bool, bool]:
    flags = tuple(value) if isinstance(value, tuple | list) else ()
    if len(flags) != len(_GEMMS) or not all(isinstance(flag, bool) for flag in flags):
        raise RecipeError(
            f"{owner}(override_linear_precision={value!r}): expected three bools, for "
            f"{', '.join(_GEMMS)}; True computes that product in high precision."
        )
    return flags[0], flags[1], flags[2]


class _Tolerant(recipe.Recipe):
    """Base, before the recipe of fp8core, of one that takes arguments without effect."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Leave the check of the arguments to the constructor, which knows more of them."""
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        owner = type(self).__name__
        kwargs = _effective(owner, kwargs)
        override = _override(owner, kwargs.pop("override_linear_precision", _NO_OVERRIDE))
        if hasattr(self, "override_linear_precision"):  # a field
            object.__setattr__(self, "override_linear_precision", override)
            if any(override):
                products = ", ".join(itertools.compress(_GEMMS, override))
                line = (
                    f"{owner}(override_linear_precision={override}): {products} compute in high "
                    f"precision. Transformer Engine takes this value and ignores it."
                )
                log_once(line, about="override_linear_precision")
        elif any(override):
            raise RecipeError(
                f"{owner}(override_linear_precision=...): only DelayedScaling takes a product out "
                f"of low precision. Use fp8core.recipe.CustomRecipe."
            )
        construct: Any = super().__init__
        names = inspect.signature(construct).parameters
        for name in kwargs:
            if name not in names:
                raise RecipeError(
                    f"{no_argument(owner, name, names)} "
                    f"Transformer Engine ignores arguments that it does not know."
                )
        construct(*args, **kwargs)


@explains_writes
@dataclass(frozen=True, init=False)
class DelayedScaling(_Tolerant, recipe.DelayedScaling):
    """:class:`fp8core.recipe.DelayedScaling`, and ``override_linear_precision``: which of fprop,
    dgrad and wgrad compute in high precision."""

    _: KW_ONLY
    override_linear_precision: tuple[bool, bool, bool] = _NO_OVERRIDE

    def plan(self, role: LayerRole, dtype: torch.dtype) -> Plan:
        """Return the plan of delayed scaling, without the products in high precision."""
        plan = recipe.DelayedScaling.plan(self, role, dtype)
        if not any(self.override_linear_precision) or not isinstance(plan, LinearPlan):
            return plan
        fprop, dgrad, wgrad = (
            GemmPlan() if is_high else getattr(plan, name)
            for name, is_high in zip(_GEMMS, self.override_linear_precision, strict=True)
        )
        return dataclasses.replace(plan, fprop=fprop, dgrad=dgrad, wgrad=wgrad)


class Float8CurrentScaling(_Tolerant, recipe.Float8CurrentScaling):
    """:class:`fp8core.recipe.Float8CurrentScaling` with Transformer Engine's arguments."""


class Float8BlockScaling(_Tolerant, recipe.Float8BlockScaling):
    """:class:`fp8core.recipe.Float8BlockScaling` with Transformer Engine's arguments."""


class MXFP8BlockScaling(_Tolerant, recipe.MXFP8BlockScaling):
    """:class:`fp8core.recipe.MXFP8BlockScaling` with Transformer Engine's arguments."""


class NVFP4BlockScaling(_Tolerant, recipe.NVFP4BlockScaling):
    """:class:`fp8core.recipe.NVFP4BlockScaling` with Transformer Engine's arguments."""


class CustomRecipe(_Tolerant, recipe.CustomRecipe):
    """:class:`fp8core.recipe.CustomRecipe` with Transformer Engine's arguments."""


KINDS: tuple[type[recipe.Recipe], ...] = tuple(_Tolerant.__subclasses__())
"""The recipes of this module."""

for _kind in KINDS:
    _kind.__module__ = "transformer_engine.common.recipe"


# Factories for CustomRecipe that compute as the named recipes do, for those who replace some of
# the quantizers.


def high_precision_factory(role: recipe.QuantizerRole | None) -> IdentityQuantizer:
    """Return the quantizer that leaves each tensor as it is."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: recipe.QuantizerRole | None) -> recipe.DelayedScalingRequest:
    """Return the request of :class:`fp8core.recipe.DelayedScaling`."""
    return recipe.DelayedScalingRequest()


def _quantizer_by(kind: type[Recipe], role: recipe.QuantizerRole | None) -> Quantizer:
    """Return the quantizer of the tensor of ``role`` in a linear layer under the recipe ``kind``;
    of an unknown tensor that of the input, as Transformer Engine's factories do."""
    plan: Any = kind().plan(LayerRole(), torch.bfloat16)
    name = "input" if role is None else role.tensor_type
    return quantizer_of(plan.tensors.get(name, plan.input))


current_scaling_factory = partial(_quantizer_by, recipe.Float8CurrentScaling)
float8_block_scaling_factory = partial(_quantizer_by, recipe.Float8BlockScaling)
mxfp8_factory = partial(_quantizer_by, recipe.MXFP8BlockScaling)
nvfp4_factory = partial(_quantizer_by, recipe.NVFP4BlockScaling)
