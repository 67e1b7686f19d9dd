"""Every descriptor that layers need: under all recipes and their variants, in every dtype."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fp8core import recipe
from fp8core.backend_api import (
    ACTIVATIONS,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    AmaxDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    ColumnSumsDesc,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    RouteDesc,
    amax_extent,
    has_amax,
)
from fp8core.chain.activation import activation_shape
from fp8core.chain.attention.shape import AttentionShape
from fp8core.chain.linear.shape import LinearShape
from fp8core.chain.norm import NormShape
from fp8core.chain.residual import AddShape
from fp8core.chain.shape import LinkShape
from fp8core.inspection.descriptors import NORMS, listed_descs, record
from fp8core.recipe import Recipe, WeightOnly
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.tensors.delayed_state import update_desc

# One activation that is gated and one that is not stand for the others in fusions.
_FUSED_ACTIVATIONS = ("gelu", "swiglu")
_GROUPS = 3
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CatalogueEntry(NamedTuple):
    """A descriptor and its unique label of recipe, step and dtypes: ``mxfp8.fprop.bfloat16``."""

    label: str
    desc: OpDesc


def _recipes() -> dict[str, Recipe]:
    """Return every named recipe, the plug-ins' included, and the options that change a plan."""
    named = {name: recipe.by_name(name) for name in recipe.names()}
    return named | {
        f"{name}-{variant}": type(default)(**arguments)
        for name, default in named.items()
        if default == type(default)()
        for variant, arguments in default.variants.items()
    }


def catalogue() -> list[CatalogueEntry]:
    """Return every descriptor once, with the label of its first use."""
    return list(_of_recipes(tuple(_recipes().items())))


@functools.lru_cache(maxsize=4)  # each law asks for it, and plug-ins may bring recipes in between
def _of_recipes(recipes: tuple[tuple[str, Recipe], ...]) -> tuple[CatalogueEntry, ...]:
    entries: dict[object, CatalogueEntry] = {}
    for entry in _everything(recipes):
        entries.setdefault(_identity(entry.desc), entry)
    return tuple(entries.values())


def _identity(desc: OpDesc) -> object:
    """Return a value that is equal for descriptors of the same computation.

    Amaxes of casts to different formats are the same computation.
    """
    if not isinstance(desc, AmaxDesc):
        return desc
    cast = desc.quantize
    extents = [
        (amax_extent(spec), None if spec is None else spec.transform)
        for spec in (cast.rowwise, cast.columnwise)
    ]
    return ("amax", cast.dtype, cast.grouped, cast.offsets_on_device, *extents)


def _everything(recipes: Sequence[tuple[str, Recipe]]) -> Iterator[CatalogueEntry]:
    """Yield all entries, with repetitions.

    Casts of another dtype than the activations come last, so that their labels are those that they
    have for activations of that dtype.
    """
    entries = [(dtype, entry) for dtype in DTYPES for entry in _of_dtype(dtype, recipes)]
    yield from (entry for dtype, entry in entries if _cast_dtype(entry.desc) in (None, dtype))
    yield from (entry for _, entry in entries)


def _cast_dtype(desc: OpDesc) -> torch.dtype | None:
    """Return the dtype that a cast, or the amax of one, takes; None for other operations."""
    cast = desc.quantize if isinstance(desc, AmaxDesc) else desc
    return cast.dtype if isinstance(cast, QuantizeDesc | QuantizeByAmaxDesc) else None


def _of_dtype(
    dtype: torch.dtype, recipes: Sequence[tuple[str, Recipe]]
) -> Iterator[CatalogueEntry]:
    """Yield the entries for activations of ``dtype``."""
    roundings: set[object] = set()
    for name, chosen in recipes:
        dense, grouped = (
            plan_of(LinearPlan, chosen, LayerRole(kind, name="layer"), dtype)
            for kind in ("linear", "grouped_linear")
        )
        yield from _linears(name, dense, dtype)
        yield from _groups(f"{name}.grouped", grouped, dtype)
        product = plan_of(LinearPlan, WeightOnly(chosen), LayerRole(), dtype).fprop
        weight_only = GemmDesc(product.a, product.b, dtype)
        yield CatalogueEntry(f"{name}.weight_only.{_word(dtype)}", weight_only)
        on_device = GroupedGemmDesc(product.a, product.b, dtype, offsets_on_device=True)
        yield CatalogueEntry(f"{name}.grouped.weight_only.{_word(dtype)}.device", on_device)
        yield from _producers(name, dense, dtype, roundings)
        yield from _quantized_attentions(name, chosen, dtype)
        update = update_desc(dense.delayed)
        if update is not None:
            yield CatalogueEntry(f"delayed.{update.algorithm}", update)
    yield from _linears("plain", LinearPlan(), dtype)
    yield from _groups("plain.grouped", LinearPlan(), dtype)
    yield from _attentions(dtype)
    yield from _of_quantizers(dtype)
    for variant, desc in listed_descs(dtype):
        words = (desc.op, variant, "" if isinstance(desc, RouteDesc) else _word(dtype))
        yield CatalogueEntry(".".join(filter(None, words)), desc)


