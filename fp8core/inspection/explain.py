"""``explain``: which backend runs an operation, and why each other backend does not.

``is_fp8_available`` and its like say it of a recipe's products, by Transformer Engine's names.

The types of its command's arguments are those of other commands too: a wrong name is an error with
the nearest name. argparse prints the message of their ArgumentTypeError and exits with status 2.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, overload

import torch

from fp8core.backend_api import OPS, OPTIONAL_OPS, FusedDesc, OpDesc, QuantizeDesc
from fp8core.chain.fusion import variants
from fp8core.dispatch import plugins, policy, select, table
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.dispatch.select import Choice
from fp8core.dispatch.settings import check_op
from fp8core.errors import OperandError, PluginError, RecipeError, UnsupportedError, did_you_mean
from fp8core.inspection.descriptors import Need, layer_needs, recipe_needs
from fp8core.inspection.on_meta import SavedBytes, Sent, saved_bytes, sent_by
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerLayer,
    Recipe,
    by_name,
    get_default_recipe,
)
from fp8core.recipe.named import recipe_from
from fp8core.reporting import folded

NO_RECIPE = "none"
"""The name that commands use for high precision, in the argument for a recipe."""

_TORCH_DEVICES = ("cpu", "cuda", "meta", "mps", "xpu")  # torch has no public list of them

_Value = TypeVar("_Value")

_DTYPE = torch.bfloat16
_STORED = (
    "a QuantizedTensor of this format is used directly; one of another format is dequantized "
    "once and cast, and a weight of another format is refused"
)
_MATRICES = ("input", "weight", "grad_output")
"""The steps whose tensors may come quantized: those of linears, as stored tensors are matrices."""


@dataclass(frozen=True, slots=True)
class Line:
    """An operation of a layer: the backend that runs it, or why none does.

    Attributes:
        layer: the layer's name, or its class and sizes; empty for an operation asked by name.
        step: the purpose of the operation: ``fprop``, ``weight``, ``gelu``; may be empty.
        desc: the operation, with the precision of each operand.
        choice: the backend, and why each other was not chosen; None if no backend runs it.
        kernel: the backend's name for the kernel that runs; None if no backend runs it.
        refusal: why no backend runs it; None if one does.
        other_kernels: the kernels of the backend that do not run it, each with the reason.
    """

    layer: str
    step: str
    desc: OpDesc
    choice: Choice | None
    kernel: str | None
    refusal: str | None
    other_kernels: tuple[tuple[str, str], ...] = ()

    @property
    def is_optional(self) -> bool:
        """Whether layers run without it: a fused operation, instead of which its pair can run."""
        return self.desc.op in OPTIONAL_OPS

    def brief(self) -> str:
        """Return the text without the layer, and, where a backend runs it, without what is said of
        backends for other devices and of stored tensors."""
        if self.choice is None:
            return f"{self.step}: {self._refused()}"
        first, *_ = str(self.choice).splitlines()
        lines = [f"substitution: {self.choice.substitution}"] if self.choice.substitution else []
        lines += [f"{v.backend}: {v.reason}" for v in select.declined(self.choice) if v.reason]
        lines += [f"kernel: {self.kernel}"]
        lines += [f"not {name}: {why}" for name, why in self.other_kernels]
        return "\n  ".join([f"{self.step}: {first}", *lines])

    def _refused(self) -> str:
        verdict = "NOT OFFERED, the pair runs" if self.is_optional else "REFUSED"
        return f"{verdict}: {self.refusal}"

    def __str__(self) -> str:
        if self.choice is not None:
            text = f"{self.choice}\n  kernel: {self.kernel}"
            text += "".join(f"\n  not {name}: {why}" for name, why in self.other_kernels)
            is_matrix = self.step.partition("[")[0] in _MATRICES
            if self.layer and is_matrix and isinstance(self.desc, QuantizeDesc):
                text += f"\n  {_STORED}"
        else:
            text = self._refused()
        where = " ".join(filter(None, (self.layer, self.step)))
        return f"{where}: {text}" if where else text


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of :func:`explain`; ``str()`` prints it, layers with equal operations together and
    in brief; :meth:`details` prints each layer by itself.

    Attributes:
        lines: the operations, in the order of the layers.
        held: by layer, what it holds from forward to backward; without layers that cannot run and
            operations that take any number of columns, and empty for an operation asked by name.
        sent: by layer, each collective of a layer that is spread over several ranks.
    """

    lines: tuple[Line, ...]
    held: tuple[tuple[str, SavedBytes], ...] = ()
    sent: tuple[tuple[str, Sent], ...] = ()

    @property
    def refused(self) -> bool:
        """Whether no backend runs some operation that is not optional."""
        return any(line.choice is None and not line.is_optional for line in self.lines)

    def details(self) -> str:
        """Return all lines of each layer, with the reasons against all other backends."""
        totals = [f"{name}: {entry}" for name, entry in (*self.held, *self.sent)]
        return "\n".join([*map(str, self.lines), *totals])

    def __str__(self) -> str:
        of_layers: dict[str, list[Line]] = {}
        for line in self.lines:
            of_layers.setdefault(line.layer, []).append(line)
        blocks: dict[tuple[str, ...], list[str]] = {}
        for layer, lines in of_layers.items():
            blocks.setdefault(tuple(line.brief() for line in lines), []).append(layer)
        if len(blocks) == len(of_layers):
            return self.details()
        texts: list[str] = []
        for briefs, (layer, *rest) in blocks.items():
            if not rest:
                texts += map(str, of_layers[layer])
                continue
            texts.append(f"{1 + len(rest)} layers, {', '.join(folded([layer, *rest]))}:")
            texts += [f"  {row}" for brief in briefs for row in brief.splitlines()]
        totals: dict[str, list[str]] = {}
        for name, entry in (*self.held, *self.sent):
            totals.setdefault(str(entry), []).append(name)
        texts += [f"{', '.join(folded(names))}: {entry}" for entry, names in totals.items()]
        return "\n".join([*texts, "each layer by itself: explain(...).details()"])


