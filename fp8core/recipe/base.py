"""The parts that recipes share: formats by name, the base class, plans, and checks of fields."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core.errors import (
    FormatNameError,
    FrozenFieldError,
    RecipeError,
    UnsupportedError,
    checked_choice,
    did_you_mean,
    no_argument,
)
from fp8core.recipe.plan import (
    ATTENTION_BACKWARDS,
    ATTENTION_OUTPUTS,
    HOLDING,
    NONFINITE,
    AttentionPlan,
    DelayedPlan,
    GemmPlan,
    LayerRole,
    LinearPlan,
    Plan,
    TensorPlan,
)
from fp8core.torch_ops.expression import expression_of


class FormatRange(NamedTuple):
    """The largest finite values of a format's forward and backward operands."""

    max_fwd: float
    max_bwd: float


class _FormatNames(type):
    def __getattr__(cls, name: str) -> Format:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return Format(name)
        except RecipeError as error:  # hasattr and inspect expect the error of an attribute
            raise FormatNameError(str(error)) from None

    def __getitem__(cls, name: str) -> Format:
        return Format(name)


class Format(str, metaclass=_FormatNames):
    """The number formats of forward and backward operands, by name.

    ``Format.E4M3``, ``Format.E5M2``, ``Format.E2M1`` use one format both ways, ``Format.HYBRID``
    is e4m3 forward and e5m2 backward, and a format that a plug-in registers goes by its name, as in
    ``Format.HIF8``. A format is a plain string by value: ``Format.HYBRID == "hybrid"``. It has
    ``name`` and ``value`` like the members of Transformer Engine's enumeration:

    >>> Format.HYBRID.name, Format.HYBRID.value.max_bwd
    ('HYBRID', 57344.0)

    Raises:
        RecipeError: no format of that name is registered; resolved when the name is used.
    """

    __slots__ = ()
    _PAIRS: ClassVar = {"hybrid": ("e4m3", "e5m2")}

    def __new__(cls, name: str) -> Format:
        """Look ``name`` up, in upper or lower case."""
        if not isinstance(name, str):
            raise RecipeError(f"Format({name!r}): expected the name of a format, as 'e4m3' is one.")
        word = name.lower()
        if word not in cls._PAIRS:
            formats.by_name(word, besides=cls._PAIRS)
        return super().__new__(cls, word)

    @property
    def name(self) -> str:
        """The name in upper case."""
        return self.upper()

    @property
    def value(self) -> FormatRange:
        """The largest finite values forward and backward."""
        return FormatRange(self.max_fwd, self.max_bwd)

    @property
    def forward(self) -> formats.FormatSpec:
        """The format of input and weight."""
        return formats.by_name(self._PAIRS.get(self, (str(self),))[0])

    @property
    def backward(self) -> formats.FormatSpec:
        """The format of grad_output."""
        return formats.by_name(self._PAIRS.get(self, (str(self),))[-1])

    @property
    def max_fwd(self) -> float:
        """The largest finite value of the forward format."""
        return self.forward.max

    @property
    def max_bwd(self) -> float:
        """The largest finite value of the backward format."""
        return self.backward.max


class MMParams(NamedTuple):
    """How one GEMM accumulates: in float32 (split), or in the device's faster, less exact way."""

    use_split_accumulator: bool = True


