"""Recipes that the user composes: a recipe for each layer, or an operand format for each tensor."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core.dispatch.isolation import Failure, attempt, is_a
from fp8core.errors import RecipeError
from fp8core.recipe.base import (
    DELAYED,
    FAST_FPROP,
    LINEAR_TENSORS,
    Format,
    Recipe,
    check_common,
    check_delayed,
    check_format,
    delayed_plan,
    explains_writes,
    linear_plan,
    tensors_of,
)
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import (
    DEFAULT_HOLDING,
    HIGH_PRECISION,
    AmaxAlgorithm,
    DelayedPlan,
    GemmPlan,
    LayerRole,
    LinearPlan,
    Plan,
    ScalingAlgorithm,
    TensorPlan,
)

Key: TypeAlias = "str | LayerRole"
Rule: TypeAlias = "tuple[Key, Recipe | None]"


@explains_writes
@dataclass(frozen=True, slots=True, init=False)
class PerLayer(Recipe):
    """Different recipes for different layers: the first rule that matches a layer decides.

    Args:
        rules: a mapping, or pairs, from a pattern of the layer's name (``"*.fc1"``, as in a shell)
            or a :class:`~fp8core.plan.LayerRole` (its kind, and its name as a pattern if it has
            one) to a recipe or a recipe's name, or to None for no quantization.
        default: the recipe of every other layer, or its name; None for no quantization.

    >>> from fp8core import recipe
    >>> rules = {"*.head": None, recipe.LayerRole("grouped_linear"): recipe.MXFP8BlockScaling()}
    >>> mixed = recipe.PerLayer(rules, default="current")
    >>> mixed.default == recipe.Float8CurrentScaling()
    True

    Raises:
        RecipeError: a rule is no such pair, or no recipe has that name. When a layer is bound: a
            name pattern meets a layer without a name (``fp8core.prepare(model)`` gives names), or
            matches no layer of a prepared model.
    """

    rules: tuple[Rule, ...]
    default: Recipe | None

    def __init__(
        self,
        rules: Mapping[Key, Recipe | str | None] | Iterable[tuple[Key, Recipe | str | None]],
        default: Recipe | str | None = None,
    ) -> None:
        items = rules.items() if isinstance(rules, Mapping) else rules
        try:
            pairs = tuple((key, value) for key, value in items)
        except (TypeError, ValueError):
            raise RecipeError(
                f"PerLayer({rules!r}): expected a mapping, or pairs of a pattern and a recipe."
            ) from None
        read: list[Rule] = []
        for key, value in pairs:
            if not isinstance(key, str | LayerRole):
                raise RecipeError(f"PerLayer rule {key!r}: expected a name pattern or a LayerRole.")
            read.append((key, recipe_from(value, f"PerLayer rule {key!r}")))
        by_default = recipe_from(default, "PerLayer(default=...)")
        object.__setattr__(self, "rules", tuple(read))  # frozen, as every recipe is
        object.__setattr__(self, "default", by_default)

    def choose(self, role: LayerRole) -> Recipe | None:
        """Return the recipe of the first rule that matches ``role``, else the default."""
        for key, value in self.rules:
            target = LayerRole(role.kind, key) if isinstance(key, str) else key
            if target.kind != role.kind:
                continue
            if target.name is None:
                return value
            if role.name is None:
                raise RecipeError(
                    f"PerLayer matches layers by name ({target.name!r}), but this "
                    f"{role.kind} has none. Call fp8core.prepare(model) first, or pass name=."
                )
            if fnmatch.fnmatchcase(role.name, target.name):
                return value
        return self.default

    def unmatched(self, roles: Collection[LayerRole]) -> list[str]:
        """Return the name patterns that match none of ``roles``, the layers of a whole model."""
        unmatched = []
        for key, value in self.rules:
            pattern = key if isinstance(key, str) else key.name
            kinds = {role.kind for role in roles} if isinstance(key, str) else {key.kind}
            names = [role.name for role in roles if role.kind in kinds and role.name is not None]
            if pattern is not None and not any(fnmatch.fnmatchcase(n, pattern) for n in names):
                unmatched.append(pattern)
            if isinstance(value, PerLayer):
                unmatched += value.unmatched(roles)
        return unmatched

    def plan(self, role: LayerRole, dtype: torch.dtype) -> Plan:
        """Return the plan of the recipe chosen for ``role``."""
        chosen = self.choose(role)
        return HIGH_PRECISION if chosen is None else chosen.plan(role, dtype)


@explains_writes
@dataclass(frozen=True, slots=True)
class WeightOnly(Recipe):
    """The weights of another recipe, multiplied by activations in high precision.

    A linear reads its weight at a byte an element, or half of one, and rounds nothing else: for
    generation, whose products of few rows take the time of reading the weights. Gradients are
    computed in high precision from the rounded weight. Where no backend multiplies such operands,
    the weight is decoded before the product. Attention stays in high precision.

    Args:
        recipe: the recipe, or its name; for single layers put ``WeightOnly`` into a
            :class:`PerLayer`.

    >>> from fp8core import recipe
    >>> plan = recipe.WeightOnly("block").plan(recipe.LayerRole(), torch.bfloat16)
    >>> plan.fprop.a, str(plan.fprop.b)
    (None, 'e4m3 block=(128,128) power_of_two')

    Raises:
        RecipeError: no recipe has that name, or it is a PerLayer.
    """

    recipe: Recipe | str = "rowwise"

    def __post_init__(self) -> None:
        """Look a name up."""
        chosen = recipe_from(self.recipe, "WeightOnly(recipe=...)")
        if chosen is None or isinstance(chosen, PerLayer):
            raise RecipeError(
                f"WeightOnly({self.recipe!r}): expected the recipe of the weights. For single "
                f"layers, PerLayer({{pattern: WeightOnly(recipe)}})."
            )
        object.__setattr__(self, "recipe", chosen)

    @property
    def reads_names(self) -> bool:  # type: ignore[override]  # known of the class elsewhere
        """Whether the plan depends on the layer's name."""
        return self.weights.reads_names

    @property
    def weights(self) -> Recipe:
        """The recipe of the weights."""
        assert isinstance(self.recipe, Recipe)
        return self.recipe

    def plan(self, role: LayerRole, dtype: torch.dtype) -> Plan:
        """Return the forward product of the recipe's weight; it is rounded to the nearest, by a
        scale of its own amax."""
        plan = self.weights.plan(role, dtype)
        if isinstance(plan, LinearPlan) and "weight" in plan.stored_by_users:
            raise RecipeError(
                "WeightOnly: the weight is quantized to a storage of the user's own, which nothing "
                "multiplies by activations in high precision. Return IdentityQuantizer() for the "
                "input and the gradient, and use the recipe itself."
            )
        if not isinstance(plan, LinearPlan) or plan.fprop.b is None:
            return HIGH_PRECISION
        weight = dataclasses.replace(plan.fprop.b, delayed=False, cast_first=True, stochastic=False)
        return LinearPlan(
            GemmPlan(None, weight),
            nonfinite=plan.nonfinite,
            dequantizes=True,
            makers=tuple(maker for maker in plan.makers if maker[0] == "weight"),
        )