def explain(
    target: str | torch.nn.Module,
    recipe: Recipe | str | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Say which backend runs ``target``, an operation's name or a model's layers, and why.

    Nothing is computed; a backend's ``bind`` is called, as for a layer. ``recipe`` is a Recipe or
    the name of one; None stands for the recipe that :func:`fp8core.convert` set for the layer, else
    the default recipe. ``device`` None stands for the selected backend's device, or the layer's.
    ``dtype`` is the dtype of the activations; None stands for the dtype of the layer's parameters,
    bfloat16 for an operation asked by name.

    Raises:
        RecipeError: ``target`` is not the name of an operation, ``recipe`` neither a Recipe nor the
            name of one.
        OperandError: the model has no fp8core layer, or ``target`` is neither.
    """
    requested = recipe_from(recipe, "explain(recipe=...)")
    if isinstance(target, str):
        chosen = requested or get_default_recipe()
        check_op(target, "explain()")
        where = torch.device(device) if device else select.default_device(policy.current())
        needs = [need for need in recipe_needs(chosen, dtype or _DTYPE) if need.desc.op == target]
        return Explanation(tuple(_lines("", needs, where)))
    if not isinstance(target, torch.nn.Module):
        raise OperandError(f"explain({target!r}): expected an operation's name or a model.")
    lines: list[Line] = []
    saved: list[tuple[str, SavedBytes]] = []
    sent: list[tuple[str, Sent]] = []
    for path, layer in target.named_modules():
        if isinstance(layer, LowPrecisionModule):
            parameter = next(layer.parameters(), torch.empty(0, dtype=_DTYPE, device="cpu"))
            where = torch.device(device) if device else parameter.device
            chosen, values = _recipe_for(layer, requested), dtype or parameter.dtype
            needs = layer_needs(layer, chosen, values)
            of_layer = list(_lines(path or layer.label, _bound(needs, where), where))
            if not Explanation(tuple(of_layer)).refused:
                holds = saved_bytes(layer, chosen, where, values)
                saved += [] if holds is None else [(path or layer.label, holds)]
                sends = sent_by(layer, chosen, where, values)
                sent += [(path or layer.label, send) for send in sends]
            lines += of_layer
    if not lines:
        raise OperandError(f"explain: {type(target).__name__} holds no fp8core layer.")
    return Explanation(tuple(lines), tuple(saved), tuple(sent))


def _recipe_for(layer: LowPrecisionModule, requested: Recipe | None) -> Recipe:
    by_default = None if layer.outside_autocast is None else layer.outside_autocast.quantize
    return requested or by_default or get_default_recipe()


def _lines(layer: str, needs: Iterable[Need], device: torch.device) -> Iterator[Line]:
    for step, desc in needs:
        try:
            choice = select.choose(desc, device, policy.current())
        except UnsupportedError as error:
            yield Line(layer, step, desc, None, None, str(error))
            continue
        kernels = attempt(functools.partial(table.kernels_of, choice))
        if isinstance(kernels, Failure):
            yield Line(layer, step, desc, None, None, _bind_failure(choice, kernels))
        else:
            yield Line(layer, step, desc, choice, kernels.name, None, kernels.rejected)


def _bound(needs: Iterable[Need], device: torch.device) -> Iterator[Need]:
    """Leave out the fusions that a layer does not bind, as the backend of the cast does not support
    every variant of them."""
    registry = plugins.load()
    for need in needs:
        if isinstance(need.desc, FusedDesc):
            try:
                cast = replace(need.desc.quantize, sums=False)
                chosen = select.choose(cast, device, policy.current()).backend
            except UnsupportedError:
                continue  # the cast has a line that says so
            descs = variants(need.desc).values()
            spec = registry.backends[chosen]
            if any(registry.unsupported(spec, desc, device) is not None for desc in descs):
                continue
        yield need


def _bind_failure(choice: Choice, failure: Failure) -> str:
    if isinstance(failure.error, PluginError):  # its message names backend and descriptor already
        return str(failure)
    return f"{choice.backend} says that it runs {choice.desc}, but its bind() failed: {failure}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    every = ", ".join((*OPS, *OPTIONAL_OPS))
    parser.add_argument("--op", required=True, type=op_argument, help=f"one of {every}")
    parser.add_argument(
        "--device",
        type=device_argument,
        help="as torch names it; default: the selected backend's",
    )
    parser.add_argument(
        "--recipe",
        type=recipe_argument,
        help="a recipe's name, or none for high precision; default: the selected backend's",
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanation; return 1 if nothing runs one of its lines."""
    recipe = args.recipe if args.recipe is not None else get_default_recipe()
    explanation = explain(args.op, recipe, device=args.device)
    print(str(explanation) or f"{args.op}: {recipe} has no use for it")
    return 1 if explanation.refused else 0


def device_argument(text: str) -> torch.device:
    """Return the device called ``text``, present or not.

    >>> device_argument("cuda:1")
    device(type='cuda', index=1)
    """
    try:
        return torch.device(text)
    except RuntimeError:
        backends = plugins.load().backends.values()
        kinds = sorted(
            {*_TORCH_DEVICES, *(kind for spec in backends for kind in spec.device_types)}
        )
        near = did_you_mean(text.partition(":")[0], kinds)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no torch device; devices are {', '.join(kinds)}, with an index where "
            f"there are several, as in cuda:0.{near}"
        ) from None


