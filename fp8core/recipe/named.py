"""The recipes that have a name: each a frozen value with Transformer Engine's field names. At the
end are the names, with those of plug-ins, and the meaning of a ``recipe=`` argument.

All take three fields of fp8core alone: ``nonfinite``, how a cast treats a tensor with NaN or inf;
``holding``, a name of :data:`fp8core.plan.HOLDING`, which says what is held from forward to
backward; and ``requantize_weights``, by which codes of weights are not, whatever ``holding`` says.

``backward_override`` has dgrad and wgrad compute in high precision, and is None for the recipe's
own precision: with ``"high_precision"`` from the input and the weight before their casts, which are
held since forward; with ``"dequantized"`` from what fprop multiplied, whose codes are held.
Delayed scaling does not take it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt, shown
from fp8core.errors import RecipeError, UnsupportedError, did_you_mean
from fp8core.recipe.base import (
    DELAYED,
    FAST,
    FAST_FPROP,
    LINEAR_TENSORS,
    SPLIT,
    Format,
    MMParams,
    QParams,
    Recipe,
    Variants,
    attention_plan,
    check_attention,
    check_choice,
    check_common,
    check_delayed,
    check_format,
    delayed_plan,
    explains_writes,
    linear_plan,
    spec_of,
    tensors_of,
)
from fp8core.recipe.plan import (
    DEFAULT_HOLDING,
    AmaxAlgorithm,
    LayerRole,
    LinearPlan,
    Plan,
    ScalingAlgorithm,
    TensorPlan,
)


@explains_writes
@dataclass(frozen=True, slots=True)
class DelayedScaling(Recipe):
    """A scale for each tensor, from the amaxes of earlier steps; the first step uses scale 1.

    Attributes:
        margin: the amax maps to ``max * 2^-margin``.
        fp8_format: E4M3 or HYBRID (e4m3 forward, e5m2 backward).
        amax_history_len: the number of updates for which an amax is remembered.
        amax_compute_algo: ``"max"`` of the window, ``"most_recent"``, or a function of the history
            ``[amax_history_len, slots]``, whose row 0 holds the newest amaxes.
        scaling_factor_compute_algo: a function instead of ``max * 2^-margin / amax``, or None.
        reduce_amax: take the maximum over ``autocast``'s amax_reduction_group, where one is given.
        fp8_dpa: attention quantizes q, k, v and the weights.
        fp8_mha: the same, and in MultiheadAttention what crosses from a layer to the next is
            quantized once: attention's backward reads its result as the projection quantized it.
        fp8_dpa_backward: ``"dequantized"``: gradients of attention in high precision, from the
            dequantized q, k and v; ``"fp8"``: also the gradients are quantized.
        fp8_dpa_output: ``"fp8"``: the result of attention is rounded to the format of its values,
            by their scale, as cuDNN's FP8 attention on Hopper returns it; ``"high_precision"``
            leaves it in the dtype of the activations.
    """

    reads_names: ClassVar[bool] = False
    variants: ClassVar[Variants] = {"most-recent": {"amax_compute_algo": "most_recent"}}
    family: ClassVar[str | None] = "delayed"
    without_attention: ClassVar[str | None] = None
    margin: float = 0
    fp8_format: str = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScalingAlgorithm | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    _: KW_ONLY
    nonfinite: str = "saturate"
    requantize_weights: bool = False
    fp8_dpa_backward: str = "dequantized"
    fp8_dpa_output: str = "fp8"
    holding: str = DEFAULT_HOLDING

    def __post_init__(self) -> None:
        """Check the fields."""
        check_format(self, refuse=("e5m2",))
        check_common(self, (None,))
        check_attention(self)
        check_delayed(self)

    def plan(self, role: LayerRole, dtype: torch.dtype) -> Plan:
        """Return tensorwise delayed scaling; a fused norm or activation casts from float32."""
        delayed = delayed_plan(self)
        if role.kind == "attention" and (self.fp8_dpa or self.fp8_mha):
            return attention_plan(self, delayed)
        return linear_plan(
            self, tensors_of(self.fp8_format, **DELAYED), FAST_FPROP, delayed=delayed
        )


@explains_writes
@dataclass(frozen=True, slots=True)
class Float8CurrentScaling(Recipe):
    """A scale for each tensor, ``max / amax`` of the tensor itself: no state, two passes over it.

    ``fp8_dpa``, ``fp8_mha``, ``fp8_dpa_backward`` and ``fp8_dpa_output`` are as in
    :class:`DelayedScaling`; the weights of attention have a constant scale.
    """

    reads_names: ClassVar[bool] = False
    variants: ClassVar[Variants] = {"pow2": {"use_power_2_scales": True}}
    family: ClassVar[str | None] = "float8_current_scaling"
    without_attention: ClassVar[str | None] = None
    use_power_2_scales: bool = False
    fp8_format: str = Format.HYBRID
    fp8_gemm_fprop: MMParams = FAST
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    _: KW_ONLY
    nonfinite: str = "saturate"
    requantize_weights: bool = False
    fp8_dpa_backward: str = "dequantized"
    fp8_dpa_output: str = "fp8"
    holding: str = DEFAULT_HOLDING

    def __post_init__(self) -> None:
        """Check the fields."""
        check_format(self)
        check_common(self)
        check_attention(self)

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        """How the input is cast; ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad`` likewise."""
        return QParams(power_2_scale=self.use_power_2_scales)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def plan(self, role: LayerRole, dtype: torch.dtype) -> Plan:
        """Return tensorwise current scaling."""
        if role.kind == "attention" and (self.fp8_dpa or self.fp8_mha):
            return attention_plan(self, power_of_two=self.use_power_2_scales)
        tensors = tensors_of(self.fp8_format, power_of_two=self.use_power_2_scales)
        return linear_plan(self, tensors, _gemms(self))


@explains_writes
@dataclass(frozen=True, slots=True)
class Float8RowwiseScaling(Recipe):
    """A scale for each row of each operand, current: rows of unequal size keep their accuracy.

    The columnwise operand has one scale for each column of the tensor, so it is quantized from the
    tensor separately.
    """

    reads_names: ClassVar[bool] = False
    variants: ClassVar[Variants] = {"hybrid": {"fp8_format": Format.HYBRID}}
    use_power_2_scales: bool = False
    fp8_format: str = Format.E4M3
    fp8_gemm_fprop: MMParams = FAST
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    _: KW_ONLY
    nonfinite: str = "saturate"
    requantize_weights: bool = False
    holding: str = DEFAULT_HOLDING

    def __post_init__(self) -> None:
        """Check the fields."""
        check_format(self)
        check_common(self)

    def plan(self, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
        """Return current scaling with one scale for each row."""
        tensors = tensors_of(self.fp8_format, (1, 0), power_of_two=self.use_power_2_scales)
        return linear_plan(self, tensors, _gemms(self))


@explains_writes
@dataclass(frozen=True, slots=True)
class MXFP8BlockScaling(Recipe):
    """OCP microscaling: a power-of-two scale in a byte for every 32 elements along the contraction.

    Attributes:
        margin: has no meaning for power-of-two block scales; only 0 is accepted.
        fp8_format: E4M3 both ways by default; gradients in e5m2 are known to train worse.
        enable_2d_quantization: weights take 32 x 32 blocks, so both orientations hold one value.
    """

    reads_names: ClassVar[bool] = False
    variants: ClassVar[Variants] = {
        "hybrid": {"fp8_format": Format.HYBRID},
        "square": {"enable_2d_quantization": True},
    }
    family: ClassVar[str | None] = "mxfp8"
    without_attention: ClassVar[str | None] = None
    margin: int = 0
    fp8_format: str = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False
    _: KW_ONLY
    nonfinite: str = "saturate"
    requantize_weights: bool = False
    holding: str = DEFAULT_HOLDING

    def __post_init__(self) -> None:
        """Check the fields."""
        check_format(self)
        check_common(self)
        if self.margin != 0:
            raise RecipeError(
                f"MXFP8BlockScaling(margin={self.margin}) would have no effect: "
                f"block scales are rounded up to a power of two. Use margin=0."
            )

    @property
    def quantization_alignment(self) -> int:
        """The multiple of rows to which Transformer Engine pads a group."""
        return 32

    def plan(self, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
        """Return blocks of 32 along the contraction with e8m0 scales.

        Raises:
            UnsupportedError: for attention under ``fp8_dpa`` or ``fp8_mha``.
        """
        if role.kind == "attention" and (self.fp8_dpa or self.fp8_mha):
            raise UnsupportedError(
                "MXFP8BlockScaling(fp8_dpa=True): attention in MXFP8 needs a GPU of compute "
                "capability 10.0 (Blackwell) and Transformer Engine; fp8core has no kernel of it. "
                "Give attention a recipe with one scale a tensor by PerLayer, "
                "Float8CurrentScaling(fp8_dpa=True), or leave fp8_dpa out."
            )
        weight = (32, 32) if self.enable_2d_quantization else None
        tensors = tensors_of(self.fp8_format, (1, 32), weight=weight, scale_format="e8m0")
        return linear_plan(self, tensors)


@explains_writes
@dataclass(frozen=True, slots=True)
class Float8BlockScaling(Recipe):
    """DeepSeek-V3's blocks: 1 x 128 for activations and gradients, 128 x 128 for weights.

    Attributes:
        use_f32_scales: keep float32 scales as computed; False rounds them down to powers of two.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 for 1 x 128, 2 for
            128 x 128.
        x_wgrad_block_scaling_dim: likewise, for the input where the gradient of the weight is
            computed from it; None for the same as ``x_block_scaling_dim``.
    """

    reads_names: ClassVar[bool] = False
    variants: ClassVar[Variants] = {
        "float32": {"use_f32_scales": True},
        "square": {"x_block_scaling_dim": 2},
    }
    family: ClassVar[str | None] = "float8_block_scaling"
    use_f32_scales: bool = False
    fp8_format: str = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = SPLIT
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    _: KW_ONLY
    nonfinite: str = "saturate"
    requantize_weights: bool = False
    x_wgrad_block_scaling_dim: int | None = None
    holding: str = DEFAULT_HOLDING

    def __post_init__(self) -> None:
        """Check the fields."""
        check_format(self)
        check_common(self)
        for name, params in zip(("fprop", "dgrad", "wgrad"), _gemms(self), strict=True):
            if not params.use_split_accumulator:
                raise RecipeError(
                    f"Float8BlockScaling(fp8_gemm_{name}={params}): block scales are applied in "
                    f"float32, so only MMParams(use_split_accumulator=True) exists."
                )
        for name, value in self._dims().items():
            if value not in (1, 2):
                raise RecipeError(
                    f"Float8BlockScaling({name}_block_scaling_dim={value!r}): expected 1 or 2."
                )

    def _dims(self) -> dict[str, int]:
        x, x_wgrad = self.x_block_scaling_dim, self.x_wgrad_block_scaling_dim
        return {
            "x": x,
            "x_wgrad": x if x_wgrad is None else x_wgrad,
            "w": self.w_block_scaling_dim,
            "grad": self.grad_block_scaling_dim,
        }

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        """How the input is cast; ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad`` likewise."""
        return QParams(power_2_scale=not self.use_f32_scales)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def plan(self, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
        """Return blocks of 128 along the contraction with float32 scales."""
        blocks = {name: (1, 128) if dim == 1 else (128, 128) for name, dim in self._dims().items()}
        spec = partial(spec_of, self.fp8_format, power_of_two=not self.use_f32_scales)
        w, dy = spec("weight", blocks["w"]), spec("grad_output", blocks["grad"])
        tensors = {
            "input": TensorPlan(spec("input", blocks["x"]), spec("input", blocks["x_wgrad"])),
            "weight": TensorPlan(w, w),
            "grad_output": TensorPlan(dy, dy),
        }
        return linear_plan(self, tensors, _gemms(self))


_SCOPES = ("none", "weights", "activations", "all")
_FOUR_OVER_SIX = {
    "nvfp4_4over6": _SCOPES,
    "nvfp4_4over6_e4m3_use_256": _SCOPES,
    "nvfp4_4over6_err_mode": ("MAE", "MSE"),
}


@explains_writes
@dataclass(frozen=True, slots=True)
class NVFP4BlockScaling(Recipe):
    """NVIDIA's FP4: e2m1 elements, an e4m3 scale for every 16, one float32 scale a tensor.

    Weights take 16 x 16 blocks; the columnwise operands of wgrad go through a random Hadamard
    transform of 16; gradients are rounded stochastically. Each can be disabled.

    Attributes:
        row_scaled_activation: fprop's input has an outer scale for each row.
        nvfp4_4over6: of which tensors each block maps its amax to 6 or to 4, whichever loses less:
            ``"weights"``, ``"activations"``, ``"all"`` or ``"none"``. Of activations only with
            ``disable_rht``; gradients never.
        nvfp4_4over6_e4m3_use_256: of which of them the largest block scale is 256 instead of 448.
        nvfp4_4over6_err_mode: what a block compares, ``"MAE"`` or ``"MSE"`` (absolute or squared
            errors).
    """

    reads_names: ClassVar[bool] = False
    variants: ClassVar[Variants] = {
        "plain": {
            "disable_rht": True,
            "disable_stochastic_rounding": True,
            "disable_2d_quantization": True,
        },
    }
    family: ClassVar[str | None] = "nvfp4"
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: str = Format.E2M1
    fp8_format: str = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    _: KW_ONLY
    nonfinite: str = "saturate"
    requantize_weights: bool = False
    holding: str = DEFAULT_HOLDING

    def __post_init__(self) -> None:
        """Check the fields."""
        check_common(self)
        for name, choices in _FOUR_OVER_SIX.items():
            check_choice(self, name, choices)
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise RecipeError(
                f"NVFP4BlockScaling(nvfp4_4over6={self.nvfp4_4over6!r}) needs disable_rht=True: "
                f"activations have either two maxima a block or the Hadamard transform. Or choose "
                f"nvfp4_4over6='weights'."
            )
        for name, only in (("fp4_format", Format.E2M1), ("fp8_format", Format.E4M3)):
            check_format(self, field=name)
            value = getattr(self, name)
            if value != only:
                raise RecipeError(f"NVFP4BlockScaling({name}={value!r}): only {only!r} exists.")

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """How the input is cast."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """How the weight is cast."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """How the gradient of the output is cast."""
        return QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )

    def _four_over_six(self, tensor: str) -> dict[str, Any]:
        """Return the fields of the tensor's spec that choose between two maxima of a block."""
        scopes = {"weight": ("weights", "all"), "input": ("activations", "all")}.get(tensor, ())
        if self.nvfp4_4over6 not in scopes:
            return {}
        scale_max = 256.0 if self.nvfp4_4over6_e4m3_use_256 in scopes else 448.0
        return {"four_over_six": self.nvfp4_4over6_err_mode, "scale_max": scale_max}

    @property
    def quantization_alignment(self) -> int:
        """The multiple of rows to which Transformer Engine pads a group."""
        return 128

    def plan(self, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
        """Return blocks of 16 along the contraction with two-level scales."""

        def tensor(name: str) -> TensorPlan:
            is_square = name == "weight" and not self.disable_2d_quantization
            spec = spec_of(
                *(self.fp4_format, name, (16, 16) if is_square else (1, 16)),
                scale_format="e4m3",
                stochastic=name == "grad_output" and not self.disable_stochastic_rounding,
                **self._four_over_six(name),
            )
            is_row_scaled = name == "input" and self.row_scaled_activation
            row = dataclasses.replace(spec, row_scaled=True) if is_row_scaled else spec
            if name == "weight" or self.disable_rht:
                return TensorPlan(row, spec)
            return TensorPlan(row, dataclasses.replace(spec, transform="hadamard16"))

        return linear_plan(self, {name: tensor(name) for name in LINEAR_TENSORS})


def _gemms(
    recipe: Float8CurrentScaling | Float8RowwiseScaling | Float8BlockScaling,
) -> tuple[MMParams, MMParams, MMParams]:
    return recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad


NAMED: Mapping[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "mxfp8": MXFP8BlockScaling,
    "block": Float8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "rowwise": Float8RowwiseScaling,
}
"""The recipes of this module by their short names."""

# What other libraries, papers and first tries call them; lower case, words joined by "_".
_SYNONYMS: Mapping[str, str] = {
    name: recipe
    for recipe, words in {
        "current": "fp8 float8 tensorwise per_tensor dynamic e4m3 hybrid",
        "block": "blockwise fp8_block fp8_blockwise block_scaling deepseek deepseek_v3",
        "mxfp8": "mx mxfp microscaling",
        "nvfp4": "fp4 float4 mxfp4 e2m1",
    }.items()
    for name in words.split()
}
# Reports print a recipe's class name, so that is accepted as its name as well.
_CLASSES: dict[str, type[Recipe]] = {kind.__name__: kind for kind in NAMED.values()}
plugins.reserve_recipes((*NAMED, *_CLASSES, "none"))  # "none": high precision


def names() -> tuple[str, ...]:
    """Return the short names that :func:`by_name` takes: those of fp8core, then of plug-ins."""
    return (*NAMED, *plugins.load().recipes)


def by_name(name: str) -> Recipe:
    """Return the recipe called ``name``, with its defaults.

    The class name of a recipe of fp8core is a name of it too.

    >>> by_name("mxfp8") == by_name("MXFP8BlockScaling") == MXFP8BlockScaling()
    True

    Raises:
        RecipeError: no recipe has that name; the message lists the names.
        PluginError: the factory of the plug-in that registered it failed.
    """
    factory = _CLASSES.get(name) or _factories().get(name)
    if factory is None:
        raise RecipeError(
            f"no recipe is called {name!r}; recipes: {', '.join(names())}."
            f"{did_you_mean(name.replace('-', '_'), (*names(), *_CLASSES), _SYNONYMS)}"
        )
    recipe = attempt(factory)
    if isinstance(recipe, Failure):
        recipe.fail(f"recipe {name!r}: its factory failed")
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe {name!r}: its factory returned {shown(recipe)}, not a Recipe.")
    return recipe


def names_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the recipe's class: its class name, then those of :func:`by_name`.

    >>> names_of(MXFP8BlockScaling(enable_2d_quantization=True))
    ('MXFP8BlockScaling', 'mxfp8')
    """
    kind = type(recipe)
    return kind.__name__, *(name for name, factory in _factories().items() if factory is kind)


def recipe_from(argument: object, origin: str) -> Recipe | None:
    """Return the recipe that an argument names or is; None stays None.

    ``origin`` is what messages call the argument.

    Raises:
        RecipeError: no recipe has that name, or ``argument`` is something else.
    """
    if argument is None or isinstance(argument, Recipe):
        return argument
    if isinstance(argument, str):
        try:
            return by_name(argument)
        except RecipeError as error:
            raise RecipeError(f"{origin}: {error}") from None
    remedy = ""
    if isinstance(argument, type) and issubclass(argument, Recipe):
        remedy = f" That is the class; call it: {argument.__name__}()."
    raise RecipeError(
        f"{origin}: expected a Recipe, a recipe's name or None, found {argument!r}.{remedy}"
    )


def _factories() -> Mapping[str, Callable[[], object]]:
    return {**plugins.load().recipes, **NAMED}
