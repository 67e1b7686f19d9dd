"""Linear links that are looked at: the same link, whose tensors pass by a probe.

A watched link differs from the one it is made of in objects alone. What it wants of its neighbours
is a :class:`_SeenWant`, which no fused operation can make: so the neighbour hands over the value
before the cast. Its weight quantizer and its three GEMMs are wrapped.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.backend_api import (
    TRANSFORMS,
    DequantizeDesc,
    Operand,
    OperandSpec,
    scale_inverses,
    split_groups,
)
from fp8core.chain.call import Call
from fp8core.chain.linear import LinearLink
from fp8core.chain.protocol import Handed, Want
from fp8core.context import recompute
from fp8core.dispatch import table
from fp8core.errors import UnsupportedError
from fp8core.monitoring.record import CastKey, GemmKey, KeptTensors, Recorder
from fp8core.monitoring.statistics import Cast, Tally, measure
from fp8core.recipe.plan import LinearPlan, TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Binding, Groups, Orientations, Quantizer
from fp8core.tensors.weights import Keeping, WeightQuantizer

__all__ = ["LayerWatch", "WatchedLink"]

_RESULTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}


@dataclass(frozen=True, slots=True)
class LayerWatch:
    """What a layer binds its linears with while it is monitored: makes a watched link of each.

    ``path`` is the layer's in the model; ``num_linears`` decides whether they need an index.
    """

    recorder: Recorder
    path: str
    num_linears: int

    def __call__(self, link: LinearLink, plan: LinearPlan, binding: Binding) -> WatchedLink:
        """Return ``link``, watched.

        Raises:
            UnsupportedError: the layer is on meta, where tensors have no values; or no backend
                decodes the operands.
        """
        if binding.device.type == "meta":
            raise UnsupportedError(
                "a monitored layer runs on meta, where there are no values to see. Move the model "
                "to a device with to_empty() and fill it, or close the monitor."
            )
        name = self.path if self.num_linears == 1 else f"{self.path}[{link.index}]"
        probe = _Probe(self, name, link, plan, binding)
        own = {field.name: getattr(link, field.name) for field in dataclasses.fields(link)}
        own["weight"] = _SeenWeight(link.weight, probe)
        own["_made"] = {}
        own["takes_parts"] = False  # the whole operand is looked at
        for gemm in _RESULTS:
            own[gemm] = _SeenGemm(getattr(link, gemm), probe, gemm)
        return WatchedLink(**own, probe=probe)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WatchedLink(LinearLink):
    """A linear link that shows its tensors to ``probe``."""

    probe: _Probe

    def alone(self, rows: int, needs: Sequence[bool], call: Call) -> None:
        """There is nothing to see on the way without detours."""

    def wants(self, rows: int, needs: Sequence[bool], call: Call) -> Want:
        """Want what the link does, and see it."""
        return _seen(LinearLink.wants(self, rows, needs, call), self.probe, call)

    def wants_grad(self, rows: int, needs: Sequence[bool], call: Call, context: object) -> Want:
        """Want what the link does, and see it."""
        return _seen(LinearLink.wants_grad(self, rows, needs, call, context), self.probe, call)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenWant(Want):
    probe: _Probe
    splits: Sequence[int]

    @property
    def is_plain(self) -> bool:
        """No fused operation can make it: the value before the cast would stay inside."""
        return False

    def __call__(self, y: torch.Tensor) -> Handed:
        """Look at ``y`` before it is cast, and at what was made of it."""
        role = "grad_output" if self.is_gradient else "input"
        is_repeat = not self.is_gradient and _is_repeat()
        if not is_repeat:
            self.probe.check(role, [y])
        handed = Want.__call__(self, y)
        if self.probe.recorder.is_on:
            if not is_repeat:
                self.probe.keep(role, [y], self.splits)
            value, real, groups = y, None, self.call.groups
            if self.padded is not None:
                pad = self.padded.pad_grad_output if self.is_gradient else self.padded.pad_input
                value, real = pad(y), pad(torch.ones_like(y, dtype=torch.bool))
                groups = self.padded.groups
            self.probe.cast(role, value, handed.operands, real, groups, is_repeat=is_repeat)
        return handed


def _seen(want: Want, probe: _Probe, call: Call) -> Want:
    own = {field.name: getattr(want, field.name) for field in dataclasses.fields(want)}
    return _SeenWant(**own, probe=probe, splits=call.splits)


def _is_repeat() -> bool:
    """Say whether a forward that runs now repeats an earlier one: a checkpoint's recompute."""
    tape = recompute.current()
    return recompute.is_in_backward() or (tape is not None and tape.is_repeating)


