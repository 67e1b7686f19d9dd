"""Watched linear links: copies of a link that show their tensors to a probe.

A watched link has the values of the original; its weight quantizer and its three GEMMs are wrapped.
The link asks its neighbours for a :class:`_WatchedRequest`, which no fused operation fulfils, so
that a neighbour hands over the value before the cast.
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
    padded_offsets,
    scale_inverses,
    split_groups,
)
from fp8core.chain.call import Call
from fp8core.chain.linear.program import LinearLink
from fp8core.chain.protocol import Program, Wrapper
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.context import recompute
from fp8core.dispatch import table
from fp8core.errors import UnsupportedError
from fp8core.inspection.monitoring.record import (
    CastKey,
    GemmKey,
    ObservedCast,
    Recorder,
    SavedTensors,
    Tally,
    measure,
)
from fp8core.recipe.plan import LinearPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Groups, Orientations
from fp8core.tensors.quantizer_binding import Binding
from fp8core.tensors.saving import Unquantized, is_unquantized
from fp8core.tensors.storage import padded_with
from fp8core.tensors.weights import Keeping, WeightQuantizer, WeightWrapper

_RESULTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}


@dataclass(frozen=True, slots=True)
class LayerWatch:
    """Turns each linear link that a monitored layer binds into a watched one.

    ``path`` is the path of the layer in the model. If ``num_linears`` is more than one, the names
    of the linears end in an index.
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
                "a monitored layer runs on meta, where tensors have no values. Move the model to a "
                "device with to_empty() and fill it, or close the monitor."
            )
        name = self.path if self.num_linears == 1 else f"{self.path}[{link.index}]"
        probe = _Probe(self, name, link, plan, binding)
        values = {field.name: getattr(link, field.name) for field in dataclasses.fields(link)}
        values["weight"] = _WatchedWeight(link.weight, probe)
        values["_programs"] = {}
        values["takes_chunks"] = False  # the whole operand is looked at
        for gemm in _RESULTS:
            values[gemm] = _watched(getattr(link, gemm), probe, gemm)
        return WatchedLink(**values, probe=probe)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WatchedLink(LinearLink):
    """A linear link that shows its tensors to ``probe``."""

    probe: _Probe

    def observed(self, program: Program, call: Call) -> Program:
        """Return ``program`` with requests that show the tensors."""
        return _WatchedProgram(program, self.probe, call)


class _WatchedProgram(Wrapper):
    """A linear's program whose requests show the values before their casts to the probe."""

    __slots__ = ("_call", "_probe")

    def __init__(self, inner: Program, probe: _Probe, call: Call) -> None:
        super().__init__(inner, _seen(inner.input_request, probe, call))
        self._probe = probe
        self._call = call

    def request_grad(self, call: Call) -> QuantizeRequest:
        """Return the inner program's request, which shows the gradient."""
        return _seen(self._inner.request_grad(call), self._probe, self._call)

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """Return False: a gradient that is stored quantized is cast where it can be seen."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedRequest(QuantizeRequest):
    probe: _Probe
    splits: Sequence[int]

    @property
    def is_plain(self) -> bool:
        """False: a fused operation would hide the value before the cast."""
        return False

    def __call__(self, y: torch.Tensor) -> Handover:
        """Return the operands of ``y``, and record ``y`` and its cast."""
        role = "grad_output" if self.is_gradient else "input"
        is_repeat = not self.is_gradient and _is_repeat()
        if not is_repeat:
            self.probe.check(role, [y])
        handed = QuantizeRequest.__call__(self, y)
        if self.probe.recorder.is_on:
            if not is_repeat:
                self.probe.keep(role, [y], self.splits)
            value, real, groups = y, None, self.call.groups
            if self.padded is not None:
                pad = self.padded.pad_grad_output if self.is_gradient else self.padded.pad_input
                value, real = pad(y), pad(torch.ones_like(y, dtype=torch.bool))
                groups = self.padded.groups
            row, column = handed.operands
            shown = Orientations(row, None)
            self.probe.cast(role, value, shown, real, groups, is_repeat=is_repeat)
            if column is not None and (step := self.quantizer.row_step) > 1:
                real = torch.ones_like(value, dtype=torch.bool) if real is None else real
                value, real = (_with_zeros(each, groups, step) for each in (value, real))
                groups = tuple(padded_offsets(offsets, step) for offsets in groups)
            shown = Orientations(None, column)
            self.probe.cast(role, value, shown, real, groups, is_repeat=is_repeat)
        return handed


def _with_zeros(x: torch.Tensor, groups: Groups, step: int) -> torch.Tensor:
    """Return ``x`` with zeros up to a multiple of ``step`` rows, in each group."""
    sizes = groups[0].diff().tolist() if groups else [x.shape[0]]
    parts = torch.split(x, sizes)
    return torch.cat([padded_with(part, (-part.shape[0] % step, 0)) for part in parts])


def _seen(request: QuantizeRequest | None, probe: _Probe, call: Call) -> _WatchedRequest:
    assert request is not None  # a linear has both requests
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return _WatchedRequest(**values, probe=probe, splits=call.splits)


def _is_repeat() -> bool:
    """Return whether the forward that runs now is a checkpoint's recompute."""
    tape = recompute.current()
    return recompute.is_in_backward() or (tape is not None and tape.is_repeating)