def recipe_argument(text: str) -> Recipe:
    """Return the recipe called ``text``; ``none`` is high precision."""
    return PerLayer({}) if text == NO_RECIPE else _usage(lambda: by_name(text))


def op_argument(text: str) -> str:
    """Return ``text`` if it is the name of an operation."""
    _usage(lambda: check_op(text, "the command"))
    return text


def _usage(find: Callable[[], _Value]) -> _Value:
    try:
        return find()
    except RecipeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@overload
def is_fp8_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_fp8_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
@overload
def is_fp8_available(return_reason: bool) -> bool | tuple[bool, str]: ...
def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say whether the selected backend multiplies FP8 with one scale a tensor on its device.

    With ``return_reason`` the answer and why not, an empty text if it does. The ``reference``
    backend does on any device. :func:`fp8core.explain` says more.
    """
    return _answer(Float8CurrentScaling(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say so of FP8 with scales of 128 elements; as :func:`is_fp8_available`."""
    return _answer(Float8BlockScaling(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say so of MXFP8; as :func:`is_fp8_available`."""
    return _answer(MXFP8BlockScaling(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say so of NVFP4; as :func:`is_fp8_available`."""
    return _answer(NVFP4BlockScaling(), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: every backend computes in bfloat16 where a recipe leaves a product alone."""
    return (True, "") if return_reason else True


def get_device_compute_capability() -> tuple[int, int]:
    """Return the compute capability of the current CUDA device; ``(0, 0)`` without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def get_cudnn_version() -> tuple[int, int, int]:
    """Return the version of cuDNN that torch uses; ``(0, 0, 0)`` without one."""
    encoded: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's
    return _decoded(encoded or 0)


def _decoded(encoded: int) -> tuple[int, int, int]:
    """Return major, minor and patch; cuDNN 9 has five digits, 8 had four.

    >>> _decoded(91002), _decoded(8907)
    ((9, 10, 2), (8, 9, 7))
    """
    major, rest = divmod(encoded, 10000 if encoded >= 90000 else 1000)
    return major, *divmod(rest, 100)


def _answer(recipe: Recipe, return_reason: bool) -> bool | tuple[bool, str]:
    refusals = [line.refusal for line in explain("gemm", recipe).lines if line.choice is None]
    reason = next((refusal for refusal in refusals if refusal), "")
    return (not refusals, reason) if return_reason else not refusals
