"""The quantizer that transformers calls while ``from_pretrained`` loads a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8core.conversion.convert import convert, unconvert
from fp8core.conversion.inference import quantize_
from fp8core.errors import RecipeError
from fp8core.modules.models.prepare import prepare
from fp8core.recipe import Recipe
from fp8core.recipe.data import as_data, from_data
from fp8core.reporting import logger
from fp8core.tensors.delayed_state import BUFFERS

METHOD = "fp8core"
"""The name of the quantization method in a model's ``config.json``."""


class Fp8CoreConfig(QuantizationConfigMixin):
    """``from_pretrained(..., quantization_config=Fp8CoreConfig("mxfp8"))`` converts the model.

    The layers compute as :func:`fp8core.convert` has them compute; the weights stay in high
    precision, so that the model trains, and saves files that any program reads. With
    ``stores_weights`` they are stored for inference instead, as by :func:`fp8core.quantize_`.

    Args:
        recipe: a Recipe, a recipe's name, or the data that ``to_dict()`` returns for one; None
            leaves the layers in high precision outside of :func:`fp8core.autocast`.
        filter, rms_norms: as of :func:`fp8core.convert`; the filter is patterns or None.
        stores_weights: whether weights are stored in low precision, for inference alone.
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
        rms_norms: bool | None = None,
        stores_weights: bool = False,
        **unknown: object,
    ) -> None:
        if unknown.pop("quant_method", METHOD) != METHOD or unknown:
            raise RecipeError(
                f"Fp8CoreConfig: {', '.join(unknown) or 'quant_method'} is not one of its "
                f"arguments, which are recipe, filter, skip, modules_to_not_convert, "
                f"rms_norms, stores_weights."
            )
        self.quant_method = METHOD
        self.recipe = from_data(recipe, "Fp8CoreConfig(recipe=...)")
        self.rms_norms, self.stores_weights = rms_norms, stores_weights
        self.filter = None if filter is None else _patterns("filter", filter)
        self.skip = [*_patterns("skip", skip), *_patterns("skip", modules_to_not_convert or ())]

    def to_dict(self) -> dict[str, Any]:
        """Return the config as data of JSON, from which ``from_dict`` constructs an equal one.

        A recipe that holds functions or other recipes cannot be written as data. The recipe is
        there as text for transformers to print; :meth:`check_serializable` refuses it.
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
            **({"stores_weights": True} if self.stores_weights else {}),
        }

    def check_serializable(self) -> None:
        """Raise RecipeError if the recipe cannot be written to ``config.json``."""
        if self.recipe is not None:
            as_data(self.recipe)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Fp8CoreConfig) and vars(self) == vars(value)

    __hash__ = None  # type: ignore[assignment]  # a config can be changed


def _patterns(argument: str, value: Sequence[str] | str) -> list[str]:
    patterns = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RecipeError(f"Fp8CoreConfig({argument}={value!r}): expected patterns of names.")
    return patterns


_STATE = rf"\.({'|'.join(BUFFERS)})$"


class Fp8CoreQuantizer(HfQuantizer):
    """Converts a model of transformers after its weights are loaded.

    The report of the conversion is the model's attribute ``fp8core_report``. Delayed scales that
    the checkpoint holds are loaded too, so that training goes on with them.
    """

    requires_calibration = False

    def __init__(self, quantization_config: Fp8CoreConfig, **settings: Any) -> None:
        super().__init__(quantization_config, **settings)
        self._files: Sequence[str] = ()

    def _process_model_before_weight_loading(
        self, model: torch.nn.Module, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> torch.nn.Module:
        self._files = checkpoint_files or ()
        # Loaded after the conversion, which creates these buffers.
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, _STATE}  # type: ignore[assignment]
        return model

    def _process_model_after_weight_loading(
        self, model: torch.nn.Module, **_: Any
    ) -> torch.nn.Module:
        config: Fp8CoreConfig = self.quantization_config
        report = convert(
            model,
            config.recipe,
            filter=config.filter,
            skip=config.skip,
            rms_norms=config.rms_norms,
        )
        model.fp8core_report = report  # type: ignore[assignment]  # read by users
        logger.info("%s", report)
        state = _delayed_state(self._files)
        if state:
            prepare(model, config.recipe)
            model.load_state_dict(state, strict=False)
        if config.stores_weights:
            logger.info("%s", quantize_(model.eval(), skip=config.skip))
        return model

    def _dequantize(self, model: torch.nn.Module, dtype: torch.dtype | None = None) -> Any:
        unconvert(model)
        del model.fp8core_report
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        """Whether the model can be saved: its weights are those of the unconverted model.

        Raises:
            RecipeError: the recipe cannot be written to ``config.json``, or the weights are stored
                in low precision.
        """
        if self.quantization_config.stores_weights:
            raise RecipeError(
                "save_pretrained: the weights are stored in low precision. Call fp8core."
                "huggingface.save_pretrained(model, directory), or model.dequantize() first."
            )
        try:
            self.quantization_config.check_serializable()
        except RecipeError as error:
            raise RecipeError(f"save_pretrained: {error} Call model.dequantize() first.") from None
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on the model train; with weights stored for inference they do not."""
        return not self.quantization_config.stores_weights

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the layers train without adapters, which Trainer asks for; as the adapters do."""
        return self.is_trainable

    @property
    def is_compileable(self) -> bool:
        """True, as torch.compile takes the layers."""
        return True


def _delayed_state(files: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of delayed scaling in safetensors ``files``."""
    state = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            continue
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no mapping
                if name.rpartition(".")[2] in BUFFERS:
                    state[name] = tensors.get_tensor(name)
    return state


register_quantization_config(METHOD)(Fp8CoreConfig)
register_quantizer(METHOD)(Fp8CoreQuantizer)