def _of_quantizers(dtype: torch.dtype) -> Iterator[CatalogueEntry]:
    """Yield what quantizers to 4 bits and their products ask for besides the default recipe's.

    In one dtype: options choose among the elements' codes and scales, whatever they are cast from.
    """
    if dtype != DTYPES[0]:
        return
    plain = plan_of(LinearPlan, _recipes()["nvfp4-plain"], LayerRole(), dtype).input.rowwise
    assert plain is not None
    square = dataclasses.replace(plain, block=(16, 16), four_over_six="MSE", scale_max=256.0)
    rows = dataclasses.replace(plain, row_scaled=True)
    unsigned = dataclasses.replace(plain, transform="hadamard16_unsigned")
    four_over_six = dataclasses.replace(plain, four_over_six="MAE")
    for name, row, column, weight in (
        ("rows", rows, plain, plain),
        ("unsigned", plain, unsigned, unsigned),
        ("4over6", four_over_six, square, four_over_six),
    ):
        cast, spec = QuantizeDesc(dtype, row, column), column if name != "rows" else row
        steps = (
            ("input", cast),
            ("input.amax", AmaxDesc(cast)),
            ("input.by_amax", QuantizeByAmaxDesc.of(cast)),
            ("operand", DequantizeDesc(spec, dtype)),
            ("product", GemmDesc(spec, weight, dtype)),
        )
        for step, desc in steps:
            yield CatalogueEntry(f"nvfp4-{name}.{step}.{_word(dtype)}", desc)


def _linears(prefix: str, plan: LinearPlan, dtype: torch.dtype) -> Iterator[CatalogueEntry]:
    """Yield the operations of a dense linear, and the dequantizations of its operands."""
    for shape in _weights_of(LinearShape(1, 1, dtype, None)):
        yield from _entries(prefix, [shape], plan, dtype)
    for (_, step), desc in record([LinearShape(1, 1, dtype, None)], plan, dtype):
        if isinstance(desc, QuantizeDesc):
            for orientation in ("rowwise", "columnwise"):
                spec = getattr(desc, orientation)
                if spec is not None:
                    label = f"{prefix}.{step}.{_word(dtype)}.{orientation}"
                    yield CatalogueEntry(label, DequantizeDesc(spec, dtype))


def _groups(prefix: str, plan: LinearPlan, dtype: torch.dtype) -> Iterator[CatalogueEntry]:
    """Yield the operations of a grouped linear."""
    shape = LinearShape(1, 1, dtype, None, _GROUPS)
    for variant in _weights_of(shape):
        yield from _entries(prefix, [variant], plan, dtype)
    for entry in _entries(prefix, [shape.with_offsets_on_device()], plan, dtype):
        # The kernels of the products are the same for the other dtypes.
        if dtype == DTYPES[0] or not isinstance(entry.desc, GemmDesc):
            yield entry


def _weights_of(shape: LinearShape) -> Iterator[LinearShape]:
    """Yield ``shape`` with weights of its dtype and of float32, with and without main_grad."""
    for weight_dtype in dict.fromkeys((shape.weight_dtype, torch.float32)):
        for accumulates in (False, True):
            yield dataclasses.replace(shape, weight_dtype=weight_dtype, accumulates=accumulates)