class QParams(NamedTuple):
    """The cast of one kind of tensor, as a recipe's fields describe it; to read."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


Variants: TypeAlias = "Mapping[str, Mapping[str, Any]]"
"""Arguments of a recipe by the short name of what they make of it."""


class Recipe:
    """Base of every recipe: a frozen dataclass with a method ``plan(role, dtype)``.

    ``reads_names``: whether the plan depends on the layer's name. torch.compile then captures a
    graph for each name instead of one for all layers of a shape.

    ``delayed()``, ``mxfp8()`` and the others say which of Transformer Engine's recipes a recipe is,
    or a class of recipes. Nothing here asks them: a layer computes by the recipe's plan.
    """

    __slots__ = ("__weakref__",)  # torch refers so to values in graphs
    reads_names: ClassVar[bool] = True
    # The recipe of Transformer Engine that this recipe is, by the name of its predicate.
    family: ClassVar[str | None] = None
    # Why fp8_dpa and fp8_mha are refused where the recipe is made; None for a recipe that has them,
    # or whose plan refuses them where attention runs.
    without_attention: ClassVar[str | None] = (
        "attention has one scale a tensor. Use DelayedScaling or Float8CurrentScaling, for "
        "attention alone by PerLayer."
    )
    # Arguments with which the plan has other operations, by a short name: what a backend is tested
    # by besides the defaults.
    variants: ClassVar[Variants] = {}

    @classmethod
    def delayed(cls) -> bool:
        """Whether the recipe is :class:`DelayedScaling`."""
        return cls.family == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether the recipe is :class:`Float8CurrentScaling`."""
        return cls.family == "float8_current_scaling"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether the recipe is :class:`DelayedScaling` or :class:`Float8CurrentScaling`."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether the recipe is :class:`Float8BlockScaling`."""
        return cls.family == "float8_block_scaling"

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether the recipe is :class:`MXFP8BlockScaling`."""
        return cls.family == "mxfp8"

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether the recipe is :class:`NVFP4BlockScaling`."""
        return cls.family == "nvfp4"

    @classmethod
    def custom(cls) -> bool:
        """Whether the recipe is :class:`CustomRecipe`."""
        return cls.family == "custom"

    @property
    def quantization_alignment(self) -> int:
        """The multiple of rows to which Transformer Engine pads a group."""
        return 16

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """Return what makes an equal recipe in a graph of torch, where its class is registered as
        one of values."""
        return expression_of(self)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse unknown arguments by name, before the ``__init__`` of the dataclass."""
        parameters = list(inspect.signature(cls.__init__).parameters)[1:] if kwargs else []
        for name in kwargs:
            if name not in parameters:
                raise RecipeError(no_argument(cls.__name__, name, parameters))
        return super().__new__(cls)

    def plan(self, role: LayerRole, dtype: torch.dtype) -> Plan:
        """Return how a layer of ``role`` computes on activations of ``dtype``: a
        :class:`~fp8core.plan.LinearPlan` for linear layers, for others the plan of their kind."""
        raise NotImplementedError


_Value = TypeVar("_Value")
_Recipe = TypeVar("_Recipe", bound=Recipe)


def loads_earlier(kind: type[_Value]) -> type[_Value]:
    """Have the frozen dataclass ``kind`` load values that an earlier version pickled, which lack
    the last fields."""
    fields: tuple[Any, ...] = dataclasses.fields(kind)  # type: ignore[arg-type]  # each is one

    def set_state(instance: Any, state: Sequence[Any]) -> None:
        all_fields = dataclasses.fields(instance)  # those of a subclass are behind those of kind
        end = len(state) - (len(all_fields) - len(fields))
        missing = [field.default for field in fields[end:]]
        for field, value in zip(all_fields, [*state[:end], *missing, *state[end:]], strict=True):
            object.__setattr__(instance, field.name, value)

    if "__setstate__" in vars(kind):  # of a dataclass with slots
        kind.__setstate__ = set_state  # type: ignore[attr-defined]
    return kind


def explains_writes(kind: type[_Recipe]) -> type[_Recipe]:
    """Have the frozen dataclass ``kind`` say how to change a field, where one is written, and load
    recipes that an earlier version pickled, which lack the last fields."""

    def refuse_write(recipe: Any, name: str, value: object) -> None:
        fields = [field.name for field in dataclasses.fields(recipe)]
        if name not in fields:
            raise FrozenFieldError(
                f"{kind.__name__} has no field {name!r}; fields: {', '.join(fields)}."
                f"{did_you_mean(name, fields)}"
            )
        raise FrozenFieldError(
            f"a recipe is a value, whose fields cannot be written. Make another one: "
            f"recipe = dataclasses.replace(recipe, {name}={value!r})"
        )

    def refuse_deletion(recipe: Any, name: str) -> None:
        raise FrozenFieldError(
            f"a recipe is a value: {kind.__name__}'s field {name!r} cannot be deleted."
        )

    loads_earlier(kind)
    kind.__setattr__ = refuse_write  # type: ignore[method-assign]  # instead of the dataclass's
    kind.__delattr__ = refuse_deletion  # type: ignore[method-assign]
    return kind


_Kind = TypeVar("_Kind", bound=Plan)


def plan_of(kind: type[_Kind], recipe: Recipe | None, role: LayerRole, dtype: torch.dtype) -> _Kind:
    """Return the plan of a layer that computes by plans of ``kind``; without a recipe, or by one
    that quantizes nothing in it, the plan of high precision.

    Raises:
        RecipeError: the recipe has a plan of another kind for the layer, or one with an unknown
            value of ``nonfinite`` or ``remade``.
    """
    plan = kind() if recipe is None else recipe.plan(role, dtype)
    if isinstance(plan, kind):
        check_choice(plan, "nonfinite", NONFINITE)
        if isinstance(plan, LinearPlan) and not set(HOLDING["least"]).issuperset(plan.remade):
            choices = HOLDING["least"]
            raise RecipeError(f"LinearPlan(remade={plan.remade!r}): expected some of {choices}.")
        return plan
    is_left_out = kind.is_left_out and isinstance(plan, LinearPlan)
    if is_left_out or (isinstance(plan, Plan) and plan.is_high_precision):
        return kind()
    raise RecipeError(
        f"{type(recipe).__name__}.plan(LayerRole({role.kind!r})) returned {type(plan).__name__}; "
        f"expected {kind.__name__}. Use PerLayer to give layers of this kind another recipe, or "
        f"None for high precision."
    )


def spec_of(
    fp8_format: str, tensor: str, block: tuple[int, int] = (0, 0), **options: Any
) -> OperandSpec:
    """Return how ``tensor`` is quantized in its format of ``fp8_format``; ``options`` are further
    fields of OperandSpec."""
    pair = Format(fp8_format)
    if tensor == "grad_output":
        return OperandSpec(pair.backward.name, block, pair.backward.target_bwd, **options)
    return OperandSpec(pair.forward.name, block, pair.forward.target_fwd, **options)


LINEAR_TENSORS = ("input", "weight", "grad_output")
"""The tensors of a linear layer."""

DELAYED: Mapping[str, Any] = {"delayed": True, "cast_first": False}
"""The options of an operand with a delayed scale; a fused norm or activation casts from float32."""


def tensors_of(
    fp8_format: str,
    block: tuple[int, int] = (0, 0),
    *,
    weight: tuple[int, int] | None = None,
    **options: Any,
) -> dict[str, TensorPlan]:
    """Return the plans of the three tensors, each in blocks of one size in both orientations:
    ``weight`` is that of the weight, None for ``block``."""
    blocks = dict.fromkeys(LINEAR_TENSORS, block) | ({} if weight is None else {"weight": weight})
    specs = {name: spec_of(fp8_format, name, size, **options) for name, size in blocks.items()}
    return {name: TensorPlan(spec, spec) for name, spec in specs.items()}


SPLIT = MMParams(use_split_accumulator=True)
FAST = MMParams(use_split_accumulator=False)
FAST_FPROP = (FAST, SPLIT, SPLIT)


def linear_plan(
    recipe: Any,
    tensors: Mapping[str, TensorPlan],
    accumulators: tuple[MMParams, MMParams, MMParams] = (SPLIT, SPLIT, SPLIT),
    *,
    delayed: DelayedPlan | None = None,
) -> LinearPlan:
    """Return the three GEMMs of ``recipe`` from the plans of the tensors they multiply.

    ``tensors`` are those of :data:`LINEAR_TENSORS`; ``accumulators`` those of fprop, dgrad and
    wgrad.
    """
    x, w, dy = (tensors[name] for name in LINEAR_TENSORS)
    fprop = _gemm_plan(x.rowwise, w.rowwise, accumulators[0])
    if recipe.backward_override is not None:
        return LinearPlan(
            fprop,
            delayed=delayed,
            nonfinite=recipe.nonfinite,
            remade=_remade(recipe),
            dequantizes=recipe.backward_override == "dequantized",
        )
    return LinearPlan(
        fprop,
        _gemm_plan(dy.rowwise, w.columnwise, accumulators[1]),
        _gemm_plan(dy.columnwise, x.columnwise, accumulators[2]),
        delayed,
        recipe.nonfinite,
        _remade(recipe),
    )


def _remade(recipe: Any) -> tuple[str, ...]:
    """Return what backward makes again by the fields of ``recipe``."""
    remade = HOLDING[recipe.holding]
    is_added = recipe.requantize_weights and "weight" not in remade
    return ("weight", *remade) if is_added else remade


def _gemm_plan(a: OperandSpec | None, b: OperandSpec | None, params: MMParams) -> GemmPlan:
    if a is None and b is None:  # only low precision has the faster accumulator
        return GemmPlan()
    return GemmPlan(a, b, not params.use_split_accumulator)


def attention_plan(
    recipe: Any, delayed: DelayedPlan | None = None, **options: Any
) -> AttentionPlan:
    """Return the plan of attention for ``recipe``, whose tensors have one scale each: delayed ones
    with ``delayed``, else by ``options``, fields of OperandSpec, from the tensors themselves."""

    tensors = tensors_of(recipe.fp8_format, delayed=delayed is not None, **options)
    forward = tensors["input"].rowwise
    gradient = tensors["grad_output"].rowwise if recipe.fp8_dpa_backward == "fp8" else None
    out = forward if recipe.fp8_dpa_output == "fp8" else None
    return AttentionPlan(forward, forward, gradient, gradient, out, delayed, recipe.nonfinite)


def check_choice(recipe: Any, field: str, choices: Collection[object]) -> None:
    """Raise RecipeError unless ``field`` of ``recipe`` is one of ``choices``."""
    checked_choice(type(recipe).__name__, field, getattr(recipe, field), choices, RecipeError)


def check_attention(recipe: Any) -> None:
    """Raise RecipeError unless the options of ``fp8_dpa`` are known and have something to decide.

    The options are ``fp8_dpa_backward`` and ``fp8_dpa_output``; each default is the first choice.
    """
    owner = type(recipe).__name__
    options = {"fp8_dpa_backward": ATTENTION_BACKWARDS, "fp8_dpa_output": ATTENTION_OUTPUTS}
    for name, choices in options.items():
        check_choice(recipe, name, choices)
        value = getattr(recipe, name)
        if value != choices[0] and not (recipe.fp8_dpa or recipe.fp8_mha):
            raise RecipeError(f"{owner}({name}={value!r}) needs fp8_dpa=True.")


def delayed_plan(recipe: Any) -> DelayedPlan:
    """Return the plan of the layer's delayed state by the fields of ``recipe``."""
    return DelayedPlan(
        recipe.amax_history_len,
        recipe.margin,
        recipe.amax_compute_algo,
        recipe.scaling_factor_compute_algo,
        recipe.reduce_amax,
    )