class _SeenWeight:
    """A weight's quantizer; each operand is looked at once in a step, however often it is used."""

    __slots__ = ("_inner", "_probe", "choices")

    def __init__(self, inner: WeightQuantizer, probe: _Probe) -> None:
        self._inner = inner
        self._probe = probe
        self.choices = inner.choices

    def __call__(
        self,
        weight: Any,
        /,
        *,
        columnwise: bool,
        keeping: Keeping | None = None,
        source: Any,
    ) -> Orientations:
        """Return the operands of ``weight``."""
        if not _is_repeat():
            self._probe.check("weight", [source] if isinstance(source, torch.Tensor) else source)
        made = self._inner(weight, columnwise=columnwise, keeping=keeping, source=source)
        if self._probe.recorder.is_on:
            weights, sources, rowwise, turned = weight, source, *made
            if isinstance(weight, torch.Tensor):
                weights, sources, rowwise, turned = [weight], [sources], [rowwise], [turned]
            operands = zip(rowwise, turned, strict=True)
            self._probe.weights(weights, sources, list(itertools.starmap(Orientations, operands)))
        return made

    def beside(self, input: Quantizer) -> None:
        """Input and weight are cast apart, as each is looked at."""


class _SeenGemm:
    """One of the three GEMMs; counted, its result looked at."""

    __slots__ = ("_name", "_probe", "_run")

    def __init__(self, run: Callable[..., Any], probe: _Probe, name: str) -> None:
        self._run = run
        self._probe = probe
        self._name = name

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        made = self._run(*operands, **keywords)
        if not (self._name == "fprop" and _is_repeat()):
            self._probe.gemm(self._name, [made] if isinstance(made, torch.Tensor) else made)
        return made