# Layers whose tensors a factory is asked for as those of the dense products in them.
_LINEAR_KINDS = ("linear", "layernorm_linear", "layernorm_mlp", "sequential")


@dataclass(frozen=True, slots=True)
class QuantizerRole:
    """The tensor that a quantizer casts.

    Attributes:
        module_type: ``"linear"`` for every layer of dense products, also behind a norm or in a
            chain; ``"grouped_linear"``, or the kind of another layer.
        tensor_type: ``"input"``, ``"weight"`` or ``"grad_output"``.
        name: the layer's name; empty for a layer without one. A ``LayerNormMLP`` asks for its two
            products, ``"name.fc1"`` and ``"name.fc2"``, whose answers have to be equal.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


class QuantizerRequest:
    """Base of what a factory returns to ask for a quantizer with a state."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DelayedScalingRequest(QuantizerRequest):
    """A factory's request for a tensorwise delayed scale; fields as in :class:`DelayedScaling`.

    The tensors of one layer share one amax history, so all requests for a layer must agree in
    everything but the format.
    """

    fp8_format: str = Format.HYBRID
    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScalingAlgorithm | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        check_format(self)
        check_delayed(self)

    def delayed(self) -> DelayedPlan:
        """Return the plan of the layer's delayed state."""
        return delayed_plan(self)