def check_delayed(fields: Any) -> None:
    """Raise RecipeError unless the fields of delayed scaling are valid."""
    recipe, plan = type(fields).__name__, delayed_plan(fields)
    length, margin, algorithm = plan.history_len, plan.margin, plan.amax_algorithm
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise RecipeError(f"{recipe}(amax_history_len={length!r}): expected an integer >= 1.")
    if not isinstance(margin, int | float) or not math.isfinite(margin):
        raise RecipeError(f"{recipe}(margin={margin!r}): expected a finite number.")
    if not callable(algorithm) and algorithm not in ("max", "most_recent"):
        raise RecipeError(
            f"{recipe}(amax_compute_algo={algorithm!r}): expected 'max', 'most_recent' or a "
            f"function of the history."
        )
    if plan.scaling_algorithm is not None and not callable(plan.scaling_algorithm):
        raise RecipeError(
            f"{recipe}(scaling_factor_compute_algo={plan.scaling_algorithm!r}): expected a "
            f"function or None."
        )


def check_format(recipe: Any, refuse: tuple[str, ...] = (), field: str = "fp8_format") -> None:
    """Raise RecipeError unless ``field`` names a format for elements; store it as a Format."""
    owner, name = type(recipe).__name__, getattr(recipe, field)
    chosen = Format(name)
    if chosen in refuse:
        raise RecipeError(
            f"{owner}({field}={name!r}): {chosen} has too few mantissa bits for "
            f"the forward pass; use Format.E4M3 or Format.HYBRID."
        )
    if not any(value < 0 for value in chosen.forward.values):
        raise RecipeError(
            f"{owner}({field}={name!r}): {chosen} has no negative values, it is for scales."
        )
    # Recipes with 'E4M3', 'e4m3' and Format.E4M3 are equal.
    object.__setattr__(recipe, field, chosen)


_OVERRIDES = (None, "high_precision", "dequantized")


def check_common(recipe: Any, overrides: tuple[str | None, ...] = _OVERRIDES) -> None:
    """Raise if a field that recipes share is invalid or asks for what is not offered.

    Shared fields are those of attention, ``backward_override``, ``nonfinite``,
    ``requantize_weights``, ``holding`` and the accumulators.
    """
    owner = type(recipe).__name__
    for name in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, name) and recipe.without_attention is not None:
            raise UnsupportedError(
                f"{owner}({name}=True) is not offered: {recipe.without_attention}"
            )
    check_choice(recipe, "backward_override", overrides)
    check_choice(recipe, "nonfinite", NONFINITE)
    if not isinstance(recipe.requantize_weights, bool):
        raise RecipeError(
            f"{owner}(requantize_weights={recipe.requantize_weights!r}): expected True or False."
        )
    check_choice(recipe, "holding", HOLDING)
    for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        params = getattr(recipe, name, SPLIT)
        if not isinstance(params, MMParams):
            raise RecipeError(f"{owner}({name}={params!r}): expected an MMParams.")