class _WatchedWeight(WeightWrapper):
    """A weight's quantizer, which has the probe record each operand once in a step."""

    __slots__ = ("_probe",)

    def __init__(self, inner: WeightQuantizer, probe: _Probe) -> None:
        super().__init__(inner)
        self._probe = probe

    def __call__(
        self,
        weight: Any,
        /,
        *,
        columnwise: bool,
        keeping: Keeping | None = None,
    ) -> Orientations:
        """Return the operands of ``weight``."""
        if not _is_repeat():
            self._probe.check("weight", [weight] if isinstance(weight, torch.Tensor) else weight)
        orientations = self._inner(weight, columnwise=columnwise, keeping=keeping)
        if self._probe.recorder.is_on:
            weights, rowwise, turned = weight, *orientations
            if isinstance(weight, torch.Tensor):
                weights, rowwise, turned = [weight], [rowwise], [turned]
            turned = [None if isinstance(operand, Unquantized) else operand for operand in turned]
            operands = zip(rowwise, turned, strict=True)
            self._probe.weights(weights, list(itertools.starmap(Orientations, operands)))
        return orientations

    def requantize(self, saved: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return ``saved`` with operands in the places of weights, and record these."""
        flat = self._inner.requantize(saved)
        if self._probe.recorder.is_on:
            for at in range(0, len(flat), 3):
                weight = saved[at]
                if weight is not None and is_unquantized(weight):
                    self._probe.requantized(weight, Operand(*flat[at : at + 3]))  # type: ignore[arg-type]  # data is there
        return flat


def _watched(run: Callable[..., Any], probe: _Probe, name: str) -> Callable[..., Any]:
    """Return a GEMM of the three, which the probe counts and whose result it checks."""

    def gemm(*operands: Any, **keywords: Any) -> Any:
        result = run(*operands, **keywords)
        if not (name == "fprop" and _is_repeat()):
            probe.gemm(name, [result] if isinstance(result, torch.Tensor) else result)
        return result

    return gemm


class _Probe:
    """Records the tensors of one linear link."""

    __slots__ = (
        *("_backends", "_binding", "_decoders", "_gemms", "_index", "_name", "_path", "_plan"),
        *("_decoded", "_padding", "_unturned", "recorder"),
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
        self._padding = link.padding
        self._plan = plan.tensors
        # In high precision the GEMM transposes these operands, after the probe has seen them.
        self._unturned = ("input", "weight") if link.only_once is None else ()
        # Their columnwise operand is the rowwise one: nothing else was cast.
        decodes = {"input": link.decode_input, "weight": link.decode_weight}
        self._decoded = [role for role, decode in decodes.items() if decode is not None]
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

    def gemm(self, gemm: str, results: Sequence[torch.Tensor]) -> None:
        """Count one GEMM and check its results for NaN and inf."""
        if self.recorder.is_on:
            choice = self._gemms[gemm]
            is_quantized = bool(getattr(choice.desc, "low_precision", False))
            self.recorder.count(GemmKey(self._name, gemm), choice.backend, is_quantized)
            self.recorder.check(self._name, _RESULTS[gemm], results)

    def keep(self, role: str, values: Sequence[torch.Tensor], splits: Sequence[int]) -> None:
        """Keep the values of a tensor for :func:`replay`, if the monitor keeps tensors."""
        self.recorder.keep(
            (self._path, self._index), role, SavedTensors(values, splits), self._binding
        )

    def weights(
        self,
        weights: Sequence[torch.Tensor],
        operands_of_each: Sequence[Orientations],
    ) -> None:
        """Record the operands of the weights that were not seen in this step."""
        is_repeat = _is_repeat()
        if not is_repeat:
            self.recorder.notice(self._name, weights)
            self.keep("weight", weights, ())
        for weight, operands in zip(weights, operands_of_each, strict=True):
            row, column = (
                operand
                if operand is not None and self.recorder.is_new(operands.rowwise, orientation)
                else None
                for operand, orientation in zip(operands, Orientations._fields, strict=True)
            )
            if row is None and column is None:
                continue
            value, real = self._padded(weight)
            self.cast("weight", value, Orientations(row, column), real, (), is_repeat=is_repeat)

    def requantized(self, weight: torch.Tensor, operand: Operand) -> None:
        """Record the columnwise ``operand`` of ``weight`` that backward computed."""
        value, real = self._padded(weight)
        self.cast("weight", value, Orientations(None, operand), real, (), is_repeat=False)

    def _padded(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the value of ``weight`` that was cast, None if it is stored quantized; and which
        elements of its operands are no padding, None if none is."""
        value = None if isinstance(weight, QuantizedTensor) else weight
        zeros = None if self._padding is None else self._padding.of_weight
        if zeros is None:
            return value, None
        real = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
        return None if value is None else padded_with(value, zeros), padded_with(real, zeros)

    def cast(
        self,
        role: str,
        value: torch.Tensor | None,
        operands: Orientations,
        real: torch.Tensor | None,
        groups: Groups,
        *,
        is_repeat: bool,
    ) -> None:
        """Measure the operands of ``value``, which is None for a parameter in low precision.

        In a recompute only operands that the first forward did not have are recorded: a checkpoint
        runs that forward without gradients, and so without columnwise operands.
        """
        row_key = CastKey(self._name, role, "rowwise")
        for orientation, operand, spec in zip(
            operands._fields, operands, self._plan[role], strict=True
        ):
            key = CastKey(self._name, role, orientation)
            if orientation == "columnwise" and role in self._decoded:
                continue
            if operand is None or (is_repeat and not self.recorder.lacks(key, row_key)):
                continue
            if orientation == "columnwise" and role in self._unturned:
                operand = Operand(operand.data.t())
            tally = self._tally(
                value, operand, spec, real, groups, is_turned=orientation == "columnwise"
            )
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
        """Measure one operand; of a grouped one, each group by itself."""
        tally, dim = Tally(), 1 if is_turned else 0
        bounds = groups[0].tolist() if groups else None
        parts = [operand] if bounds is None else split_groups(spec, operand, bounds, dim)
        spans = [slice(None)] if bounds is None else list(map(slice, bounds[:-1], bounds[1:]))
        for part, span in zip(parts, spans, strict=True):
            decoded = part.data if spec is None else self._decoders[spec](part)
            factors = None if spec is None else scale_inverses(spec, part)
            mask = None if real is None else real[span]
            transform = None if spec is None else spec.transform
            x = None if value is None or transform not in (None, *TRANSFORMS) else value[span]
            if x is not None and transform is not None:
                x = TRANSFORMS[transform](x, 0 if is_turned else 1)
            if is_turned:
                x, mask = (None if matrix is None else matrix.t() for matrix in (x, mask))
            before = decoded if x is None else x
            cast = ObservedCast(before, decoded, spec, factors, mask, is_compared=x is not None)
            tally.add(measure(cast))
        return tally
