"""The quantizer that transformers calls while ``from_pretrained`` loads a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from fp8core.conversion.convert import convert, unconvert
from fp8core.errors import RecipeError
from fp8core.integrations.huggingface.config import METHOD, Fp8CoreConfig
from fp8core.modules.prepare import prepare
from fp8core.reporting import logger
from fp8core.tensors.slots import BUFFERS

__all__ = ["Fp8CoreConfig", "Fp8CoreQuantizer"]

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
        return model

    def _dequantize(self, model: torch.nn.Module, dtype: torch.dtype | None = None) -> Any:
        unconvert(model)
        del model.fp8core_report
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        """Whether the model can be saved: its weights are those of the unconverted model.

        Raises:
            RecipeError: the recipe cannot be written to ``config.json``.
        """
        try:
            self.quantization_config.check_serializable()
        except RecipeError as error:
            raise RecipeError(f"save_pretrained: {error} Call model.dequantize() first.") from None
        return True

    @property
    def is_trainable(self) -> bool:
        """True, as adapters on the model train."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True, as the layers train without adapters, which Trainer asks for."""
        return True

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
            state.update(
                {
                    name: tensors.get_tensor(name)
                    for name in tensors.keys()  # noqa: SIM118  it is no mapping
                    if name.rpartition(".")[2] in BUFFERS
                }
            )
    return state


register_quantization_config(METHOD)(Fp8CoreConfig)
register_quantizer(METHOD)(Fp8CoreQuantizer)
