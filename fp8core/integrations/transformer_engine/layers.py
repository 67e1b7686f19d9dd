"""Layers with the constructors, attributes and results that callers of Transformer Engine rely on.

Each is fp8core's layer, which does all the work. The differences:

- ``bias=False`` leaves an empty tensor under the bias's name, not None.
- ``dtype`` is another name of ``params_dtype``.
- On one rank, options of communication change nothing; they stay readable as attributes.
- ``_extra_state`` is in ``state_dict``, empty: delayed scales are buffers, as in fp8core's layers.
  In Megatron's layers, which derive from these, it holds the scales in the stead of the buffers.
"""

from __future__ import annotations

import enum
import functools
import gc
import inspect
import os
import reprlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8core.collectives.base import is_process_group
from fp8core.context.autocast import active
from fp8core.dispatch import plugins
from fp8core.dispatch.policy import LeftOut, activated, chosen
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.interchange.checkpoints.transformer_engine import (
    merge_states,
    split_state,
    written_state,
)
from fp8core.modules import attention, multihead_attention, transformer_layer
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.layers import grouped_linear, layernorm_linear, layernorm_mlp, linear, norm
from fp8core.modules.layers.parallel import ParallelModule
from fp8core.modules.state.loading import EXTRA_STATE, Imported
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.plan import LinearPlan
from fp8core.reporting import log_once, some
from fp8core.tensors.delayed_state import BUFFERS
from fp8core.torch_ops.private import pytree, within_no_subclass

# Options of how several ranks exchange tensors: without effect on one rank, whatever their value.
_OVERLAP = (
    *("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
    *("ub_tp_comm_overlap", "ub_name", "symmetric_ar_type"),
)
# The options of tensor parallelism, and what they are on one rank.
_SINGLE_RANK: Mapping[str, Any] = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "parallel_mode": None,
    "set_parallel_mode": False,
}


