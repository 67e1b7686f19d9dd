"""What every recipe is made of: formats by name, the base class, and the checks of fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core.errors import RecipeError, UnsupportedError, did_you_mean
from fp8core.plan import AmaxAlgorithm, DelayedPlan, GemmPlan, LayerRole, LinearPlan, TensorPlan

__all__ = ["FAST", "SPLIT", "Format", "MMParams", "Recipe"]


class _FormatNames(type):
    def __getattr__(cls, name: str) -> Format:
        if name.startswith("_"):
            raise AttributeError(name)
        return Format(name)


class Format(str, metaclass=_FormatNames):
    """Which number format the forward and the backward operands take, by name.

    ``Format.E4M3``, ``Format.E5M2``, ``Format.E2M1`` use one format both ways, ``Format.HYBRID``
    is e4m3 forward and e5m2 backward, and any format that a plug-in registers has its own name,
    ``Format.HIF8``. A format is a plain string by value: ``Format.HYBRID == "hybrid"``.

    Raises:
        RecipeError: no format of that name is registered; resolved when the name is used.
    """

    __slots__ = ()
    _PAIRS: ClassVar = {"hybrid": ("e4m3", "e5m2")}

    def __new__(cls, name: str) -> Format:
        """Look ``name`` up, in any case."""
        word = name.lower()
        if word not in cls._PAIRS:
            formats.by_name(word)
        return super().__new__(cls, word)

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
    """How one GEMM accumulates: in float32 (split), or in the device's faster way."""

    use_split_accumulator: bool = True


class Recipe:
    """Base of every recipe: a frozen dataclass that can say ``plan(role, dtype)``.

    ``reads_names``: the plan depends on the layer's name, so that torch.compile makes a graph for
    each name instead of one for all layers of a shape.
    """

    __slots__ = ()
    reads_names: ClassVar[bool] = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse unknown arguments by name, before the dataclass's own ``__init__``."""
        known = list(inspect.signature(cls.__init__).parameters)[1:] if kwargs else []
        for name in kwargs:
            if name not in known:
                raise RecipeError(
                    f"{cls.__name__} has no argument {name!r}; "
                    f"valid ones: {', '.join(known)}.{did_you_mean(name, known)}"
                )
        return super().__new__(cls)

    def plan(self, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
        """Return how a layer of ``role`` computes on activations of ``dtype``."""
        raise NotImplementedError


def linear_plan(
    tensors: Callable[[str], TensorPlan],
    accumulators: tuple[MMParams, MMParams, MMParams],
    *,
    backward_override: str | None = None,
    delayed: DelayedPlan | None = None,
) -> LinearPlan:
    """Arrange the plans of ``input``, ``weight`` and ``grad_output`` as three GEMMs."""
    x, w, dy = (tensors(name) for name in ("input", "weight", "grad_output"))
    fast = [not params.use_split_accumulator for params in accumulators]
    fprop = GemmPlan(x.rowwise, w.rowwise, fast[0])
    if backward_override is not None:
        return LinearPlan(fprop, delayed=delayed)
    return LinearPlan(
        fprop,
        GemmPlan(dy.rowwise, w.columnwise, fast[1]),
        GemmPlan(dy.columnwise, x.columnwise, fast[2]),
        delayed,
    )


SPLIT = MMParams(use_split_accumulator=True)
FAST = MMParams(use_split_accumulator=False)


def delayed_linear_plan(fp8_format: str, delayed: DelayedPlan) -> LinearPlan:
    """Return the plan of tensorwise delayed scaling; dgrad and wgrad accumulate in float32."""

    def tensor(name: str) -> TensorPlan:
        spec = OperandSpec(*element(fp8_format, name, (0, 0)), delayed=True, cast_first=False)
        return TensorPlan(spec, spec)

    return linear_plan(tensor, (FAST, SPLIT, SPLIT), delayed=delayed)


def check_delayed(recipe: str, history_len: int, algorithm: AmaxAlgorithm) -> None:
    """Raise RecipeError unless the fields of delayed scaling make sense."""
    if not isinstance(history_len, int) or history_len < 1:
        raise RecipeError(f"{recipe}(amax_history_len={history_len!r}): expected an integer >= 1.")
    if not callable(algorithm) and algorithm not in ("max", "most_recent"):
        raise RecipeError(
            f"{recipe}(amax_compute_algo={algorithm!r}): expected 'max', 'most_recent' or a "
            f"function of the history."
        )


def element(
    fp8_format: str, tensor: str, block: tuple[int, int]
) -> tuple[str, tuple[int, int], float]:
    """Return format name, block and target for ``tensor``: OperandSpec's first three fields."""
    pair = Format(fp8_format)
    spec = pair.backward if tensor == "grad_output" else pair.forward
    return spec.name, block, spec.max


def check_format(recipe: object, name: str, refuse: tuple[str, ...] = ()) -> None:
    if Format(name) in refuse:
        raise RecipeError(
            f"{type(recipe).__name__}(fp8_format={name!r}): {name} has too few mantissa bits for "
            f"the forward pass; use Format.E4M3 or Format.HYBRID."
        )


def check_common(recipe: Any, overrides: tuple[str | None, ...] = (None, "high_precision")) -> None:
    owner = type(recipe).__name__
    for name in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, name):
            raise UnsupportedError(f"{owner}({name}=True): low-precision attention is not offered.")
    if recipe.backward_override not in overrides:
        raise RecipeError(
            f"{owner}(backward_override={recipe.backward_override!r}): expected one of {overrides}."
        )
