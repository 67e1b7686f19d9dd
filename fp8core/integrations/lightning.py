"""The precision plug-in of Lightning: ``Fabric(plugins=...)`` and ``Trainer(plugins=...)``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection

from fp8core.context.autocast import autocast
from fp8core.conversion.convert import convert
from fp8core.conversion.layers import RECORD
from fp8core.errors import RecipeError, checked_choice
from fp8core.recipe import Recipe
from fp8core.recipe.data import from_data
from fp8core.reporting import logger

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Fp8CorePrecision(Precision):
    """Lightning's precision plug-in, for Fabric (with ``fabric.backward(loss)``) and the Trainer.

    ``setup`` (Fabric) and ``fit`` (Trainer) convert the model with :func:`fp8core.convert`: the
    parameters stay the same objects, so that optimizers made before or after train them. A model
    that is converted already stays as it is, in its recipe.

    A call of a Fabric module, or a ``training_step``, is one step of delayed scaling.

    Args:
        recipe: a Recipe, its name, or the data of one as in a configuration file.
        weights_dtype: dtype of the parameters, and of floating-point inputs.
        compute_dtype: dtype of what the recipe does not compute; if it is not ``weights_dtype``,
            forward runs in a ``torch.autocast`` of it.
        filter, skip, rms_norms: as of :func:`fp8core.convert`; the filter is patterns or None.

    Raises:
        RecipeError: an unknown recipe, or dtypes that no layer computes in.
    """

    precision: Any = "fp8core"

    def __init__(
        self,
        recipe: Recipe | str | Mapping[str, Any] = "mxfp8",
        *,
        weights_dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype = torch.bfloat16,
        filter: Sequence[str] | str | None = None,
        skip: Sequence[str] | str = (),
        rms_norms: bool | None = None,
    ) -> None:
        for name, dtype in (("weights_dtype", weights_dtype), ("compute_dtype", compute_dtype)):
            checked_choice("Fp8CorePrecision", name, dtype, _DTYPES, RecipeError)
        chosen = from_data(recipe, "Fp8CorePrecision(recipe=...)")
        if chosen is None:
            raise RecipeError(
                "Fp8CorePrecision(recipe=None): expected a recipe; Lightning's precision "
                "'bf16-mixed' trains without one."
            )
        self.recipe = chosen
        self.weights_dtype = weights_dtype
        self.compute_dtype = compute_dtype
        self.filter = filter
        self.skip = skip
        self.rms_norms = rms_norms
        # The models that this plug-in converted: in others, the user's recipe stays active.
        self._converted: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._parameter: weakref.ref[torch.nn.Parameter] | None = None

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert ``module`` in place, in ``weights_dtype``, and return it."""
        module = module.to(dtype=self.weights_dtype)
        self._parameter = next(map(weakref.ref, module.parameters()), None)
        if any(RECORD in vars(layer) for layer in module.modules()):
            if module not in self._converted:
                logger.info(
                    "Fp8CorePrecision: %s is converted already, and keeps its recipe instead of %r",
                    type(module).__name__,
                    self.recipe,
                )
            return module
        report = convert(
            module, self.recipe, filter=self.filter, skip=self.skip, rms_norms=self.rms_norms
        )
        self._converted.add(module)
        logger.info("%s", report)
        return module

    def tensor_init_context(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which tensors, and parameters, are created in ``weights_dtype``."""
        return _default_dtype(self.weights_dtype)

    module_init_context = tensor_init_context

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Run one forward inside."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_default_dtype(self.weights_dtype))
            if self.compute_dtype != self.weights_dtype:
                stack.enter_context(torch.autocast(self._device_type(), self.compute_dtype))
            if self._converted:
                stack.enter_context(autocast(recipe=self.recipe))
            yield

    def _device_type(self) -> str:
        """Return the type of the device that the model is on now."""
        parameter = None if self._parameter is None else self._parameter()
        return "cpu" if parameter is None else parameter.device.type

    # The Trainer's base class calls hooks of the trainer, which a model under Fabric does not have.

    def pre_backward(self, tensor: torch.Tensor, module: torch.nn.Module | None) -> Any:
        """Run before the backward pass of ``tensor``."""
        return self._base(module).pre_backward(self, tensor, module)

    def backward(
        self, tensor: torch.Tensor, model: torch.nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass of ``tensor``."""
        self._base(model).backward(self, tensor, model, *args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: torch.nn.Module | None) -> Any:
        """Run after the backward pass of ``tensor``."""
        return self._base(module).post_backward(self, tensor, module)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of ``optimizer``; the Trainer passes the model and a closure too."""
        base = Precision if args or "model" in kwargs else FabricPrecision
        return base.optimizer_step(self, optimizer, *args, **kwargs)

    @staticmethod
    def _base(model: torch.nn.Module | None) -> Any:
        """Return the base class for ``model``: the Trainer's or Fabric's."""
        is_trained = isinstance(model, LightningModule) and model.fabric is None
        return Precision if is_trained else FabricPrecision

    def convert_input(self, data: Any) -> Any:
        """Return ``data`` with its floating-point tensors in ``weights_dtype``."""
        return _cast(data, self.weights_dtype)

    def convert_output(self, data: Any) -> Any:
        """Return ``data`` with its floating-point tensors in torch's default dtype."""
        return _cast(data, torch.get_default_dtype())


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(data, torch.Tensor, cast)