def _named_arguments(
    native: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a constructor by name, with ``dtype`` as ``params_dtype``."""
    parameters = inspect.signature(native).parameters
    if "dtype" in kwargs and "dtype" not in parameters:
        dtype = kwargs.pop("dtype")
        if kwargs.get("params_dtype") not in (None, dtype):
            raise RecipeError(
                f"dtype={dtype} and params_dtype={kwargs['params_dtype']}: both name the dtype of "
                f"the parameters. Give one of them."
            )
        kwargs["params_dtype"] = dtype
    bound = inspect.signature(native).bind(None, *args, **kwargs).arguments
    return {name: value for name, value in list(bound.items())[1:]}


def _ranks(arguments: Mapping[str, Any]) -> int:
    """Return over how many ranks a layer with these arguments is spread."""
    group = arguments.get("tp_group")
    if isinstance(group, torch.distributed.ProcessGroup):
        return group.size()
    size: int = arguments.get("tp_size") or 1
    return size


class _Layer(torch.nn.Module):
    """The base of all layers here; ``_native``, the last base, is fp8core's layer, which does all
    the work. ``module`` is the layer's in Transformer Engine, by which Lightning and others
    recognise converted layers."""

    _native: ClassVar[Any]
    joined_as: ClassVar[Any]

    def __init_subclass__(cls, module: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if module is None:  # a base of several, or a framework's
            return
        cls.__module__ = f"transformer_engine.pytorch.{module}"
        cls._native = cls.joined_as = cls.__bases__[-1]

        # Megatron asks for the names of a constructor's arguments.
        @functools.wraps(cls._native.__init__)
        def construct(self: _Layer, *args: Any, **kwargs: Any) -> None:
            self._construct(*args, **kwargs)

        cls.__init__ = construct  # type: ignore[assignment, method-assign]  # one for each class

    def _construct(self, *args: Any, **kwargs: Any) -> None:
        native = self._native
        arguments = _named_arguments(native.__init__, args, kwargs)
        carried: dict[str, Any] = {}
        if _ranks(arguments) == 1:
            # A layer that can be spread over ranks takes the group and its options itself.
            idle = _OVERLAP if issubclass(native, ParallelModule) else (*_OVERLAP, *_SINGLE_RANK)
            carried = {name: arguments.pop(name) for name in idle if name in arguments}
        native.__init__(self, **arguments)
        for name, parameter in inspect.signature(native.__init__).parameters.items():
            value = arguments.get(name, parameter.default)
            if isinstance(value, str | int | float | tuple) and not hasattr(self, name):
                carried.setdefault(
                    name, value
                )  # as `eps` and `normalization`, which Megatron reads
        if not issubclass(native, ParallelModule):
            carried = {**_SINGLE_RANK, **carried, "sequence_parallel": False}
        for name, value in carried.items():
            setattr(self, name, value)
        _constructed.add(self)
        _watch_first_steps()

    def __getattr__(self, name: str) -> Any:
        """Return a parameter or a module; an empty tensor for the bias of a layer without one."""
        if name == "quantizers":
            raise AttributeError(
                "quantizers of a layer are not offered: a recipe says how each tensor is cast "
                "(fp8core.explain), fp8_meta['scaling_fwd'] has the delayed scales, and "
                "fp8core.recipe.CustomRecipe(qfactory=...) takes quantizers of one's own"
            )
        value: Any = super().__getattr__(name)
        if value is None and "bias" in name and name in self._parameters:
            weight = next(self.parameters(), None)
            return torch.empty(0) if weight is None else weight.detach().new_empty(0)
        return value


_constructed: weakref.WeakSet[_Layer] = weakref.WeakSet()
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@functools.cache
def _watch_first_steps() -> None:
    """Have the first step of each optimizer look for layers that no optimizer holds."""
    register_optimizer_step_post_hook(_warn_of_untrained_layers)


def _warn_of_untrained_layers(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Warn where ``optimizer``, in its first step, holds parameters without a gradient, and no
    optimizer of the process those of their shapes that layers have gradients for.

    These are layers that a framework put into a model after its optimizer was made, with parameters
    of their own.
    """
    if optimizer in _stepped:
        return
    _stepped.add(optimizer)
    idle = {p.shape for p in _parameters_of(optimizer) if p.requires_grad and p.grad is None}
    trained = {
        parameter: layer
        for layer in (list(_constructed) if idle else ())
        for parameter in layer.parameters()
        if parameter.grad is not None and parameter.shape in idle
    }
    if not trained:
        return
    optimizers = [entry for entry in gc.get_objects() if issubclass(type(entry), Optimizer)]
    in_optimizers = {id(parameter) for entry in optimizers for parameter in _parameters_of(entry)}
    layers = {id(layer): layer for p, layer in trained.items() if id(p) not in in_optimizers}
    if layers:
        names = some([getattr(layer, "label", type(layer).__name__) for layer in layers.values()])
        log_once(
            f"{names}: no optimizer of this process holds the parameters, so that they do not "
            f"train; {type(optimizer).__name__} holds others of their shapes, which have no "
            f"gradient. The layers were put into the model after its optimizer was made, as "
            f"Lightning's precision='transformer-engine' does in setup(model, optimizer). Make the "
            f"optimizer after setup_module(model), or use fp8core.lightning.Fp8CorePrecision, "
            f"which keeps the parameters."
        )


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    groups = vars(optimizer).get("param_groups", ())  # none yet while it is constructed
    return [parameter for group in groups for parameter in group["params"]]


class FP8FwdTensors(enum.IntEnum):
    """The slots of ``scaling_fwd``; those of further products follow, three for each."""

    GEMM1_INPUT, GEMM1_WEIGHT, GEMM1_OUTPUT = 0, 1, 2
    GEMM2_INPUT, GEMM2_WEIGHT, GEMM2_OUTPUT = 3, 4, 5
    GEMM3_INPUT, GEMM3_WEIGHT, GEMM3_OUTPUT = 6, 7, 8


class FP8BwdTensors(enum.IntEnum):
    """The slots of ``scaling_bwd``; those of further products follow, two for each."""

    GRAD_OUTPUT1, GRAD_INPUT1 = 0, 1
    GRAD_OUTPUT2, GRAD_INPUT2 = 2, 3
    GRAD_OUTPUT3, GRAD_INPUT3 = 4, 5


class _Meta(dict[str, Any]):
    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(
            f"fp8_meta has no {key!r} here; it has {', '.join(self)}. scaling_fwd and scaling_bwd "
            f"are there after a run under DelayedScaling, or fp8core.prepare(model, recipe)"
        )

    def __setitem__(self, key: str, value: Any) -> None:
        """Copy a delayed state of another layer, and say once that another entry has no effect:
        Megatron writes both.

        Raises:
            OperandError: a recipe, a group or a state is something else.
        """
        if isinstance(value, ScalingMeta) and key in self:
            self[key].amax_history = value.amax_history  # of another size nothing is written
            self[key].scale = value.scale
            return
        is_group = value is None or is_process_group(value)
        fits = {"recipe": isinstance(value, Recipe), "fp8_group": is_group}
        if not fits.get(key, not key.startswith("scaling_")):
            raise OperandError(f"fp8_meta[{key!r}] cannot be {reprlib.repr(value)}. {_META}")
        if value is not self.get(key) and value != self.get(key):
            log_once(f"fp8_meta[{key!r}] is read alone, and was written without effect. {_META}")

    def update(self, *entries: Any, **named: Any) -> None:
        """Write the entries one by one."""
        for key, value in dict(*entries, **named).items():
            self[key] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


_META = (
    "The recipe and the group are those of autocast(recipe=, amax_reduction_group=), or of "
    "convert(model, recipe); delayed scales are written in place, as "
    "fp8_meta['scaling_fwd'].scale.fill_(1)."
)


class ScalingMeta:
    """The delayed state of one direction of a layer, under the names that Transformer Engine has.

    ``scale [slots]`` and ``amax_history [length, slots]`` are the layer's buffers themselves, which
    may be written; ``scale_inv [slots]`` is computed, and a write to it writes the scale. All are
    float32, their slots those of :class:`FP8FwdTensors` and :class:`FP8BwdTensors`. A tensor of
    another shape is an OperandError.
    """

    __slots__ = ("_layer", "_way")
    _layer: torch.nn.Module
    _way: str

    def __init__(self, layer: torch.nn.Module, way: str) -> None:
        object.__setattr__(self, "_layer", layer)  # not by __setattr__, which writes tensors
        object.__setattr__(self, "_way", way)

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in ("scale", "scale_inv", "amax_history"):
            raise AttributeError(f"a delayed state has scale, scale_inv, amax_history, no {name!r}")
        tensor = self._layer._buffers[f"{'scale' if name == 'scale_inv' else name}_{self._way}"]
        assert tensor is not None
        return _Inverse.of(tensor) if name == "scale_inv" else tensor

    def __setattr__(self, name: str, value: torch.Tensor) -> None:
        tensor = getattr(self, name)
        if isinstance(value, torch.Tensor) and value.shape != tensor.shape:
            raise OperandError(
                f"fp8_meta: {name} is {list(value.shape)}; expected {list(tensor.shape)}, as the "
                f"layer and the recipe's amax_history_len have it."
            )
        tensor.copy_(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return ScalingMeta, (self._layer, self._way)


class _Inverse(torch.Tensor):
    """The reciprocals of a ``scale``, or a view of them; a write to either writes the reciprocals
    of the ``whole`` to it."""

    scale: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, scale: torch.Tensor) -> _Inverse:
        with torch.inference_mode(False):  # whose tensors do not count writes
            whole = scale.reciprocal()
            return cls._viewing(whole, whole, scale)

    @classmethod
    def _viewing(cls, view: torch.Tensor, whole: torch.Tensor, scale: torch.Tensor) -> _Inverse:
        inverse = view.as_subclass(cls)
        inverse.whole, inverse.scale = whole, scale
        return inverse

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def linked(x: torch.Tensor) -> torch.Tensor:
            """Return a view of an argument as one whose writes reach the scale."""
            at = x.untyped_storage().data_ptr()
            for inverse, _ in before:
                if not isinstance(x, cls) and inverse.untyped_storage().data_ptr() == at:
                    return cls._viewing(x, inverse.whole, inverse.scale)
            return x

        with within_no_subclass():
            tensors = pytree.tree_leaves((args, kwargs))
            before = [(x, x._version) for x in tensors if isinstance(x, _Inverse)]
            result = func(*args, **(kwargs or {}))
            for inverse, version in before:
                if inverse._version != version:
                    inverse.scale.copy_(inverse.whole.reciprocal())
            return pytree.tree_map_only(torch.Tensor, linked, result)


class _ParallelOption:
    """An attribute of all layers: of those that can be spread over ranks what ``read`` says of
    them, of others what was written, else the option of a single rank."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None or isinstance(layer, ParallelModule):
            return self if layer is None else self._read(layer)
        return vars(layer).get(self._name, _SINGLE_RANK[self._name])

    def __set__(self, layer: Any, value: object) -> None:
        vars(layer)[self._name] = value


class TransformerEngineBaseModule(_Layer, LowPrecisionModule):
    """Base of the layers with GEMMs, with the attributes that frameworks read.

    Frameworks write ``tp_size``, ``tp_group`` and ``sequence_parallel`` too, also before the
    constructor. A layer that can be spread over ranks keeps the arguments of its constructor.
    """

    tp_size: Any = _ParallelOption(lambda layer: layer.parallel.size)
    tp_group: Any = _ParallelOption(ParallelModule.tp_group.fget)  # type: ignore[attr-defined]  # a property
    # Whether rows outside of the parallel linears are split over the ranks.
    sequence_parallel: Any = _ParallelOption(lambda layer: layer.parallel.sequence)

    @property
    def fp8(self) -> bool:
        """Whether the layer would compute in low precision now."""
        return active(self.outside_autocast).quantize is not None

    @property
    def fp8_calibration(self) -> bool:
        """Whether the layer would record amaxes for a recipe now, in high precision."""
        return active(self.outside_autocast).observe is not None

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """The recipe and process group of the active autocast, outside of any the recipe of the
        last run that had one; and of a layer of linears with delayed scales ``scaling_fwd`` and
        ``scaling_bwd``, see :class:`ScalingMeta`."""
        request, bounds = active(self.outside_autocast), [*self._bindings.table.values()]
        ran = next(filter(None, (bound and bound.recipe for bound in reversed(bounds))), None)
        recipe = request.quantize or request.observe or ran or get_default_recipe()
        has_scales = self.plan_type is LinearPlan and self._buffers.get("scale_fwd") is not None
        ways = ("fwd", "bwd") if has_scales else ()
        scaling = {f"scaling_{way}": ScalingMeta(self, way) for way in ways}
        group = request.process_group
        return _Meta(fp8_checkpoint=False, fp8_group=group, recipe=recipe, **scaling)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: state is created when a recipe first needs it."""

    def get_extra_state(self) -> torch.Tensor:
        """Return the delayed scaling in Transformer Engine's form, for Megatron's layers; an empty
        tensor for others, whose ``state_dict`` has its buffers."""
        if not self._is_megatron_s():
            return torch.empty(0, dtype=torch.uint8)
        return written_state(self._buffers, self.plan_type)

    def set_extra_state(self, state: Any) -> None:
        """Take what :meth:`get_extra_state` returned."""

    def _reads_extra_state(self) -> bool:
        return False

    def _is_megatron_s(self) -> bool:
        """Whether the layer is one of Megatron's, by the method that its checkpoints call."""
        return hasattr(type(self), "sharded_state_dict")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep: bool) -> None:
        """Save the delayed scaling in one way: as buffers, or as the extra state."""
        super()._save_to_state_dict(destination, prefix, keep)
        if self._is_megatron_s() and destination[f"{prefix}{EXTRA_STATE}"].numel():
            for name in BUFFERS:
                destination.pop(prefix + name, None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as fp8core's layers do, which take no extra state; put the key back for torch."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing: list[str] = args[2]
        key = f"{prefix}{EXTRA_STATE}"
        if key in missing:
            missing.remove(key)


TransformerEngineBaseModule.__module__ = "transformer_engine.pytorch.module.base"


class _Biased(TransformerEngineBaseModule):
    """A layer whose call returns its bias too, if asked: an empty tensor if it has none."""

    return_bias: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as fp8core's layer does."""
        result = super().forward(*args, **kwargs)
        if self.return_bias and not self.use_bias:
            empty = next(self.parameters()).detach().new_empty(0)
            return (result[0], empty, *result[2:])
        return result


class Linear(_Biased, linear.Linear, module="module.linear"):
    """:class:`fp8core.Linear` under Transformer Engine's name."""


class LayerNormLinear(_Biased, layernorm_linear.LayerNormLinear, module="module.layernorm_linear"):
    """:class:`fp8core.LayerNormLinear` under Transformer Engine's name."""


class LayerNormMLP(_Biased, layernorm_mlp.LayerNormMLP, module="module.layernorm_mlp"):
    """:class:`fp8core.LayerNormMLP` under Transformer Engine's name."""


class GroupedLinear(
    TransformerEngineBaseModule, grouped_linear.GroupedLinear, module="module.grouped_linear"
):
    """:class:`fp8core.GroupedLinear` under Transformer Engine's name.

    Megatron's subclass saves a state for each expert, from a pickle of Transformer Engine's; here
    Megatron's method gives way to a method that writes the layer's delayed scales.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_split_extra_state" in vars(cls):
            cls._split_extra_state = GroupedLinear._split_extra_state  # type: ignore[method-assign]  # see above

    def _split_extra_state(self, state: Any) -> list[torch.Tensor]:
        """Return the ``_extra_state`` of each expert; ``state`` is that of all."""
        return split_state(self._buffers, self.num_gemms)

    def _saved_state(self, state_dict: Mapping[str, Any], prefix: str) -> Imported:
        """Return the delayed state, also that of single experts, which Megatron would unpickle."""
        keys = self._expert_keys(prefix)
        if not any(key in state_dict for key in keys[1:]):
            return super()._saved_state(state_dict, prefix)
        buffers = [key for key in super()._state_keys(prefix) if key not in keys]
        state = {key: state_dict[key] for key in buffers if key in state_dict}
        imported = super()._saved_state(state, prefix)
        try:
            merged = merge_states([state_dict.get(key) for key in keys])
        except OperandError as error:
            return Imported({}, [str(error)])
        return imported._replace(state=imported.state or merged)

    def _state_keys(self, prefix: str) -> list[str]:
        return [*super()._state_keys(prefix), *self._expert_keys(prefix)]

    def _expert_keys(self, prefix: str) -> list[str]:
        return [f"{prefix}{EXTRA_STATE}{number or ''}" for number in range(self.num_gemms)]


class _Norm(_Layer):
    """A norm: the option that its gradients are summed over ranks is one of its parameters."""

    def _construct(self, *args: Any, **kwargs: Any) -> None:
        arguments = _named_arguments(self._native.__init__, args, kwargs)
        is_split = bool(arguments.pop("sequence_parallel", None))
        super()._construct(**arguments)
        self.sequence_parallel = is_split
        for parameter in self.parameters():
            parameter.sequence_parallel = is_split  # type: ignore[attr-defined]  # Megatron reads it


class LayerNorm(_Norm, norm.LayerNorm, module="module.layernorm"):
    """:class:`fp8core.LayerNorm` under Transformer Engine's name."""


class RMSNorm(_Norm, norm.RMSNorm, module="module.rmsnorm"):
    """:class:`fp8core.RMSNorm` under Transformer Engine's name."""


_FUSED = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")  # both name the engine of the device here
_UNFUSED = "NVTE_UNFUSED_ATTN"
_ATTENTION = ("attention", "attention_backward")


def _is_on(name: str) -> bool:
    """Return whether the environment's variable ``name`` of Transformer Engine's, an integer, is
    not 0; it is 1 where it is not set.

    Raises:
        RecipeError: it is no integer, by which Transformer Engine fails too.
    """
    value = os.environ.get(name, "1")
    try:
        return int(value) != 0
    except ValueError:
        raise RecipeError(f"{name}={value!r}: expected an integer, 0 or 1.") from None


def _engine_of_environment() -> LeftOut:
    """Return the backends of attention that the environment turns off, as Transformer Engine reads
    it: the reference is the unfused engine, any other a fused one."""
    off = [name for name in (*_FUSED, _UNFUSED) if not _is_on(name)]
    if len(off) == len(_FUSED) + 1:
        raise UnsupportedError(
            f"attention: {'=0, '.join(off)}=0 turn off every engine. Set {_UNFUSED}=1 for the "
            f"reference, or NVTE_FUSED_ATTN=1 for the backend of the device."
        )
    fused = [name for name in plugins.load().backends if name != "reference"]
    left_out = [(name, "=0 and ".join(_FUSED)) for name in fused if {*_FUSED} <= {*off}]
    left_out += [("reference", _UNFUSED)] if _UNFUSED in off else []
    return tuple((name, op, f"{why}=0") for name, why in left_out for op in _ATTENTION)


class DotProductAttention(
    TransformerEngineBaseModule,
    attention.DotProductAttention,
    module="attention.dot_product_attention.dot_product_attention",
):
    """:class:`fp8core.DotProductAttention` under Transformer Engine's name.

    Dropout draws within the ``fork()`` of the tracker that the constructor gets. NVTE_FLASH_ATTN,
    NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN are read when the layer is made, and dispatch chooses none
    of the backends that they turn off.

    Raises:
        UnsupportedError: they turn off every one.
    """

    _engines: LeftOut = ()

    def _construct(self, *args: Any, **kwargs: Any) -> None:
        engines = _engine_of_environment()
        super()._construct(*args, **kwargs)
        self._engines = engines

    @property
    def runs_apart(self) -> bool:
        """Whether a call draws within the tracker's ``fork()``, or the environment leaves engines
        out."""
        return self._draws_in_fork or self._engines != ()

    @property
    def _draws_in_fork(self) -> bool:
        return self._tracker[0] is not None and self.training and self.attention_dropout > 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend as fp8core's layer does, by an engine that the environment leaves.

        Raises:
            UnsupportedError: none of them runs this attention.
        """
        tracker = self._tracker[0]
        draws = tracker().fork() if tracker is not None and self._draws_in_fork else None
        if draws is None and not self._engines:
            return super().forward(*args, **kwargs)
        with activated(chosen().leaving_out(self._engines)):
            if draws is None:
                return super().forward(*args, **kwargs)
            with draws:
                return super().forward(*args, **kwargs)


class _Composed(_Layer):
    """A layer of layers, which are under Transformer Engine's names as well."""

    def inner(self, kind: Any) -> Any:
        """Return the class here whose layers are of fp8core's ``kind``."""
        return next(layer for layer in _LAYERS if layer._native is kind)


class MultiheadAttention(
    _Composed, multihead_attention.MultiheadAttention, module="attention.multi_head_attention"
):
    """:class:`fp8core.MultiheadAttention` under Transformer Engine's name."""


class TransformerLayer(_Composed, transformer_layer.TransformerLayer, module="transformer"):
    """:class:`fp8core.TransformerLayer` under Transformer Engine's name."""


_LAYERS: tuple[type[_Layer], ...] = (
    *(Linear, LayerNormLinear, LayerNormMLP, LayerNorm, RMSNorm, DotProductAttention),
    MultiheadAttention,
)