def _producers(
    prefix: str, plan: LinearPlan, dtype: torch.dtype, roundings: set[object]
) -> Iterator[CatalogueEntry]:
    """Yield the operations of norms and activations, alone and next to linears.

    What fusions leave out differs by how linears round what it hands over, which ``roundings`` has
    of the plans so far; this one's is added.
    """
    add, linear = AddShape(), LinearShape(1, 1, dtype, None)
    with_bias = dataclasses.replace(linear, bias_dtype=dtype)
    norms = [NormShape(kind, 1, 1e-5, False, dtype) for kind in NORMS]
    zero_centered = [dataclasses.replace(norm, zero_centered=True) for norm in norms]
    fused = (*norms, *map(activation_shape, _FUSED_ACTIVATIONS))
    rounding = tuple(
        None if spec is None else spec.cast_first
        for tensor in (plan.input, plan.grad_output)
        for spec in tensor
    )
    is_repeated = rounding in roundings
    for shape in (*norms, *zero_centered, *map(activation_shape, ACTIVATIONS)):
        chains: tuple[Sequence[LinkShape], ...] = (
            (add, shape),
            (add, shape, linear),
            (linear, shape, linear),
            (with_bias, shape, linear),
        )
        if shape not in (*fused, *zero_centered):
            chains = chains[::2]  # such an activation is the same in the others
        if roundings:
            chains = chains[1:]  # without a linear under each recipe the same
        if is_repeated and shape not in fused:
            continue
        for chain in chains:
            for entry in _entries(prefix, chain, plan, dtype):
                if shape in fused or not isinstance(entry.desc, FusedDesc):
                    yield entry
    roundings.add(rounding)


_ATTENTION = AttentionShape("sbhd", 4, 2, 64, 64, 0.125)
_PADDED: dict[str, Any] = {"padding": True}
_CAUSAL: dict[str, Any] = {"window": (-1, 0)}
_AT_THE_END: dict[str, Any] = {**_CAUSAL, "bottom_right": True}
_ATTENTIONS: dict[str, dict[str, Any]] = {
    "causal": _CAUSAL,
    "padding": _PADDED,
    "no_mask": {},
    "causal.bottom_right": _AT_THE_END,
    "window": {"window": (7, 3)},
    "window.bottom_right": {"window": (7, 3), "bottom_right": True},
    "padding.causal": {**_PADDED, **_CAUSAL},
    "padding.causal.bottom_right": {**_PADDED, **_AT_THE_END},
    "arbitrary": {"arbitrary": True},
    "pre_scale": {"bias": "pre_scale"},
    "post_scale.causal": {"bias": "post_scale", **_CAUSAL},
    "alibi.causal": {"bias": "alibi", **_CAUSAL},
    "softcap.causal": {"softcap": 2.0, **_CAUSAL},
    "off_by_one.causal": {"softmax": "off-by-one", **_CAUSAL},
    "learnable.causal": {"softmax": "learnable", **_CAUSAL},
    "dropout.causal": {"dropout": 0.25, **_CAUSAL},
    "max_logit.causal": {"max_logit": True, **_CAUSAL},
    "bshd.causal": {"layout": "bshd", **_CAUSAL},
    "thd.causal": {"layout": "thd", **_PADDED, **_CAUSAL},
    "thd.window.bottom_right": {
        "layout": "thd",
        **_PADDED,
        "window": (7, 3),
        "bottom_right": True,
    },
    "one_group.causal": {"gqa_groups": 1, **_CAUSAL},
    "all_groups.128.causal": {"gqa_groups": 4, "head_dim": 128, "head_dim_v": 128, **_CAUSAL},
    "two_sizes.causal": {"head_dim": 128, **_CAUSAL},
}
"""What differs from :data:`_ATTENTION`; in the dtypes after the first, two stand for all."""


_PARTS = ("no_mask", "causal", "bshd.causal", "thd.causal", "learnable.causal")
"""Attention whose keys and values a rank may have a part of."""


_QUANTIZED_ATTENTIONS = ("causal", "padding", "bshd.causal", "thd.causal", "dropout.causal")


def _quantized_attentions(
    name: str, chosen: Recipe, dtype: torch.dtype
) -> Iterator[CatalogueEntry]:
    """Yield attention that quantizes, for recipes that do; in the first dtype."""
    if not hasattr(chosen, "fp8_dpa_backward") or dtype != DTYPES[0]:
        return
    quantizing = dataclasses.replace(chosen, fp8_dpa=True, fp8_dpa_backward="fp8")  # type: ignore[type-var]  # each recipe is a dataclass
    plan = plan_of(_ATTENTION.plan_type, quantizing, LayerRole("attention", name="layer"), dtype)
    wide = dataclasses.replace(plan, o=None)
    codes = dataclasses.replace(plan, grad_output=None, dp=None)
    variants = [(variant, "", plan) for variant in _QUANTIZED_ATTENTIONS]
    options = (("high_precision_out", wide), ("high_precision_backward", codes))
    for variant, output, variant_plan in (*variants, *(("causal", *option) for option in options)):
        shape = dataclasses.replace(_ATTENTION, **_ATTENTIONS[variant])
        for _, desc in record([shape], variant_plan, dtype):
            if isinstance(desc, AttentionDesc | AttentionBackwardDesc) and desc.low_precision:
                way = "backward" if isinstance(desc, AttentionBackwardDesc) else ""
                words = (name, "attention", variant, output, _word(dtype), way)
                yield CatalogueEntry(".".join(filter(None, words)), desc)