class _Probe:
    """Takes down what passes one linear link."""

    __slots__ = (
        *("_backends", "_binding", "_decoders", "_gemms", "_index", "_name", "_path", "_plan"),
        "_unturned",
        "recorder",
    )

    def __init__(
        self,
        watch: LayerWatch,
        name: str,
        link: LinearLink,
        plan: LinearPlan,
        binding: Binding,
    ) -> None:
        self.recorder = watch.recorder
        self._path = watch.path
        self._name = name
        self._index = link.index
        self._binding = binding
        self._plan: dict[str, TensorPlan] = {
            role: getattr(plan, role) for role in ("input", "weight", "grad_output")
        }
        # In high precision these are turned where they are read, which is behind what is seen here.
        self._unturned = ("input", "weight") if link.only_once is None else ()
        self._gemms = {gemm: link.choices[gemm] for gemm in _RESULTS}
        self._backends = {
            role: link.choices[role].backend if role in link.choices else "" for role in self._plan
        }
        specs = {spec for tensor in self._plan.values() for spec in tensor if spec is not None}
        self._decoders = {
            spec: table.resolve(DequantizeDesc(spec), binding.device).run for spec in specs
        }

    def check(self, tensor: str, values: Sequence[torch.Tensor]) -> None:
        """Look for NaN and inf in ``values`` of ``tensor``: input, output, grad_weight..."""
        if self.recorder.is_on:
            self.recorder.check(self._name, tensor, values)

    def gemm(self, gemm: str, made: Sequence[torch.Tensor]) -> None:
        """Count one GEMM and look at its result."""
        if self.recorder.is_on:
            choice = self._gemms[gemm]
            is_quantized = bool(getattr(choice.desc, "low_precision", False))
            self.recorder.count(GemmKey(self._name, gemm), choice.backend, is_quantized)
            self.recorder.check(self._name, _RESULTS[gemm], made)

    def keep(self, role: str, values: Sequence[torch.Tensor], splits: Sequence[int]) -> None:
        """Keep the values of a tensor for a replay, if the monitor does."""
        self.recorder.keep(
            (self._path, self._index), role, KeptTensors(values, splits), self._binding
        )

    def weights(
        self,
        weights: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        made: Sequence[Orientations],
    ) -> None:
        """Look at those of the weights' operands that were not seen in this step."""
        is_repeat = _is_repeat()
        if not is_repeat:
            self.recorder.notice(self._name, sources)
            self.keep("weight", sources, ())
        for weight, source, operands in zip(weights, sources, made, strict=True):
            row, column = (
                operand
                if operand is not None and self.recorder.is_new(operands.rowwise, way)
                else None
                for operand, way in zip(operands, Orientations._fields, strict=True)
            )
            if row is None and column is None:
                continue
            is_stored = isinstance(source, QuantizedTensor)
            real = None
            if weight.shape != source.shape:
                missing = [a - b for a, b in zip(weight.shape, source.shape, strict=True)]
                whole = torch.ones(source.shape, dtype=torch.bool, device=source.device)
                real = torch.nn.functional.pad(whole, (0, missing[1], 0, missing[0]))
            value = None if is_stored else weight
            self.cast("weight", value, Orientations(row, column), real, (), is_repeat=is_repeat)

    def cast(
        self,
        role: str,
        value: torch.Tensor | None,
        made: Orientations,
        real: torch.Tensor | None,
        groups: Groups,
        *,
        is_repeat: bool,
    ) -> None:
        """Measure the operands ``made`` of ``value``; None where they are all that there is.

        In a repeat only what the forward did not make is taken down: a checkpoint that runs its
        forward without gradients makes no columnwise operand there.
        """
        row_key = CastKey(self._name, role, "rowwise")
        for way, operand, spec in zip(made._fields, made, self._plan[role], strict=True):
            key = CastKey(self._name, role, way)
            if operand is None or (is_repeat and not self.recorder.lacks(key, row_key)):
                continue
            if way == "columnwise" and role in self._unturned:
                operand = Operand(operand.data.t())
            tally = self._tally(value, operand, spec, real, groups, is_turned=way == "columnwise")
            dtype = str(self._binding.activation_dtype).removeprefix("torch.")
            self.recorder.add(
                key, tally, dtype if spec is None else str(spec), self._backends[role]
            )

    def _tally(
        self,
        value: torch.Tensor | None,
        operand: Operand,
        spec: OperandSpec | None,
        real: torch.Tensor | None,
        groups: Groups,
        *,
        is_turned: bool,
    ) -> Tally:
        """Measure one operand, each group as a tensor of its own."""
        tally, dim = Tally(), 1 if is_turned else 0
        bounds = groups[0].tolist() if groups else None
        parts = [operand] if bounds is None else split_groups(spec, operand, bounds, dim)
        spans = [slice(None)] if bounds is None else list(map(slice, bounds[:-1], bounds[1:]))
        for part, span in zip(parts, spans, strict=True):
            decoded = part.data if spec is None else self._decoders[spec](part)
            factors = None if spec is None else scale_inverses(spec, part)
            mask = None if real is None else real[span]
            transform = None if spec is None else spec.transform
            own = None if value is None or transform not in (None, *TRANSFORMS) else value[span]
            if own is not None and transform is not None:
                own = TRANSFORMS[transform](own, 0 if is_turned else 1)
            if is_turned:
                own, mask = (None if one is None else one.t() for one in (own, mask))
            before = decoded if own is None else own
            cast = Cast(before, decoded, spec, factors, mask, is_compared=own is not None)
            tally.add(measure(cast))
        return tally