QuantizerFactory: TypeAlias = Callable[[QuantizerRole], object]


@explains_writes
@dataclass(frozen=True, slots=True)
class CustomRecipe(Recipe):
    """A recipe for formats that no named recipe has, given in exactly one of two ways.

    Attributes:
        qfactory: called with a :class:`QuantizerRole` for ``input``, ``weight`` and
            ``grad_output``; returns an :class:`~fp8core.backend_api.OperandSpec` for both
            orientations, a :class:`~fp8core.plan.TensorPlan` of two (None in it: high precision),
            a :class:`DelayedScalingRequest`, or a quantizer: one of the library's that a plan
            describes is that plan, whatever its usages; any other object with ``__call__``,
            ``set_usage`` and ``make_empty`` is called to quantize, in eager and not for groups. Its
            plan is its attribute ``plan``, a TensorPlan of both orientations, or, without one, that
            of the QuantizedTensor which ``make_empty(shape)`` returns. A quantizer of
            :class:`fp8core.QuantizedTensorStorage` of its own, as that makes them or as its
            attribute ``custom`` says, multiplies them by its ``qgemm``.
        fp8_format, margin, amax_history_len, amax_compute_algo, scaling_factor_compute_algo: the
            scaling fields of :class:`DelayedScaling`; with them the recipe computes as that one.
            With a factory, which chooses the formats, ``fp8_format`` may be HYBRID, without effect.
        nonfinite: as in the named recipes, for all three tensors.
        requantize_weights, holding: as in the named recipes.
        quantization_alignment: accepted for compatibility; layers pad to multiples of the blocks.

    Raises:
        RecipeError: both ways, or neither; or what the factory returns for a linear layer without
            a name is in a format that is not registered. When a layer is bound: the factory
            returns something else, or different plans for the two products of a ``LayerNormMLP``.
    """

    family: ClassVar[str | None] = "custom"
    qfactory: QuantizerFactory | None = None
    fp8_format: str | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = field(default=128, compare=False)
    _: KW_ONLY
    margin: float | None = None
    amax_history_len: int | None = None
    amax_compute_algo: AmaxAlgorithm | None = None
    scaling_factor_compute_algo: ScalingAlgorithm | None = None
    nonfinite: str = "saturate"
    requantize_weights: bool = False
    holding: str = DEFAULT_HOLDING

    def __post_init__(self) -> None:
        """Check that exactly one way was taken."""
        if self.qfactory is not None and self.fp8_format == Format.HYBRID:
            object.__setattr__(self, "fp8_format", None)
        fields = self._scaling_fields()
        if (self.qfactory is None) == (not fields):
            named = "neither" if not fields else f"qfactory and {', '.join(fields)}"
            raise RecipeError(
                f"CustomRecipe takes either qfactory or scaling fields (fp8_format, margin, "
                f"amax_history_len, amax_compute_algo, scaling_factor_compute_algo), found {named}."
            )
        if self.qfactory is not None and not callable(self.qfactory):
            raise RecipeError(
                f"CustomRecipe(qfactory={self.qfactory!r}): expected a function of a QuantizerRole."
            )
        alignment = self.quantization_alignment
        if not isinstance(alignment, int) or alignment < 1:
            raise RecipeError(
                f"CustomRecipe(quantization_alignment={alignment!r}): expected an integer >= 1."
            )
        check_common(self, *([(None,)] if fields else []))
        if self.fp8_format is not None:
            check_format(self, refuse=("e5m2",))
        try:
            self._request()
        except RecipeError as error:
            raise RecipeError(f"CustomRecipe: {error}") from None
        if self.qfactory is not None:
            _check_formats(self.qfactory)

    def _scaling_fields(self) -> list[str]:
        names = ("fp8_format", "margin", "amax_history_len", "amax_compute_algo")
        present = [name for name in names if getattr(self, name) is not None]
        return present + ["scaling_factor_compute_algo"] * bool(self.scaling_factor_compute_algo)

    def _request(self) -> DelayedScalingRequest:
        return DelayedScalingRequest(
            **{name: getattr(self, name) for name in self._scaling_fields()}
        )

    def plan(self, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
        """Return the plan of the factory's answers for each tensor, or of the scaling fields.

        Raises:
            RecipeError: answers that do not fit together, or are no plans.
        """
        if self.qfactory is None:
            request = self._request()
            tensors = tensors_of(request.fp8_format, **DELAYED)
            return linear_plan(self, tensors, FAST_FPROP, delayed=delayed_plan(request))
        names = _names_of(role)
        plan, *rest = [self._plan_of_product(role, name, self.qfactory) for name in names]
        if any(_without_objects(second) != _without_objects(plan) for second in rest):
            raise RecipeError(
                f"CustomRecipe: qfactory returned different answers for {' and '.join(names)}, "
                f"which compute by one plan. Answer alike for both, or build the layer of "
                f"fp8core.LayerNormLinear, an operation of fp8core.ops and fp8core.Linear."
            )
        return plan

    def _plan_of_product(
        self, role: LayerRole, name: str, qfactory: QuantizerFactory
    ) -> LinearPlan:
        """Return the plan of the factory's answers for the dense product ``name``."""
        module_type = "linear" if role.kind in _LINEAR_KINDS else role.kind
        answers = {
            tensor: qfactory(QuantizerRole(module_type, tensor, name)) for tensor in LINEAR_TENSORS
        }
        delayed = [a for a in answers.values() if isinstance(a, DelayedScalingRequest)]
        requests = set(map(delayed_plan, delayed))
        if len(requests) > 1:
            raise RecipeError(
                f"CustomRecipe: the delayed slots of one layer share their history, "
                f"but qfactory asked for {sorted(map(str, requests))}."
            )
        makers = {tensor: maker for tensor, maker in answers.items() if _is_maker(maker)}
        tensors = {tensor: _tensor_plan(tensor, answer) for tensor, answer in answers.items()}
        plan = linear_plan(self, tensors, FAST_FPROP, delayed=next(iter(requests), None))
        if self.backward_override is None:
            plan = dataclasses.replace(plan, dequantizes=_dequantizes(answers, tensors))
        if makers:  # nobody knows whether they make the same again
            plan = dataclasses.replace(plan, makers=self._checked(makers), remade=())
        _check_products(plan)
        return plan

    def _checked(self, makers: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """Return ``makers`` unless a field asks for what the library's casts alone do."""
        options = {
            "nonfinite": self.nonfinite != "saturate",
            "requantize_weights": self.requantize_weights,
            "holding": self.holding not in ("fastest", DEFAULT_HOLDING),
            "backward_override": self.backward_override is not None,
        }
        for name in (name for name, is_set in options.items() if is_set):
            raise RecipeError(
                f"CustomRecipe({name}={getattr(self, name)!r}): qfactory returned objects for "
                f"{', '.join(makers)} that quantize by themselves, and know nothing of {name}. Let "
                f"it return their plans."
            )
        return tuple(makers.items())


def _dequantizes(answers: Mapping[str, object], tensors: Mapping[str, TensorPlan]) -> bool:
    """Return whether backward takes dequantized what it takes in high precision.

    Raises:
        RecipeError: of one tensor it would, of another not; or of the gradient.
    """
    dequantized = {
        tensor: getattr(answer, "dequantizes", False) is True
        for tensor, answer in answers.items()
        if tensors[tensor].rowwise is not None and tensors[tensor].columnwise is None
    }
    of_gradient = dequantized.pop("grad_output", False)
    if of_gradient or len({*dequantized.values()}) > 1:
        raise RecipeError(
            "CustomRecipe: qfactory asked for dequantized rows as the columns of "
            f"{'grad_output' if of_gradient else 'either input or weight'} in high precision; "
            "expected it of input and weight alike, and not of grad_output. Return "
            "HybridQuantizer(columnwise_source='original') there, or the same for both."
        )
    return any(dequantized.values())


def _check_products(plan: LinearPlan) -> None:
    """Raise if a product of ``plan`` has a storage of the user's beside an operand of ours."""
    theirs = sorted(plan.stored_by_users)
    ours = [name for name, specs in plan.tensors.items() if any(specs)]
    if theirs and ours:
        raise RecipeError(
            f"CustomRecipe: qfactory returned quantizers of storages of their own for "
            f"{', '.join(theirs)}, and of fp8core's tensors for {', '.join(ours)}, and nothing "
            f"multiplies the two. Return quantizers of storages for all three tensors, and "
            f"IdentityQuantizer() for those that stay in high precision."
        )


def _check_formats(qfactory: QuantizerFactory) -> None:
    """Raise if the factory's answers for a linear layer without a name are in unknown formats.

    A factory that cannot answer for one, and other faults of its answers, are left to the layers.
    """
    for tensor in LINEAR_TENSORS:
        answer = attempt(partial(qfactory, QuantizerRole("linear", tensor)))
        if isinstance(answer, Failure):
            if is_a(answer.error, RecipeError):
                answer.fail("CustomRecipe")
            return
        if isinstance(answer, OperandSpec | TensorPlan):
            _check_operands(tensor, answer)


def _check_operands(tensor: str, plan: OperandSpec | TensorPlan) -> None:
    """Raise if ``plan``, a factory's answer for ``tensor``, has an operand in an unknown format."""
    for spec in (plan,) if isinstance(plan, OperandSpec) else plan:
        if isinstance(spec, OperandSpec):
            try:
                formats.by_name(spec.format)
            except RecipeError as error:
                raise RecipeError(
                    f"CustomRecipe: qfactory returned for {tensor}: {error}"
                ) from None


def _names_of(role: LayerRole) -> tuple[str, ...]:
    """Return the names of the dense products in a layer, as Transformer Engine has them.

    Source: Transformer Engine 2.20, LayerNormMLP.get_quantizer_roles.
    """
    name = role.name or ""
    if role.kind != "layernorm_mlp":
        return (name,)
    prefix = f"{name}." if name else ""
    return f"{prefix}fc1", f"{prefix}fc2"


def _without_objects(plan: LinearPlan) -> tuple[LinearPlan, list[tuple[str, type]]]:
    """Return ``plan`` with the classes of the user's objects, which a factory makes anew."""
    return dataclasses.replace(plan, makers=()), [
        (name, type(maker)) for name, maker in plan.makers
    ]


_VERBS = ("__call__", "set_usage", "make_empty")


def _is_maker(answer: object) -> bool:
    """Say whether ``answer`` is an object that a layer has to call to quantize."""
    if isinstance(answer, type) or isinstance(getattr(answer, "cell", None), TensorPlan):
        return False
    return all(callable(getattr(answer, verb, None)) for verb in _VERBS)


def _plan_of_maker(maker: Any) -> Any:
    """Return the plan of a quantizer object, or of what it makes, whichever usages it has."""
    plan = getattr(maker, "plan", None)
    if isinstance(plan, TensorPlan):
        return plan
    maker.set_usage(rowwise=True, columnwise=True)
    return getattr(maker.make_empty((128, 128)), "plan", None)


def _tensor_plan(tensor: str, answer: object) -> TensorPlan:
    """Return the plan of ``tensor`` from a factory's answer."""
    if isinstance(answer, DelayedScalingRequest):
        return tensors_of(answer.fp8_format, **DELAYED)[tensor]
    plan: Any = answer
    if isinstance(answer, OperandSpec):
        plan = TensorPlan(answer, answer)
    elif isinstance(getattr(answer, "cell", None), TensorPlan):
        plan = plan.cell
    elif _is_maker(answer):
        plan = _plan_of_maker(answer)
    if not isinstance(plan, TensorPlan) or not all(isinstance(s, OperandSpec | None) for s in plan):
        raise RecipeError(
            f"CustomRecipe: qfactory returned {answer!r} for {tensor}; expected an OperandSpec, "
            f"a TensorPlan, a DelayedScalingRequest, or a quantizer, which has {', '.join(_VERBS)}."
        )
    _check_operands(tensor, plan)
    if plan.is_delayed:
        raise RecipeError(
            f"CustomRecipe: qfactory returned a delayed OperandSpec for {tensor}; "
            f"return a DelayedScalingRequest, which also says how the scale is found."
        )
    return plan


def may_reduce_amaxes(recipe: Recipe | None) -> bool:
    """Say whether ``recipe`` may have delayed scales in some layer whose amaxes ranks reduce."""
    if recipe is None:
        return False
    if isinstance(recipe, PerLayer):
        return any(
            map(may_reduce_amaxes, [recipe.default, *(choice for _, choice in recipe.rules)])
        )
    if recipe.reads_names:
        return True
    delayed = recipe.plan(LayerRole(), torch.bfloat16).delayed
    return delayed is not None and delayed.reduce_amax
