"""The classes of converted layers, and the swap of a layer's class.

Only ``__class__`` changes, so that every reference to the module or its parameters stays valid, and
names, hooks, buffers and training mode stay. A converted class derives from fp8core's layer and
from the layer's class, so that ``isinstance(layer, torch.nn.Linear)`` stays true.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import torch
from typing_extensions import override

from fp8core.context.autocast import Active
from fp8core.context.recompute import keep_scales
from fp8core.context.scopes import (
    begin_step,
    begin_step_in_graph,
    end_step,
    end_step_in_graph,
    forget_interrupted,
    is_in_step,
    touched_in,
)
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.errors import UnsupportedError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.parameters import fill
from fp8core.modules.layers.linear import Linear
from fp8core.modules.layers.norm import LayerNorm, RMSNorm
from fp8core.modules.models.inventory import conv1d_sizes
from fp8core.modules.siblings import Siblings
from fp8core.recipe import Recipe
from fp8core.tensors.operand_tensor import OperandTensor
from fp8core.tensors.parameter import quantized_model_init
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import PARTS
from fp8core.torch_ops.capture import constant_in_graph
from fp8core.torch_ops.private import (
    IS_PARAMETER,
    MODULE_CALL,
    always_called_hooks,
    forward_hooks,
    forward_pre_hooks,
    without_modes,
)

ROOT = "_fp8core_conversion"
"""Attribute of the model that convert() was called with; it holds the :class:`Conversion`."""


def delimit(module: torch.nn.Module) -> None:
    """Make each forward of ``module``, a converted model or one of its layers, a step; one whose
    class convert() has changed has no hooks for that, which would be seen beside the user's."""
    if isinstance(module, Converted) and ROOT not in vars(module):
        vars(module)[RECORD].conversion.delimits = True
        return
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
    return vars(module).get(ROOT, module)


def _begin(module: torch.nn.Module, arguments: Any) -> None:
    _is_step(module)


def _is_step(module: torch.nn.Module) -> bool:
    """Begin a step of ``module``, which is being called; False if it is within another."""
    if torch.compiler.is_compiling():
        begin_step_in_graph(module)
        return True
    forget_interrupted()
    record: Record | None = vars(module).get(RECORD)
    if ROOT not in vars(module) and record is not None and is_in_step(record.conversion):
        return False
    owner = _owner(module)
    if is_in_step(owner) and _is_within_itself(module):
        return False
    begin_step(owner, partial(_is_running, module))
    return True


