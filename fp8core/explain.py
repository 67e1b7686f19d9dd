"""``explain``: which backend runs what, and why each alternative was not taken."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fp8core.backend_api import (
    ACTIVATIONS,
    OPS,
    ActivationBackwardDesc,
    ActivationDesc,
    AmaxDesc,
    DequantizeDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    QuantizeDesc,
    ScaleUpdateDesc,
)
from fp8core.dispatch import policy, select
from fp8core.dispatch.select import Choice
from fp8core.dispatch.settings import check_op
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.links.activation import ActivationShape, activation_shape
from fp8core.links.bind import LinkShape, gemm_desc, handover
from fp8core.links.linear import LinearShape
from fp8core.links.norm import NormShape
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

    Nothing is computed. ``recipe`` None takes the one that :func:`fp8core.convert` gave the layer,
    else the default recipe; ``device`` None the selected backend's, or the layer's own; ``dtype``
    is that of the activations.

    Raises:
        RecipeError: ``target`` is not the name of an operation, ``recipe`` is not a Recipe.
        OperandError: the model has no fp8core layer, or ``target`` is neither.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(f"explain(recipe={recipe!r}): expected a Recipe, as in fp8core.recipe.")
    if isinstance(target, str):
        chosen = recipe if recipe is not None else get_default_recipe()
        check_op(target, "explain()")
        where = torch.device(device) if device else select.default_device(policy.current())
        groups = 2 if target == "grouped_gemm" else 0
        shape = LinearShape(1, 1, dtype, None, groups)
        plan = chosen.plan(LayerRole("grouped_linear" if groups else "linear"), dtype)
        steps = [*_linear_steps([shape], 0, plan, dtype), *_other_steps(plan, dtype)]
        return Explanation(tuple(_lines("", [s for s in steps if s[1].op == target], where)))
    if not isinstance(target, torch.nn.Module):
        raise OperandError(f"explain({target!r}): expected an operation's name or a model.")
    lines = [
        line
        for path, layer in target.named_modules()
        if isinstance(layer, LowPrecisionModule)
        for line in _layer_lines(path, layer, recipe, device, dtype)
    ]
    if not lines:
        raise OperandError(f"explain: {type(target).__name__} holds no fp8core layer.")
    return Explanation(tuple(lines))


def _layer_lines(
    path: str,
    layer: LowPrecisionModule,
    asked: Recipe | None,
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> Iterator[Line]:
    by_default = None if layer.outside_autocast is None else layer.outside_autocast.quantize
    recipe = asked or by_default or get_default_recipe()
    own = next((parameter.device for parameter in layer.parameters()), torch.device("cpu"))
    where = torch.device(device) if device else own
    plan = recipe.plan(LayerRole(layer.kind, layer.name), dtype)
    shapes = layer.link_shapes()
    steps: list[tuple[str, OpDesc]] = []
    for at, shape in enumerate(shapes):
        made = _shape_steps(shapes, at, plan, dtype)
        is_one_of_many = sum(isinstance(own, type(shape)) for own in shapes) > 1
        steps += [(f"{name}[{at}]" if is_one_of_many else name, desc) for name, desc in made]
    update = _update_desc(plan)
    if plan.delayed is not None and layer.count_gemms() and update is not None:
        steps.append(("", update))
    yield from _lines(path or layer.label, steps, where)


def _shape_steps(
    shapes: Sequence[LinkShape], at: int, plan: LinearPlan, dtype: torch.dtype
) -> list[tuple[str, OpDesc]]:
    """Return what one link of a chain asks for; nothing for links without a backend operation."""
    shape = shapes[at]
    if isinstance(shape, LinearShape):
        return _linear_steps(shapes, at, plan, dtype)
    out_dtype = grad_dtype = dtype
    if at + 1 < len(shapes) and isinstance(shapes[at + 1], LinearShape):
        out_dtype = handover(shapes, at + 1, plan, dtype, step=-1)
    if at and isinstance(shapes[at - 1], LinearShape):
        grad_dtype = handover(shapes, at - 1, plan, dtype, step=1)
    if isinstance(shape, NormShape):
        norm = NormDesc(shape.kind, dtype, out_dtype, shape.eps, shape.zero_centered)
        return [("norm", norm), ("norm backward", NormBackwardDesc(norm))]
    if isinstance(shape, ActivationShape):
        forward = ActivationDesc(shape.name, dtype, out_dtype, shape.params)
        backward = ActivationBackwardDesc(shape.name, dtype, grad_dtype, shape.params)
        return [(shape.name, forward), (f"{shape.name} backward", backward)]
    return []


def _lines(layer: str, descs: Iterable[tuple[str, OpDesc]], device: torch.device) -> Iterator[Line]:
    for step, desc in descs:
        try:
            choice = select.choose(desc, device, policy.current())
        except UnsupportedError as error:
            yield Line(layer, step, None, str(error))
        else:
            yield Line(layer, step, choice, None)


def _linear_steps(
    shapes: Sequence[LinkShape], at: int, plan: LinearPlan, dtype: torch.dtype
) -> list[tuple[str, OpDesc]]:
    """Return the GEMMs and casts of the linear at ``at``, and what each is for."""
    shape = shapes[at]
    assert isinstance(shape, LinearShape)
    steps: list[tuple[str, OpDesc]] = [
        (name, gemm_desc(name, plan, shape, dtype)) for name in ("fprop", "dgrad", "wgrad")
    ]
    input_dtype, grad_dtype = (handover(shapes, at, plan, dtype, step=s) for s in (-1, 1))
    tensors = (
        ("input", plan.input, input_dtype, bool(shape.groups)),
        ("weight", plan.weight, shape.weight_dtype, False),
        ("grad_output", plan.grad_output, grad_dtype, bool(shape.groups)),
    )
    for name, tensor, own_dtype, grouped in tensors:
        if any(tensor):
            steps.append((name, QuantizeDesc(own_dtype, *tensor, grouped=grouped)))
    return steps


def _other_steps(plan: LinearPlan, dtype: torch.dtype) -> list[tuple[str, OpDesc]]:
    """Return what a linear layer alone does not ask for, for the operations asked by name."""
    tensors = (("input", plan.input), ("weight", plan.weight), ("grad_output", plan.grad_output))
    norms = [NormDesc(kind, dtype, dtype, 1e-5) for kind in ("layernorm", "rmsnorm")]
    activations = [activation_shape(name) for name in ACTIVATIONS]
    update = _update_desc(plan)
    return [
        *(
            (name, DequantizeDesc(spec, dtype))
            for name, tensor in tensors
            for spec in dict.fromkeys(tensor)
            if spec
        ),
        ("", AmaxDesc(dtype)),
        *([("", update)] if update is not None else []),
        *((norm.kind, norm) for norm in norms),
        *((norm.kind, NormBackwardDesc(norm)) for norm in norms),
        *((own[0], ActivationDesc(own[0], dtype, dtype, own[1])) for own in activations),
        *((own[0], ActivationBackwardDesc(own[0], dtype, dtype, own[1])) for own in activations),
    ]


def _update_desc(plan: LinearPlan) -> ScaleUpdateDesc | None:
    """Return the update of delayed scales, None where the user's own functions do it."""
    algorithm = "max" if plan.delayed is None else plan.delayed.amax_algorithm
    is_users = plan.delayed is not None and plan.delayed.scaling_algorithm is not None
    return ScaleUpdateDesc(algorithm) if isinstance(algorithm, str) and not is_users else None


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
