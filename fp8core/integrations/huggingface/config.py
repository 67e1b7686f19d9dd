"""The quantization config of transformers that names a recipe of fp8core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8core.errors import RecipeError
from fp8core.recipe import Recipe
from fp8core.recipe.data import as_data, from_data

__all__ = ["METHOD", "Fp8CoreConfig"]

METHOD = "fp8core"
"""The name of the quantization method in a model's ``config.json``."""


class Fp8CoreConfig(QuantizationConfigMixin):
    """``from_pretrained(..., quantization_config=Fp8CoreConfig("mxfp8"))`` converts the model.

    The layers compute as :func:`fp8core.convert` has them compute; the weights stay in high
    precision, so that the model trains, and saves files that any program reads.

    Args:
        recipe: a Recipe, a recipe's name, or the data that ``to_dict()`` returns for one; None
            leaves the layers in high precision outside of :func:`fp8core.autocast`.
        filter: patterns of the layers to convert, see :func:`fp8core.convert`; None converts all
            but heads, routers and adapters.
        rms_norms: whether norms such as ``LlamaRMSNorm`` are converted too, see
            :func:`fp8core.convert`.
        skip: patterns of layers to leave out. ``modules_to_not_convert``, the name of this list in
            other methods of transformers, is taken as well.

    Raises:
        RecipeError: an unknown recipe, patterns that are no text, or an unknown argument.
    """

    def __init__(
        self,
        recipe: Recipe | str | Mapping[str, Any] | None = "mxfp8",
        *,
        filter: Sequence[str] | str | None = None,
        skip: Sequence[str] | str = (),
        modules_to_not_convert: Sequence[str] | None = None,
        rms_norms: bool = False,
        **unknown: object,
    ) -> None:
        if unknown.pop("quant_method", METHOD) != METHOD or unknown:
            raise RecipeError(
                f"Fp8CoreConfig: {', '.join(unknown) or 'quant_method'} is not one of its "
                f"arguments, which are recipe, filter, skip, modules_to_not_convert, "
                f"rms_norms."
            )
        self.quant_method = METHOD
        self.recipe = from_data(recipe, "Fp8CoreConfig(recipe=...)")
        self.rms_norms = rms_norms
        self.filter = None if filter is None else _patterns("filter", filter)
        self.skip = [*_patterns("skip", skip), *_patterns("skip", modules_to_not_convert or ())]

    def to_dict(self) -> dict[str, Any]:
        """Return the config as data of JSON, from which ``from_dict`` constructs an equal one.

        A recipe that holds functions or other recipes cannot be written as data. It is there as
        text for transformers to print; :meth:`check_serializable` refuses it.
        """
        try:
            data = None if self.recipe is None else as_data(self.recipe)
        except RecipeError:
            data = repr(self.recipe)
        return {
            "quant_method": METHOD,
            "recipe": data,
            "filter": self.filter,
            "skip": self.skip,
            "rms_norms": self.rms_norms,
        }

    def check_serializable(self) -> None:
        """Raise RecipeError if the recipe cannot be written to ``config.json``."""
        if self.recipe is not None:
            as_data(self.recipe)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fp8CoreConfig) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # a config can be changed


def _patterns(argument: str, given: Sequence[str] | str) -> list[str]:
    patterns = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RecipeError(f"Fp8CoreConfig({argument}={given!r}): expected patterns of names.")
    return patterns
