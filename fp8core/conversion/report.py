"""The report of a conversion: every layer of the model, as values and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp8core.recipe import Recipe
from fp8core.reporting import grouped


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A layer of the model.

    Attributes:
        name: its path; empty for the model itself.
        layer: the name of its class before the conversion.
        num_parameters: elements of its direct parameters.
        flops: forward matmul FLOPs a token, ``2 in_features out_features``, of experts those that
            a token goes through; 0 if it is no linear layer.
        reason: why it was not converted; empty for a layer that takes the recipe.
        is_low_precision: whether the recipe runs its forward GEMM in low precision; False without a
            recipe, and for a layer that the recipe leaves in high precision.
        num_experts: the number of experts of a mixture that it holds; 0 for another layer.
    """

    name: str
    layer: str
    num_parameters: int
    flops: int
    reason: str = ""
    is_low_precision: bool = False
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The answer of :func:`fp8core.convert`; ``str()`` prints it, ``as_dict()`` is JSON-able.

    Attributes:
        recipe: the recipe that is active outside any autocast, as text; None if there is none.
        converted: the layers of torch that changed their class.
        native: the fp8core layers of the model; they take the recipe, and their path as name.
        skipped: every other layer that has parameters, with the reason.
        notes: sentences about layers that compute otherwise than may be expected.
        num_parameters: elements of all parameters of the model, a shared one counted once.
        num_converted_parameters: elements of those in ``converted`` and ``native``.
    """

    recipe: str | None
    converted: tuple[LayerEntry, ...]
    native: tuple[LayerEntry, ...]
    skipped: tuple[LayerEntry, ...]
    notes: tuple[str, ...]
    num_parameters: int
    num_converted_parameters: int

    @property
    def parameter_share(self) -> float:
        """Share of the parameters that the converted layers hold, 0 to 1."""
        return self.num_converted_parameters / max(self.num_parameters, 1)

    @property
    def flop_share(self) -> float:
        """Share of the linear layers' matmul FLOPs a token that were converted, 0 to 1."""
        return self._share_of_flops((*self.converted, *self.native))

    @property
    def low_precision_flop_share(self) -> float:
        """Share of the linear layers' matmul FLOPs a token that the recipe runs in low precision,
        0 to 1; 0 without a recipe."""
        return self._share_of_flops(self._low())

    def as_dict(self) -> dict[str, Any]:
        """Return the report, with its three shares, as dictionaries, lists, strings and numbers."""
        return {
            **dataclasses.asdict(self),
            "parameter_share": self.parameter_share,
            "flop_share": self.flop_share,
            "low_precision_flop_share": self.low_precision_flop_share,
        }

    def _low(self) -> list[LayerEntry]:
        return [entry for entry in (*self.converted, *self.native) if entry.is_low_precision]

    def _share_of_flops(self, entries: Iterable[LayerEntry]) -> float:
        total = sum(entry.flops for entry in (*self.converted, *self.native, *self.skipped))
        return sum(entry.flops for entry in entries) / total if total else 0.0

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        taking = (*self.converted, *self.native)
        linears, rest = _num_linears(taking), _num_linears(self.skipped)
        experts = sum(entry.num_experts for entry in taking)
        all_experts = experts + sum(entry.num_experts for entry in self.skipped)
        and_experts = f" and {experts} of {all_experts} experts" if all_experts else ""
        yield (
            f"{linears} of {linears + rest} linear layers{and_experts} converted: "
            f"{self.flop_share:.1%} of their FLOPs a token, "
            f"{self.parameter_share:.1%} of the parameters"
        )
        yield f"recipe: {self.recipe or 'none; layers use low precision only inside an autocast'}"
        if self.recipe is not None:
            low = self._low()
            if all_experts:
                num_low = sum(entry.num_experts for entry in low)
                and_experts = f" and {num_low} of {all_experts} experts"
            yield (
                f"in low precision by the recipe: {_num_linears(low)} of {linears + rest} linear "
                f"layers{and_experts}, {self.low_precision_flop_share:.1%} of their FLOPs a token"
            )
        for title, entries in (
            ("converted", self.converted),
            ("already an fp8core layer", self.native),
            ("skipped", self.skipped),
        ):
            listed = ((entry.name, entry.layer, entry.reason) for entry in entries)
            yield from (f"{title}: {line}" for line in grouped(listed))
        yield from (f"note: {note}" for note in self.notes)


def _num_linears(entries: Iterable[LayerEntry]) -> int:
    """Return how many of ``entries`` are linear layers, without those of experts."""
    return sum(entry.flops > 0 and not entry.num_experts for entry in entries)


def text_of(recipe: Recipe) -> str:
    """Return ``recipe`` as the call that constructs it, without arguments of default value."""
    fields: Mapping[str, dataclasses.Field[Any]] = getattr(recipe, "__dataclass_fields__", {})
    arguments = [
        f"{name}={getattr(recipe, name)!r}"
        for name, field in fields.items()
        if field.init and getattr(recipe, name) != field.default
    ]
    return f"{type(recipe).__name__}({', '.join(arguments)})"