def _attentions(dtype: torch.dtype) -> Iterator[CatalogueEntry]:
    """Yield each mask, layout, bias and softmax of attention, forward and backward."""
    variants = list(_ATTENTIONS.items())
    for name, options in variants if dtype == DTYPES[0] else variants[:2]:
        shape = dataclasses.replace(_ATTENTION, **options)
        for _, desc in record([shape], LinearPlan(), dtype):
            way = "backward" if isinstance(desc, AttentionBackwardDesc) else ""
            bias = "bias" if isinstance(desc, AttentionBackwardDesc) and desc.bias_grad else ""
            words = ("attention", name, _word(dtype), way, bias)
            yield CatalogueEntry(".".join(filter(None, words)), desc)
            if not isinstance(desc, AttentionBackwardDesc) or desc.bias_grad:
                continue
            if name in _PARTS and dtype == DTYPES[0]:
                label = f"attention_part.{name}.{_word(dtype)}.{way}"
                yield CatalogueEntry(label, AttentionPartBackwardDesc(desc.attention))


def _amaxes(label: str, desc: QuantizeDesc) -> Iterator[CatalogueEntry]:
    """Yield the amax of a cast, and the cast by given amaxes."""
    if not has_amax(desc):
        return
    yield CatalogueEntry(f"{label}.amax", AmaxDesc(desc))
    is_delayed = any(spec is not None and spec.delayed for spec in (desc.rowwise, desc.columnwise))
    is_first = desc.dtype == DTYPES[0]  # groups are the same for the others
    if not is_delayed and (is_first or not desc.grouped):
        yield CatalogueEntry(f"{label}.by_amax", QuantizeByAmaxDesc.of(desc))


def _entries(
    prefix: str, shapes: Sequence[LinkShape], plan: LinearPlan, dtype: torch.dtype
) -> Iterator[CatalogueEntry]:
    plan = dataclasses.replace(plan, remade=())  # the halves of a cast are parts of its laws
    for (_, step), desc in record(shapes, plan, dtype):
        words: tuple[str, ...]
        match desc:
            case GemmDesc():
                words = (prefix, step, _word(dtype), *_words(desc))
            case QuantizeDesc():
                words = (prefix, step, *_words(desc))
            case FusedDesc():
                name, *_, last = _words(desc.producer)
                way = "backward" if last == "backward" else ""
                words = (prefix, name, way, "sums" if desc.quantize.sums else "", _word(dtype))
            case _:  # the same under every recipe
                words = _words(desc)
        label = ".".join(filter(None, words))
        yield CatalogueEntry(label, desc)
        if isinstance(desc, QuantizeDesc):
            yield from _amaxes(label, desc)


def _words(desc: OpDesc) -> tuple[str, ...]:
    """Return the words of a label that follow recipe and step."""
    match desc:
        case NormDesc():
            start = (desc.kind, "zero_centered" if desc.zero_centered else "")
            return (*start, _word(desc.dtype), _word(desc.out_dtype))
        case NormBackwardDesc():
            return (*_words(desc.norm), "backward")
        case AddNormDesc():
            return (*_words(desc.norm), "add")
        case ActivationDesc():
            return (desc.name, _word(desc.dtype), _word(desc.out_dtype))
        case ActivationBackwardDesc():
            return (desc.name, _word(desc.dtype), _word(desc.out_dtype), "backward")
        case ColumnSumsDesc():
            return ("column_sums", _word(desc.dtype))
        case QuantizeDesc():
            return (_word(desc.dtype), "device" if desc.offsets_on_device else "")
        case GemmDesc():
            is_on_device = isinstance(desc, GroupedGemmDesc) and desc.offsets_on_device
            accumulate = "accumulate" if desc.accumulate else ""
            return (_word(desc.out_dtype), accumulate, "device" if is_on_device else "")
    raise AssertionError(f"no link needs {desc}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
