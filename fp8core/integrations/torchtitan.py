"""torchtitan's plug-in points: a converter of model configs, and an override.

A converter is listed in a model's config: ``model_registry("8B", converters=[Fp8CoreConverter.
Config(recipe="mxfp8")])``. The override needs no change of code: ``--override.imports
'fp8core.torchtitan.fp8core_linear={"recipe": "mxfp8"}'``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.module import Module

from fp8core.context.autocast import request
from fp8core.conversion.layers import delimit
from fp8core.conversion.survey import check_patterns, is_match, is_named_head, is_named_router
from fp8core.errors import OperandError, RecipeError
from fp8core.modules.layers.linear import Linear
from fp8core.modules.layers.parallel import ALONE
from fp8core.recipe.base import plan_of
from fp8core.recipe.data import from_data
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.reporting import logger, some

# The linear layers of a block; not the head, and not the routers of experts.
_BLOCKS = [
    f"layers.*.{part}.*" for part in ("attention", "feed_forward", "shared_experts", "attn", "mlp")
]


class Fp8CoreLinear(Linear, Module):
    """:class:`fp8core.Linear` as a module of torchtitan, in the recipe of its config.

    The parameters have the names of torchtitan's linear, so that checkpoints fit. Under delayed
    scaling each call is a step, unless it is inside of :func:`fp8core.autocast`.

    With tensor parallelism each rank quantizes its own part of the weight and of the input, and
    torchtitan moves the activations, in high precision.
    """

    # How the weight's gradient lies on the mesh of the DTensor in the forward that runs.
    _gradient_layout: tuple[Placement, ...] | None = None
    _plan: LinearPlan | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """Config of a linear layer, with a recipe by its name or as data, and the layer's name."""

        recipe: Any = "mxfp8"
        name: str = ""

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.in_features,
            config.out_features,
            bias=config.bias,
            device=torch.get_default_device(),
            name=config.name or None,
        )
        recipe = from_data(config.recipe, "Fp8CoreLinear.Config(recipe=...)")
        if recipe is None:
            return
        self.outside_autocast = request(quantize=recipe)
        role = LayerRole(self.kind, self.name)
        self._plan = plan_of(LinearPlan, recipe, role, self.dtype_of("weight"))
        self._prepare()

    def _prepare(self) -> None:
        """Under delayed scaling create the scales, as a distributed checkpoint loads what the model
        has, and make each call a step."""
        if self._plan is not None and self._plan.delayed is not None:
            self.prepare_delayed_state(self._plan)
            delimit(self)

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the parameters as torchtitan does, and compute with this rank's part of them."""
        self.forget_delayed_state()  # of which torchtitan would ask for a layout
        super().parallelize(parallel_dims)
        weight: Any = self.weight
        rows, columns = (weight.to_local() if isinstance(weight, DTensor) else weight).shape
        if columns != self.in_features:
            if self.use_bias:
                raise OperandError(
                    f"{self.label}: a weight whose columns are sharded has a bias, which each rank "
                    f"would add. Leave the layer out by filter_fqns."
                )
            self.set_share("row", ALONE, columns)
        if rows != self.out_features:
            self.set_share("column", ALONE, rows, [(prefix, rows) for prefix, _ in self.parts])
        if isinstance(weight, DTensor):
            self.local_part = self._part
        self._prepare()

    def forward(  # type: ignore[override]  # one position, as torchtitan places arguments by name
        self, input: torch.Tensor, **options: Any
    ) -> Any:
        """Compute as :meth:`fp8core.Linear.forward`; a DTensor from a DTensor.

        Raises:
            OperandError: layouts of input and weight of which no rank can compute a part.
        """
        if not isinstance(input, DTensor):
            return super().forward(input, **options)
        output, of_input, self._gradient_layout = self._layouts(input)
        local = input.to_local(grad_placements=of_input)
        result: Any = super().forward(local, **options)
        return DTensor.from_local(result, input.device_mesh, output, run_check=False)

    def _part(self, name: str, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """Return the local tensor of a parameter, through which gradients flow back."""
        if not isinstance(parameter, DTensor):
            return parameter
        return parameter.to_local(grad_placements=self._gradient_layout)

    def _layouts(self, input: DTensor) -> tuple[tuple[Placement, ...], ...]:
        """Return how the output, and the gradients of ``input`` and of the weight, lie."""
        weight: Any = self.weight
        last = input.dim() - 1
        is_on_same_mesh = isinstance(weight, DTensor) and weight.device_mesh == input.device_mesh
        layouts: list[tuple[Placement, ...]] = []
        for x, w in zip(
            input.placements, weight.placements if is_on_same_mesh else (), strict=is_on_same_mesh
        ):
            if isinstance(x, Replicate) and w == Shard(0):
                layouts.append((Shard(last), Partial(), w))
            elif x in (Shard(last), Shard(-1)) and w == Shard(1):
                layouts.append((Partial(), x, w))
            elif isinstance(x, Shard) and x.dim < last and isinstance(w, Replicate):
                layouts.append((x, x, Partial()))
            elif isinstance(x, Replicate) and isinstance(w, Replicate):
                layouts.append((x, x, w))
        if len(layouts) != input.device_mesh.ndim:
            is_spread = isinstance(weight, DTensor)
            lies = f"{weight.placements} of {weight.device_mesh}" if is_spread else "whole"
            raise OperandError(
                f"{self.label}: the input lies as {input.placements} of {input.device_mesh}, the "
                f"weight {lies}. A rank takes a whole input with rows of the weight, columns of "
                f"both, or rows of the input with a whole weight."
            )
        output, of_input, of_weight = zip(*layouts, strict=True)
        return output, of_input, of_weight


class Fp8CoreConverter(QuantizationConverter):
    """Has the linear layers of a model's config compute in a recipe of fp8core."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The recipe, by its name or as data, and the layers to convert.

        ``fqns`` and ``filter_fqns`` are patterns as those of :func:`fp8core.convert`: the layers to
        convert, all but the head and the routers if there are none, and the layers to leave out.
        """

        recipe: Any = "mxfp8"
        fqns: list[str] = field(default_factory=list)
        filter_fqns: list[str] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.recipe = from_data(config.recipe, "Fp8CoreConverter.Config(recipe=...)")
        if self.recipe is None:
            raise RecipeError("Fp8CoreConverter.Config(recipe=None): expected a recipe.")

    def convert(self, model_config: Any) -> Any:
        """Replace the configs of linear layers in ``model_config``, and return it.

        Raises:
            RecipeError: a pattern matches no linear layer.
            UnsupportedError: a pattern of ``fqns`` names derived layers alone.
        """
        nodes = list(model_config.traverse(TitanLinear.Config))
        derived = {
            fqn: f"a config of {type(config).__qualname__}, whose behaviour would be lost"
            for fqn, config, _, _ in nodes
            if type(config) is not TitanLinear.Config
        }
        possible = [fqn for fqn, *_ in nodes if fqn not in derived]
        check_patterns(self.config.fqns or None, self.config.filter_fqns, possible, derived)
        left = dict(derived)
        for fqn, config, parent, attribute in nodes:
            if fqn in left or (reason := self._reason(fqn)):
                left.setdefault(fqn, reason)
                continue
            ours = derive(config, Fp8CoreLinear.Config, recipe=self.config.recipe, name=fqn)
            if parent is None:
                model_config = ours
            elif isinstance(parent, list):
                parent[attribute] = ours
            else:
                setattr(parent, attribute, ours)
        logger.info(
            "Fp8CoreConverter: %d of %d linear layers compute as %r; left: %s",
            len(nodes) - len(left),
            len(nodes),
            self.recipe,
            some([f"{fqn} ({reason})" for fqn, reason in left.items()]) or "none",
        )
        return model_config

    def _reason(self, fqn: str) -> str:
        """Return why the layer is left as it is, or an empty string."""
        if any(is_match(fqn, pattern) for pattern in self.config.filter_fqns):
            return "named in filter_fqns"
        if self.config.fqns:
            is_in = any(is_match(fqn, pattern) for pattern in self.config.fqns)
            return "" if is_in else "not named in fqns"
        if is_named_head(fqn):
            return "output head"
        return "router of experts" if is_named_router(fqn) else ""


@override(  # type: ignore[untyped-decorator]  # torchtitan is not read by the check
    target=TitanLinear.Config,
    fqns=_BLOCKS,
    exact=True,
    description="linear layers of blocks compute in a recipe of fp8core",
)
def fp8core_linear(config: Any, recipe: Any = "mxfp8") -> Any:
    """Return the config of a layer of fp8core in the place of ``config``."""
    return derive(config, Fp8CoreLinear.Config, recipe=recipe)