def _end(module: torch.nn.Module, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        end_step_in_graph(module)
        return
    # A step that a graph began is the module's own. It ends here where torch.compile gave up.
    owner = module if is_in_step(module) else _owner(module)
    if not is_in_step(owner) or _is_within_itself(module):
        return
    # torch calls this hook from its except clause if forward raised, with None for the output.
    failed = output is None and sys.exc_info()[1] is not None
    if torch.is_grad_enabled() and not failed:
        keep_scales(output, touched_in(owner))
    end_step(owner, failed=failed)


def in_step(module: torch.nn.Module, run: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Return what ``run`` does in a forward of ``module``, which convert() has changed: in a step
    of its own under delayed scaling, unless one of the model is open."""
    if not (vars(module)[RECORD].conversion.delimits and _is_step(module)):
        return run(*args, **keywords)
    output: Any = None
    try:
        output = run(*args, **keywords)
    finally:
        _end(module, args, output)
    return output


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


_EPS = ("variance_epsilon", "eps", "epsilon")


class SimilarNorm(NamedTuple):
    """An RMSNorm of ``size``; the factor is ``1 + weight`` if ``zero_centered``."""

    size: int
    eps: float
    zero_centered: bool
    eps_name: str


def looks_like_rms_norm(module: torch.nn.Module) -> bool:
    """Return whether ``module`` may be an RMSNorm: by its name, parameters and arguments."""
    weight = module._parameters.get("weight")
    return (
        "norm" in type(module).__name__.lower()
        and weight is not None
        and weight.dim() == 1
        and len(module._parameters) == 1
        and not module._buffers
        and not module._modules
        and _eps_name(module) is not None
        and len(inspect.signature(type(module).forward).parameters) == 2  # self and the input
    )


def stand_in(module: torch.nn.Module, **attributes: Any) -> Any:
    """Return an object with the class and the attributes of ``module`` but for ``attributes``."""
    kind = type(module)
    result = kind.__new__(kind)
    vars(result).update(vars(module), **attributes)
    return result


@without_modes()  # of FakeTensorMode too, in which nothing can be compared
def similar_norm(module: torch.nn.Module) -> SimilarNorm | None:
    """Return the RMSNorm that ``module`` computes, or None if it computes something else.

    The module's forward runs on four rows on the CPU, with a weight of other values than the
    module's, and is compared with torch's.
    """
    eps_name = _eps_name(module)
    assert eps_name is not None
    eps = vars(module)[eps_name]
    size = module._parameters["weight"].shape[0]  # type: ignore[union-attr]  # it looks like a norm
    options: Any = {"dtype": torch.float32, "device": "cpu"}
    x = torch.arange(4 * size, **options).view(4, size).sin()
    # In the second row eps is as large as the mean square.
    x = x * torch.tensor([[1.0], [math.sqrt(eps)], [30.0], [0.1]], **options)
    weight = torch.linspace(0.5, 1.5, size, **options)
    parameters = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    small = stand_in(module, _parameters=parameters)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        result = attempt(lambda: type(module).forward(small, x))
    if isinstance(result, Failure) or not isinstance(result, torch.Tensor):
        return None
    for zero_centered in (False, True):
        factor = 1 + weight if zero_centered else weight
        want = torch.nn.functional.rms_norm(x, (size,), factor, eps)
        if result.shape == want.shape and torch.allclose(result.float(), want, 1e-5, 1e-7):
            return SimilarNorm(size, eps, zero_centered, eps_name)
    return None


def _eps_name(module: torch.nn.Module) -> str | None:
    values = {name: vars(module).get(name) for name in _EPS}
    return next((n for n, value in values.items() if isinstance(value, float) and value > 0), None)


Source: TypeAlias = torch.nn.Linear | torch.nn.LayerNorm | torch.nn.RMSNorm
"""The layers of torch that can be converted."""

RECORD = "_fp8core_record"
"""Attribute of a layer that takes part in a conversion; it holds the :class:`Record`."""


FROZEN = "_fp8core_frozen"
"""Attribute of a module whose parameters ``quantize_`` changed; it holds a :class:`FormerState` for
the name of each."""


class FormerState(NamedTuple):
    """Whether a parameter required a gradient before ``quantize_``, which has stored its values in
    low precision if ``is_stored``, and else frozen it alone."""

    required_grad: bool
    is_stored: bool


def freeze(module: torch.nn.Module, name: str, *, is_stored: bool = False) -> None:
    """Freeze the parameter ``name`` of ``module``, and note for :func:`thaw` what it was; to be
    called before it is replaced by one whose values are stored."""
    parameter = module._parameters[name]
    assert parameter is not None
    former = FormerState(parameter.requires_grad, is_stored)
    vars(module).setdefault(FROZEN, {})[name] = former
    if not is_stored:
        parameter.requires_grad_(False)


def thaw(module: torch.nn.Module) -> None:
    """Undo ``quantize_`` in ``module``: stored weights become their values in high precision."""
    vars(module).pop("has_static_scales", None)  # of torch's layers too, which may train next
    for name, former in vars(module).pop(FROZEN, {}).items():
        parameter: torch.Tensor | None = module._parameters.get(name)
        if former.is_stored and isinstance(parameter, QuantizedTensor):
            value = torch.nn.Parameter(parameter.detach().dequantize())
            module._parameters[name] = parameter = with_attributes_of(parameter, value)
        if parameter is not None:
            parameter.requires_grad_(former.required_grad)


class Conversion:
    """A call of convert(): the recipe of its layers outside any autocast. Compared by identity.

    All layers of the call share it; a deep copy of the model has its own.
    """

    # Whether a call of a layer outside of a step is one.
    delimits = False
    # The model's rotary embeddings, and the rotation by the last cosines and sines, behind weak
    # references to both, their versions, and the layers that took it.
    rotaries: Sequence[Any] = ()
    turn: tuple[Any, Any, set[int], Any] | None = None
    siblings: Siblings | None = None

    def __init__(self, outside_autocast: Active | None) -> None:
        self.outside_autocast = outside_autocast
        self.siblings = Siblings()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "turn"}

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the layers outside any autocast, None for high precision."""
        return None if self.outside_autocast is None else self.outside_autocast.quantize

    def rotates(self) -> bool:
        """Return whether the cosines and sines that layers get are known to be those of angles:
        where the model's rotary embeddings are within it, and compute such."""
        return bool(self.rotaries) and all(each.is_of_angles() for each in self.rotaries)

    # A method: torch before 2.13 has no object passed to a constant, but for that of a method.
    constant_in_graph(rotates)


def with_attributes_of(old: torch.Tensor, new: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return ``new`` with the attributes that frameworks gave the parameter ``old``."""
    attributes = vars(new)
    # What a quantized tensor consists of is not the framework's.
    excluded = {*attributes, *PARTS, *OperandTensor.__annotations__, IS_PARAMETER}
    attributes.update({name: value for name, value in vars(old).items() if name not in excluded})
    return new


@dataclass(frozen=True)
class Record:
    """The state of a layer before ``conversion``, from which :func:`release` restores it.

    ``original`` is its class, None for a layer of fp8core; ``added`` names the attributes that
    :func:`adopt` set, ``hidden`` holds their former values if they had one. ``shares``: what it
    casts may serve others with the same input, or others' serve it.
    """

    conversion: Conversion
    original: type[torch.nn.Module] | None
    added: tuple[str, ...]
    hidden: dict[str, Any]
    shares: bool = False


class Converted(LowPrecisionModule):
    """Base of the converted classes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise UnsupportedError(
            f"{type(self).__name__} is the class of a layer that fp8core.convert has converted; "
            f"construct fp8core.{type(self).__name__.removeprefix('Converted')} or the layer of "
            f"torch.nn."
        )

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute as fp8core's layer."""
        return in_step(self, super().forward, *arguments, **keywords)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters as torch's layer does, also on meta; reset the delayed state."""
        if not defer_init:
            self.reset_delayed_state()
            self._fill_parameters()


class ConvertedLinear(Converted, Linear, torch.nn.Linear):
    """A ``torch.nn.Linear`` that computes as :class:`fp8core.Linear` does."""

    @property
    def siblings(self) -> Siblings | None:  # type: ignore[override]  # an attribute there
        """The siblings in its model, None where it casts for itself."""
        record: Record = vars(self)[RECORD]
        return record.conversion.siblings if record.shares else None

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


class ConvertedConv1D(Converted, Linear):
    """Base of a converted ``Conv1D`` of transformers, whose weight is that of a linear transposed.

    Each forward copies the weight in the other order, as GEMMs read it.
    """

    can_be_spread = False  # the dimensions of its weight are in the other order

    def weight_names(self) -> list[tuple[str, ...]]:
        """Return nothing: the parameter is the transposed weight, whose codes are others."""
        return []

    @override
    def link_names(self) -> None:
        return None

    def link_params(self) -> list[torch.Tensor]:
        """Return the weight as that of a linear, then the bias."""
        weight, bias = self.parameter("weight"), self.parameter("bias")
        assert weight is not None
        turned = weight.mT.contiguous()  # [in_features, out_features] -> the other order
        return [turned] if bias is None else [turned, bias]

    def _fill_parameters(self) -> None:
        fill(self._parameters.get("weight"), partial(torch.nn.init.normal_, std=0.02))
        fill(self._parameters.get("bias"), torch.nn.init.zeros_)


class ConvertedSimilarNorm(Converted, RMSNorm):
    """Base of a converted norm of a model that computes an RMSNorm, such as ``LlamaRMSNorm``."""


_CLASSES: dict[type[torch.nn.Module], type[Converted]] = {
    torch.nn.Linear: ConvertedLinear,
    torch.nn.LayerNorm: ConvertedLayerNorm,
    torch.nn.RMSNorm: ConvertedRMSNorm,
}


_derived: dict[tuple[object, object], type[torch.nn.Module]] = {}


def derived(base: type[torch.nn.Module], original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class of converted layers of a framework's class ``original``.

    The class is created here, as fp8core imports no framework. A pickle names its two bases
    instead.
    """
    if (base, original) in _derived:
        return _derived[base, original]

    def __reduce_ex__(self: torch.nn.Module, protocol: SupportsIndex) -> Any:
        _, _, *rest = super(kind, self).__reduce_ex__(protocol)
        return _instance, (base, original), *rest

    prefix = "" if getattr(base, "keeps_name", False) else "Converted"
    kind: Any = type(
        f"{prefix}{original.__name__}",
        (base, original),
        {"__module__": __name__, "__doc__": base.__doc__, "__reduce_ex__": __reduce_ex__},
    )
    return _derived.setdefault((base, original), kind)


def _instance(base: type[torch.nn.Module], original: type[torch.nn.Module]) -> torch.nn.Module:
    kind = derived(base, original)
    return kind.__new__(kind)


def _converted_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    original = type(module)
    if original in _CLASSES:
        return _CLASSES[original]
    is_conv1d = conv1d_sizes(module) is not None
    return derived(ConvertedConv1D if is_conv1d else ConvertedSimilarNorm, original)


def adopt(module: torch.nn.Module, name: str, conversion: Conversion) -> None:
    """Add ``module`` to ``conversion`` under ``name``; a layer that is not of fp8core changes its
    class."""
    original: type[torch.nn.Module] | None = None
    if isinstance(module, LowPrecisionModule):
        added: dict[str, Any] = {"name": name or module.name}
    else:
        original = type(module)
        excluded = {*vars(torch.nn.Module()), *getattr(original, "__constants__", ())}
        added = {
            key: value for key, value in vars(_like(module, name)).items() if key not in excluded
        }
        converted = _converted_class(module)
    added["outside_autocast"] = conversion.outside_autocast
    attributes = vars(module)
    hidden = {key: attributes[key] for key in added if key in attributes}
    attributes.update(added)
    attributes[RECORD] = Record(conversion, original, tuple(added), hidden)
    if isinstance(module, LowPrecisionModule):
        module.unbind()
    else:
        module.__class__ = converted


def share_input(module: torch.nn.Module, parent: torch.nn.Module | None) -> None:
    """Let the converted linear ``module`` share the cast of its input if ``parent`` is of a class
    of transformers, which calls it: other code may write the input in between without torch's
    count of it, as by ``.data``, numpy or a kernel, and nothing would notice."""
    package = type(parent).__module__.partition(".")[0]
    if package == "transformers" and isinstance(module, ConvertedLinear):
        vars(module)[RECORD] = replace(vars(module)[RECORD], shares=True)


def release(module: torch.nn.Module) -> None:
    """Undo :func:`adopt`, or what gave another module its :class:`Record`: restore class and
    attributes; parameters keep their present values."""
    attributes = vars(module)
    record: Record = attributes.pop(RECORD)
    if isinstance(module, LowPrecisionModule):
        if record.original is None:
            module.unbind()
        else:
            module.forget_delayed_state()
    for key in record.added:
        attributes.pop(key, None)
    attributes.update(record.hidden)
    if record.original is not None:
        module.__class__ = record.original


def _like(module: torch.nn.Module, name: str) -> LowPrecisionModule:
    """Return fp8core's layer of the same sizes, on meta, whose attributes the swap copies."""
    options: dict[str, Any] = {
        "params_dtype": next(module.parameters()).dtype,
        "device": torch.device("meta"),
        "name": name or None,
    }
    with quantized_model_init(enabled=False):
        sizes = conv1d_sizes(module)
        if isinstance(module, torch.nn.Linear):
            sizes = module.in_features, module.out_features
        if sizes is not None:
            return Linear(*sizes, bias=module._parameters["bias"] is not None, **options)
        if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
            cls = LayerNorm if isinstance(module, torch.nn.LayerNorm) else RMSNorm
            assert module.eps is not None
            (size,) = module.normalized_shape
            return cls(size, module.eps, **options)
        norm = similar_norm(module)
        assert norm is not None
        result = RMSNorm(norm.size, norm.eps, zero_centered_gamma=norm.zero_centered, **options)
        result.eps_name = norm.eps_name
        return result
