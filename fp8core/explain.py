"""``explain``: which backend runs what, and why each alternative was not taken."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fp8core.backend_api import (
    OPS,
    AmaxDesc,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    OpDesc,
    QuantizeDesc,
    ScaleUpdateDesc,
)
from fp8core.dispatch import policy, select
from fp8core.dispatch.select import Choice
from fp8core.dispatch.settings import check_op
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.modules.base import LowPrecisionModule
from fp8core.plan import HIGH_PRECISION, LayerRole, LinearPlan
from fp8core.recipe import Recipe, by_name, get_default_recipe

__all__ = ["Explanation", "Line", "add_arguments", "explain", "run"]


@dataclass(frozen=True, slots=True)
class Line:
    """One operation of one layer: what runs it, or why nothing does."""

    layer: str
    step: str
    choice: Choice | None
    refusal: str | None

    def __str__(self) -> str:
        text = str(self.choice) if self.choice is not None else f"REFUSED: {self.refusal}"
        where = " ".join(filter(None, (self.layer, self.step)))
        return f"{where}: {text}" if where else text


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of :func:`explain`; ``str()`` prints it."""

    lines: tuple[Line, ...]

    @property
    def refused(self) -> bool:
        """Whether any operation has nothing to run it."""
        return any(line.choice is None for line in self.lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))


def explain(
    target: str | torch.nn.Module,
    recipe: Recipe | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Explanation:
    """Say which backend runs ``target``, an operation's name or a model's layers, and why.

    Nothing is computed. ``recipe`` None takes the default recipe; ``device`` None the selected
    backend's, or the layer's own; ``dtype`` is that of the activations.

    Raises:
        RecipeError: ``target`` is not the name of an operation, ``recipe`` is not a Recipe.
        OperandError: the model has no fp8core layer, or ``target`` is neither.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(f"explain(recipe={recipe!r}): expected a Recipe, as in fp8core.recipe.")
    chosen = recipe if recipe is not None else get_default_recipe()
    if isinstance(target, str):
        check_op(target, "explain()")
        where = torch.device(device) if device else select.default_device(policy.current())
        is_grouped = target == "grouped_gemm"
        plan = chosen.plan(LayerRole("grouped_linear" if is_grouped else "linear"), dtype)
        return Explanation(tuple(_lines("", _descs(plan, dtype, dtype)[target], where)))
    if not isinstance(target, torch.nn.Module):
        raise OperandError(f"explain({target!r}): expected an operation's name or a model.")
    lines = [
        line
        for path, layer in target.named_modules()
        if isinstance(layer, LowPrecisionModule)
        for line in _layer_lines(path, layer, chosen, device, dtype)
    ]
    if not lines:
        raise OperandError(f"explain: {type(target).__name__} holds no fp8core layer.")
    return Explanation(tuple(lines))


def _layer_lines(
    path: str,
    layer: LowPrecisionModule,
    recipe: Recipe,
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> Iterator[Line]:
    where = torch.device(device) if device else next(layer.parameters()).device
    plan = recipe.plan(LayerRole(layer.kind, layer.name), dtype)
    is_grouped = layer.kind == "grouped_linear"
    descs = _descs(plan, dtype, layer.linear_shape().weight_dtype, is_grouped=is_grouped)
    used = ["grouped_gemm" if is_grouped else "gemm", "quantize"]
    used += ["scale_update"] if plan.delayed is not None else []
    yield from _lines(path or layer.label, [step for op in used for step in descs[op]], where)


def _lines(layer: str, descs: Iterable[tuple[str, OpDesc]], device: torch.device) -> Iterator[Line]:
    for step, desc in descs:
        try:
            choice = select.choose(desc, device, policy.current())
        except UnsupportedError as error:
            yield Line(layer, step, None, str(error))
        else:
            yield Line(layer, step, choice, None)


def _descs(
    plan: LinearPlan, dtype: torch.dtype, weight_dtype: torch.dtype, *, is_grouped: bool = False
) -> dict[str, list[tuple[str, OpDesc]]]:
    """Return, for each operation, the descriptors that a layer asks for, and what each is for."""
    gemms = (("fprop", plan.fprop), ("dgrad", plan.dgrad), ("wgrad", plan.wgrad))
    tensors = (("input", plan.input), ("weight", plan.weight), ("grad_output", plan.grad_output))
    found: dict[str, list[tuple[str, OpDesc]]] = {name: [] for name in OPS}
    for name, gemm in gemms:
        is_low = gemm.a is not None or gemm.b is not None
        out_dtype = weight_dtype if name == "wgrad" and is_low else dtype
        fields = (gemm.a, gemm.b, out_dtype, False, gemm.fast_accumulation)
        found["gemm"].append((name, GemmDesc(*fields)))
        found["grouped_gemm"].append(
            (name, GroupedGemmDesc(*fields, contract_groups=name == "wgrad"))
        )
    for name, tensor in tensors:
        own_dtype, grouped = (weight_dtype, False) if name == "weight" else (dtype, is_grouped)
        if any(tensor):
            desc = QuantizeDesc(own_dtype, *tensor, grouped=grouped)
            found["quantize"].append((name, desc))
        found["dequantize"] += [
            (name, DequantizeDesc(spec, dtype)) for spec in dict.fromkeys(tensor) if spec
        ]
    found["amax"].append(("", AmaxDesc(dtype)))
    algorithm = "max" if plan.delayed is None else plan.delayed.amax_algorithm
    is_users = plan.delayed is not None and plan.delayed.scaling_algorithm is not None
    if isinstance(algorithm, str) and not is_users:
        found["scale_update"].append(("", ScaleUpdateDesc(algorithm)))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--op", required=True, help=f"one of {', '.join(OPS)}")
    parser.add_argument("--device", help="as torch names it; default: the selected backend's")
    parser.add_argument("--recipe", help="a recipe's name, or none for high precision")


def run(args: argparse.Namespace) -> int:
    """Print the explanation; return 1 if nothing runs one of its lines."""
    recipe: Recipe | None = None
    if args.recipe == "none":
        recipe = _HighPrecision()
    elif args.recipe is not None:
        recipe = by_name(args.recipe)
    try:
        device = torch.device(args.device) if args.device else None
    except RuntimeError:
        message = f"--device {args.device!r} is no torch device, as cpu or cuda:0 are."
        raise RecipeError(message) from None
    explanation = explain(args.op, recipe, device=device)
    print(str(explanation) or f"{args.op}: recipe {args.recipe!r} has no use for it")
    return 1 if explanation.refused else 0


class _HighPrecision(Recipe):
    __slots__ = ()

    def plan(self, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
        return HIGH_PRECISION
