"""``gather_quantized``: FSDP2 gathers the weights of a model in low precision."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.context.recompute import is_in_backward
from fp8core.distributed.gathered_weight import GatheredWeight, WeakModule, communicator_of
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from fp8core.modules.models.inventory import WeightSite, uses_of_parameters, weight_sites
from fp8core.modules.models.prepare import prepare
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.reporting import log_once, some
from fp8core.tensors.quantized_tensor import QuantizedTensor, initial_value
from fp8core.tensors.sharded_weight import ShardedWeight, local_part
from fp8core.tensors.storage import check_parameter, storage_plan
from fp8core.torch_ops.private import forward_root, fsdp_state, reshards_to_fewer_ranks


def wrap_assigned(
    module: torch.nn.Module, weights: Mapping[tuple[torch.nn.Module, str], GatheredWeight]
) -> None:
    """Have ``module`` wrap the values that a load assigns to its ``weights``, by module and name,
    and to those of modules below: all values, or none if a value does not fit."""

    def hook(
        module: torch.nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *rest: object,
    ) -> None:
        if not local_metadata.get("assign_to_params_buffers", False):
            return
        wrapped = {}
        for path, inner in module.named_modules():
            for name in inner._parameters:
                weight, key = weights.get((inner, name)), prefix + f"{path}.{name}".lstrip(".")
                if weight is not None and isinstance(state_dict.get(key), torch.Tensor):
                    wrapped[key] = _wrapped(key, state_dict[key], weight)
        state_dict.update(wrapped)  # torch's copy of the user's

    module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]  # torch's


def _wrapped(key: str, value: torch.Tensor, weight: GatheredWeight) -> torch.Tensor:
    """Return ``value`` as a shard with the gather of ``weight``.

    Raises:
        OperandError: it is no shard of the size, dtype and mesh of the weight's.
    """
    parameter: Any = weight.parameter
    local, expected = local_part(value.detach()), local_part(parameter.detach())
    if isinstance(value, DTensor) != isinstance(parameter, DTensor):
        problem = f"a {type(value).__name__}; the parameter is a {type(parameter).__name__}"
    elif local.dtype != expected.dtype or local.shape != expected.shape:
        problem = (
            f"a shard {local.dtype} {list(local.shape)}; the parameter's is {expected.dtype} "
            f"{list(expected.shape)}"
        )
    elif isinstance(value, DTensor) and (
        value.device_mesh != parameter.device_mesh or value.placements != parameter.placements
    ):
        problem = f"on {value.device_mesh} as {value.placements}; the parameter lies on "
        problem += f"{parameter.device_mesh} as {parameter.placements}"
    else:
        plain = local.value if isinstance(local, ShardedWeight) else local
        return torch.nn.Parameter(weight.placed(plain, value), parameter.requires_grad)
    raise OperandError(
        f"load_state_dict(assign=True): {key} is {problem}. Only a tensor with the size, dtype and "
        f"placement of the parameter can take the place of a weight that gather_quantized has "
        f"prepared. Leave out assign=True, which copies and converts; for whole tensors take "
        f"torch.distributed.checkpoint.state_dict.set_model_state_dict."
    )


def gather_quantized(model: torch.nn.Module, recipe: Recipe | str | None = None) -> torch.nn.Module:
    """Have ``torch.distributed.fsdp.fully_shard`` gather GEMM weights quantized; return ``model``.

    ::

        fp8core.distributed.gather_quantized(model, recipe)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

    Call it before ``fully_shard``, and after ``fp8core.convert`` or ``parallelize_module``. Each
    rank keeps its rows of a weight in high precision, for the optimizer, clipping and checkpoints.
    A gather moves codes and scales, about half the bytes of bfloat16, and what layers compute with
    is what they would compute with unsharded, bit for bit; it is freed after forward and after
    backward. Amaxes that span ranks are reduced for all weights of the model in one collective,
    by the first gather after a step.

    With delayed scaling the scale of a weight follows from its current amax, as for
    :class:`fp8core.quantized_model_init`. Calls outside ``autocast`` compute with the dequantized
    weight. Formats with blocks along k alone, as mxfp8 and rowwise, are gathered in both
    orientations, which takes the bytes of bfloat16.

    A weight of ``quantized_model_init`` becomes a weight in high precision, with its initial value
    if that was preserved, else, as under ``fully_shard`` alone, with the dequantized value.

    The model is prepared for the recipe as by :func:`fp8core.prepare`: layers get their names, and
    the buffers of delayed scales, so that a distributed checkpoint finds them in a fresh model.

    Weights stay unchanged, and are gathered in high precision, where the recipe leaves them in high
    precision, where a layer computes them from other parameters, as ``parameters_split`` does, and
    where other modules use them too.

    Args:
        model: a model with layers of fp8core.
        recipe: the recipe of training, or its name; None takes :func:`fp8core.get_default_recipe`.

    Raises:
        RecipeError: an unknown recipe.
        OperandError: the model is sharded or wrapped already, or none of its weights would be
            gathered quantized.
        UnsupportedError: weights in a 4-bit format, or one that ``quantized_model_init`` would
            refuse. At the first gather: ``reshard_after_forward`` as a number, or a shard along
            dimension 1.
    """
    chosen = recipe_from(recipe, "gather_quantized(recipe=...)") or get_default_recipe()
    _refuse_sharded(model)
    prepare(model, chosen)
    group, sites = _Weights(model), list(weight_sites(model))
    plans = [_plan_of(site, chosen) for site in sites]
    uses = uses_of_parameters(model)
    uses.subtract(site.parameter for site in sites)
    by_site: dict[tuple[torch.nn.Module, str], GatheredWeight] = {}
    gathered: dict[torch.nn.Parameter, tuple[GatheredWeight, torch.nn.Parameter]] = {}
    skipped: list[str] = []
    for site, plan in zip(sites, plans, strict=True):
        parameter = site.parameter
        if plan is None or uses[parameter]:
            skipped.append(site.label)
            continue
        if parameter not in gathered:
            gathered[parameter] = group.add(site, plan)
        by_site[site.module, site.name], site.module._parameters[site.name] = gathered[parameter]
    if not gathered:
        raise OperandError(
            f"gather_quantized: no weight of {type(model).__name__} would be gathered quantized "
            f"under {chosen}. It takes layers of fp8core; fp8core.convert(model) makes them."
        )
    for module in dict.fromkeys((model, *[module for module, _ in by_site])):
        wrap_assigned(module, by_site)
    if skipped:
        log_once(f"gather_quantized: gathered in high precision are {some(skipped)}")
    return model


_RECIPE_REMEDY = (
    "Choose sizes that each rank's part keeps to, or give this layer another recipe by "
    "recipe.PerLayer."
)


def _plan_of(site: WeightSite, recipe: Recipe) -> TensorPlan | None:
    """Return the plan of the gathered weight; None: in high precision."""
    module, parameter = site.module, site.parameter
    role = LayerRole(module.kind, module.name)
    try:
        plan = plan_of(LinearPlan, recipe, role, parameter.dtype)
        maker = dict(plan.makers).get("weight")
        if maker is not None:
            raise UnsupportedError(
                f"a quantized gather of a weight that {type(maker).__name__}, an object of the "
                f"user's, quantizes is not offered. Leave out gather_quantized."
            )
        stored = storage_plan(plan.weight)
        if stored.rowwise is None:
            return None
        for shape in (tuple(parameter.shape), _largest_part(parameter)):
            check_parameter(stored, shape, _RECIPE_REMEDY)
        for spec in filter(None, stored):
            if codes_per_byte(spec) != 1:
                raise UnsupportedError(
                    f"a quantized gather of weights in the 4-bit format {spec.format} is not "
                    f"offered. Leave out gather_quantized: the weights are gathered in "
                    f"{parameter.dtype}."
                )
    except Fp8CoreError as error:
        raise type(error)(f"{site.label}: {error}") from None
    return stored


def _largest_part(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the size of the largest part of a DTensor, that of another tensor.

    All ranks know it. Parts of all ranks are multiples of a block if it and the whole are.
    """
    sizes = list(tensor.shape)
    if isinstance(tensor, DTensor):
        for at, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                sizes[placement.dim] = -(-sizes[placement.dim] // tensor.device_mesh.size(at))
    return tuple(sizes)


def _refuse_sharded(model: torch.nn.Module) -> None:
    wrappers = (
        FSDPModule,
        FullyShardedDataParallel,
        torch.nn.parallel.DistributedDataParallel,
    )
    for path, module in model.named_modules():
        if isinstance(module, wrappers):
            raise OperandError(
                f"gather_quantized: {path or 'the model'} is a {type(module).__name__}, whose "
                f"parameters are taken already. Call gather_quantized(model, recipe) before "
                f"fully_shard; other wrappers gather in high precision."
            )


def _described(weights: Iterable[GatheredWeight]) -> str:
    """Return the weights in words, those of one plan together."""
    by_plan: dict[TensorPlan, list[str]] = {}
    for weight in weights:
        by_plan.setdefault(weight.plan, []).append(f"{weight.label} {list(weight.size)}")
    parts = []
    for plan, labels in by_plan.items():
        ways = dict.fromkeys(str(spec) for spec in plan if spec is not None)
        rest = hashlib.sha256(repr(plan).encode()).hexdigest()[:8]
        parts.append(f"{' and '.join(ways)} (plan {rest}): {', '.join(labels)}")
    return "; ".join(parts)


class _Reduced:
    """The amaxes of weights that are gathered below one root of FSDP2, reduced together.

    ``sharded`` is a module of that root; None: ``fully_shard`` took a module around the model.
    """

    def __init__(self, weights: list[GatheredWeight], sharded: torch.nn.Module | None) -> None:
        self.weights = weights
        self._state = None if sharded is None else weakref.ref(fsdp_state(sharded))
        self._is_due = True
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def is_due(self) -> bool:
        """Say whether the gather that asks reduces them: the first one in each forward of the root,
        and each one outside of forward and backward.

        All ranks come to the same answer. A rank knows the writes since the last reduction of its
        own shards alone, so they cannot decide about a collective.
        """
        if is_in_backward():
            return self.weights[0].amaxes is None
        state = None if self._state is None else self._state()
        root = None if state is None else forward_root(state)
        if root is None:
            return True
        if root not in self._roots:
            self._roots.add(root)
            root.register_forward_pre_hook(self._begin_forward, prepend=True)
            self._is_due = True
        is_due, self._is_due = self._is_due, False
        return is_due

    def _begin_forward(self, module: torch.nn.Module, arguments: object) -> None:
        self._is_due = True


class _Weights:
    """The weights of one model, whose amaxes are reduced together."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = WeakModule(model)
        self._weights: list[GatheredWeight] = []
        self._reduced: dict[GatheredWeight, _Reduced] = {}

    def add(self, site: WeightSite, plan: TensorPlan) -> tuple[GatheredWeight, torch.nn.Parameter]:
        """Return the gathered weight for ``site``, and the parameter that replaces the present
        one."""
        old = site.parameter
        local = local_part(old.detach())
        weight = GatheredWeight(site.module, site.name, site.label, plan, local.shape, self.reduced)
        self._weights.append(weight)
        value = initial_value(local, local.dtype) if isinstance(local, QuantizedTensor) else local
        new = torch.nn.Parameter(weight.placed(value, old), old.requires_grad)
        attributes = vars(new)
        attributes.update({n: v for n, v in vars(old).items() if n not in attributes})
        return weight, new

    def reduced(self, weight: GatheredWeight, mesh: Any) -> Sequence[torch.Tensor]:
        """Return the amaxes of ``weight`` for each of its casts, reduced over the ranks of
        ``mesh``.

        Raises:
            OperandError: the ranks have other weights, or store them in another way.
            UnsupportedError: the weights are resharded to fewer ranks after forward.
        """
        state = self._reduced.get(weight)
        if state is None:
            state = self._begin(weight, mesh)
        if state.is_due():
            _reduce(state.weights, mesh)
        assert weight.amaxes is not None
        return weight.amaxes

    def _begin(self, weight: GatheredWeight, mesh: Any) -> _Reduced:
        """Return the weights that are reduced with ``weight``, the same on all ranks of
        ``mesh``."""
        model = self._model()
        sharded = {} if model is None else _innermost(model)
        root = _root_of(weight, sharded)
        weights = [
            member
            for member in self._weights
            if member.shard() is not None
            and member.mesh == weight.mesh
            and _root_of(member, sharded) is root
        ]
        communicator_of(mesh).agree(_described(weights), "the weights that they gather quantized")
        state = _Reduced(weights, root)
        self._reduced.update(dict.fromkeys(weights, state))
        return state


def _innermost(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Module]:
    """Return the module of FSDP2 around each module of ``model`` that has one, the innermost."""
    inner: dict[torch.nn.Module, torch.nn.Module] = {}
    for path, module in model.named_modules():  # outer ones come first
        if not issubclass(type(module), FSDPModule):
            continue
        if reshards_to_fewer_ranks(module):
            raise UnsupportedError(
                f"fully_shard(reshard_after_forward=N) of {path or 'the model'} is not offered "
                f"for weights that are gathered quantized: torch would keep N-th parts of the "
                f"codes, and cannot gather them again. Pass True or False."
            )
        inner.update(dict.fromkeys(module.modules(), module))
    return inner


def _root_of(
    weight: GatheredWeight, sharded: Mapping[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module | None:
    """Return the root whose forward gathers ``weight`` now, else the module of FSDP2 around it;
    None where that is outside of the model."""
    module = weight.module()
    inner = None if module is None else sharded.get(module)
    if inner is None:
        return None
    return forward_root(fsdp_state(inner)) or inner


def _reduce(weights: list[GatheredWeight], mesh: Any) -> None:
    casts, amaxes = zip(*[weight.local_amaxes(mesh) for weight in weights], strict=True)
    local = torch.cat([each.to(mesh.device_type) for each in amaxes])
    reduced = communicator_of(mesh).max(local, "weight amaxes").wait()
    parts = iter(torch.split(reduced, [cast.num_amaxes for each in casts for cast in each]))
    for weight, each in zip(weights, casts, strict=True):
        weight.amaxes = [*islice(parts, len(each))]
