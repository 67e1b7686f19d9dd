"""The notes of a conversion report: layers that compute otherwise than its reader may expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from fp8core.conversion.experts import layer_names
from fp8core.conversion.survey import Survey
from fp8core.modules.inventory import ModuleNode, flops_of, module_nodes
from fp8core.modules.refusals import experts_of
from fp8core.recipe import PerLayer, Recipe
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.reporting import some

_WITHOUT_GEMM = (
    torch.nn.Embedding,
    torch.nn.EmbeddingBag,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.jit.ScriptModule,
)


def notes(
    model: torch.nn.Module,
    surveyed: Survey,
    recipe: Recipe | None,
    plans: Mapping[ModuleNode, Sequence[LinearPlan]],
) -> Iterator[str]:
    """Yield the notes on converting the ``surveyed`` layers of ``model`` to ``recipe``."""
    yield from _on_recipe(surveyed, recipe, plans)
    small = [node.path for node, (plan, *_) in plans.items() if _is_small(node.module, plan)]
    if small:
        yield (
            f"too small to gain from low precision, quantizing costs more than the GEMM saves: "
            f"{some(small)}; leave them out with skip"
        )
    shared = _shared([node for node in surveyed.chosen if flops_of(node.module)], model)
    if shared:
        yield f"the weight is another layer's too, and each quantizes it by itself: {some(shared)}"
    if any(isinstance(layer, torch.nn.TransformerEncoderLayer) for layer in model.modules()):
        yield (
            "in evaluation torch.nn.TransformerEncoderLayer reads the weights and does not call "
            "its layers; torch.backends.mha.set_fastpath_enabled(False) makes it call them"
        )
    uncounted = [r.node.path for r in surveyed.refused if _has_uncounted_gemm(r.node.module)]
    if uncounted:
        yield f"the shares of FLOPs do not count the weights of {some(uncounted)}"


def _on_recipe(
    surveyed: Survey, recipe: Recipe | None, plans: Mapping[ModuleNode, Sequence[LinearPlan]]
) -> Iterator[str]:
    high = [node.path for node, linears in plans.items() if not all(map(is_forward_low, linears))]
    if high:
        yield f"by the recipe these compute in high precision: {some(high)}"
    if isinstance(recipe, PerLayer):
        layer_roles = [
            role for node in (*surveyed.chosen, *surveyed.native) for role in roles(node)
        ]
        for pattern in recipe.unmatched(layer_roles):
            yield f"the recipe's rule {pattern!r} matches no converted layer"
    if any(
        plan.delayed is not None and plan.delayed.amax_algorithm == "most_recent"
        for several in plans.values()
        for plan in several
    ):
        yield (
            "amax_compute_algo='most_recent' follows the last forward: put the microbatches of a "
            "step into one autocast, which takes the largest amax of them all"
        )


def roles(node: ModuleNode) -> list[LayerRole]:
    """Return the roles by which a recipe plans the layer: one, but two for experts."""
    experts = experts_of(node.module)
    if experts is not None:
        return [LayerRole("grouped_linear", name) for name in layer_names(experts, node.path)]
    return [LayerRole(getattr(node.module, "kind", "linear"), node.path or None)]


def is_forward_low(plan: LinearPlan) -> bool:
    """Return whether ``plan`` has an operand of the forward GEMM in low precision."""
    return plan.fprop.a is not None or plan.fprop.b is not None


def _is_small(module: torch.nn.Module, plan: LinearPlan) -> bool:
    """Whether torchao would leave the layer in high precision, for the scalings it has measured.

    Source: torchao 0.18, float8, _auto_filter_for_recipe.
    """
    spec = plan.fprop.a
    if spec is None or not isinstance(module, torch.nn.Linear):
        return False
    k, n = module.in_features, module.out_features
    if spec.block == (1, 0):
        return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return spec.block == (0, 0) and k <= 4096 and n <= 1024


def _shared(chosen: Sequence[ModuleNode], model: torch.nn.Module) -> list[str]:
    holders: dict[torch.nn.Parameter, set[torch.nn.Module]] = {}
    for node in module_nodes(model):
        for parameter in node.module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(node.module)
    return [
        node.path
        for node in chosen
        if any(len(holders[weight]) > 1 for weight in node.module.parameters(recurse=False))
    ]


def _has_uncounted_gemm(module: torch.nn.Module) -> bool:
    """Whether the module may multiply by direct parameters, though it is no known linear layer."""
    if flops_of(module) or isinstance(module, _WITHOUT_GEMM):
        return False
    return any(
        not is_lazy(parameter) and parameter.dim() > 1
        for parameter in module.parameters(recurse=False)
    )
