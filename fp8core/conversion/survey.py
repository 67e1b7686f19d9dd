"""Which layers of a model can be converted, which are chosen, and the reasons for the others."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from fp8core.conversion.layers import RECORD, Source, looks_like_rms_norm, similar_norm
from fp8core.errors import OperandError, RecipeError, UnsupportedError, did_you_mean
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.models.inventory import (
    ModuleNode,
    conv1d_sizes,
    experts_of,
    flops_of,
    module_nodes,
)
from fp8core.reporting import grouped, some

Filter: TypeAlias = "Callable[[torch.nn.Module, str], bool] | Sequence[str] | str | None"
"""``(module, path) -> bool``, or patterns of paths; see :func:`fp8core.convert`."""

_SOURCES: tuple[type[Source], ...] = (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm)
_SHOWN = 8
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Last words of a path that name an output head, unless the path has a number: in a numbered block,
# "output" and the like are parts of the block.
_HEADS = {"classifier", "embed_out", "head", "lm_head", "logits", "output", "output_layer"}
_HEADS |= {"output_projection", "score", "unembed", "unembedding", "vocab_proj"}
# Words that name a router anywhere in a path, and endings that do so beside a list of experts.
_ROUTERS, _GATES = {"gating", "router"}, ("gate", "wg")
# PEFT's names: of the layer inside an adapter, of low-rank factors, of the dictionary of these.
_ADAPTED = "base_layer"
_ADAPTER = re.compile(r"(.*_)?lora(_([ab]|down|up|(linear_)?layer))?", re.IGNORECASE)


class Refused(NamedTuple):
    """A layer that is not converted, and the reason; ``is_repeat`` if the same layer has an earlier
    path."""

    node: ModuleNode
    reason: str
    is_repeat: bool = False


class Survey(NamedTuple):
    """The layers of a model in three groups, each in order: torch layers to convert, fp8core's
    layers, and the others."""

    chosen: list[ModuleNode]
    native: list[ModuleNode]
    refused: list[Refused]


def survey(
    model: torch.nn.Module, filter: Filter, skip: Sequence[str], *, rms_norms: bool = False
) -> Survey:
    """Decide for every layer of ``model`` whether it is converted; changes nothing.

    ``rms_norms``: whether classes that compute an RMSNorm are converted like RMSNorm.

    Raises:
        OperandError: a layer is converted already, or no linear layer is left to convert and the
            filter names no norm either.
        RecipeError: a pattern that matches no layer.
        UnsupportedError: a pattern that names a layer which cannot be converted.
    """
    nodes = [node for node in module_nodes(model) if _is_listed(node.module)]
    _refuse_converted(model, nodes)
    obstacles = _obstacles(nodes, rms_norms)
    possible = [node.path for node in nodes if node not in obstacles]
    check_patterns(
        filter, skip, possible, {n.path: obstacle.reason for n, obstacle in obstacles.items()}
    )
    reason_of = unwanted(model, filter, skip)
    result = Survey([], [], [])
    for node in nodes:
        if node in obstacles:
            result.refused.append(obstacles[node])
        elif isinstance(node.module, LowPrecisionModule):
            result.native.append(node)
        elif reason := reason_of(node):
            result.refused.append(Refused(node, reason))
        else:
            result.chosen.append(node)
    is_filtered = filter is not None and bool(result.chosen)
    accepted = (*result.chosen, *result.native)
    if not is_filtered and not any(flops_of(node.module) for node in accepted):
        raise OperandError(_nothing(model, filter, result.refused))
    return result


def _obstacles(nodes: Sequence[ModuleNode], rms_norms: bool) -> dict[ModuleNode, Refused]:
    """Return the nodes whose layer cannot be converted, or has an earlier path."""
    firsts: dict[torch.nn.Module, ModuleNode] = {}
    refused = {}
    for node in nodes:
        first = firsts.setdefault(node.module, node)
        if first is not node:
            refused[node] = Refused(node, f"the same layer as {first.path!r}", is_repeat=True)
        elif reason := _obstacle(node.module, rms_norms):
            refused[node] = Refused(node, reason)
    return refused


def is_match(path: str, pattern: str) -> bool:
    """Whether ``pattern`` matches ``path``.

    With ``*``, ``?`` or ``[`` it is matched with the whole path as in a shell; without, it matches
    a run of whole words: ``"mlp"`` matches ``"blocks.3.mlp.fc1"``, ``"blocks.1"`` does not match
    ``"blocks.11"``.
    """
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(path, pattern)
    return f".{pattern}." in f".{path}."


def _is_listed(module: torch.nn.Module) -> bool:
    """Whether the report lists the module: a layer with a GEMM, or any with direct parameters."""
    if isinstance(module, (LowPrecisionModule, torch.jit.ScriptModule, *_SOURCES)):
        return True
    return any(True for _ in module.parameters(recurse=False))


def _refuse_converted(model: torch.nn.Module, nodes: Sequence[ModuleNode]) -> None:
    done = [node.path for node in nodes if RECORD in vars(node.module)]
    if done:
        raise OperandError(
            f"convert({type(model).__name__}): converted already: {some(done)}. "
            f"Call fp8core.unconvert on the converted model first."
        )
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "convert: FullyShardedDataParallel has taken the parameters apart; convert the "
                "model first, then wrap it."
            )


def _obstacle(module: torch.nn.Module, rms_norms: bool) -> str:
    """Return why ``module`` cannot be converted, or an empty string."""
    if isinstance(module, LowPrecisionModule):
        return ""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript, which torch compiled already"
    source = type(module)
    experts = experts_of(module)
    weights = ["weight"] if experts is None else [expert.weight for expert in experts.weights]
    is_foreign = experts is not None or conv1d_sizes(module) is not None
    if source not in _SOURCES and not is_foreign:
        reason = _class_obstacle(module)
        if not reason.startswith("class is") or not looks_like_rms_norm(module):
            return reason
        if not rms_norms:
            return f"{reason}; convert(rms_norms=True) compares it with RMSNorm and converts it"
        if similar_norm(module) is None:
            return f"{reason}, and it computes otherwise"
    if "forward" in vars(module):
        return "its forward was replaced on the object; convert before it is replaced"
    for name in (*weights, *(["bias"] if source in (torch.nn.Linear, torch.nn.LayerNorm) else [])):
        if name not in module._parameters:
            return f"its {name} is computed by a hook, as by weight_norm"
    return next(filter(None, (_weight_obstacle(module, name) for name in weights)), "")


def _weight_obstacle(module: torch.nn.Module, name: str) -> str:
    weight = module._parameters[name]
    if weight is None:
        return "it has no weight (elementwise_affine=False)"
    if weight.dtype not in _DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        return f"its weight is {weight.dtype}; low precision computes from {dtypes}"
    if weight.numel() == 0:
        return f"its weight is empty, {list(weight.shape)}"
    if not isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return ""
    if len(module.normalized_shape) != 1:
        return f"it normalizes {len(module.normalized_shape)} dimensions, not the last alone"
    if isinstance(module, torch.nn.LayerNorm) and module._parameters.get("bias") is None:
        return "a LayerNorm without a bias"
    if module.eps is None:
        return "its eps is None, which depends on the input's dtype"
    return ""


def _class_obstacle(module: torch.nn.Module) -> str:
    """Return why a module of another class than torch's three cannot be converted."""
    name = type(module).__name__
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "its sizes are not known before its first batch"
    for source in _SOURCES:
        if not isinstance(module, source):
            continue
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            return "sharded by itself; convert before fully_shard"
        if parametrize.is_parametrized(module):
            return "parametrized; remove_parametrizations first, or parametrize after convert"
        if name == "NonDynamicallyQuantizableLinear":
            return "torch.nn.MultiheadAttention reads its weight and never calls it"
        return f"a subclass of torch.nn.{source.__name__}, whose behaviour would be lost"
    for source in (torch.nn.RMSNorm, torch.nn.LayerNorm, torch.nn.Linear):
        if source.__name__.lower() in name.lower():
            return f"class is not torch.nn.{source.__name__}"
    return "class is neither torch.nn.Linear, LayerNorm nor RMSNorm"


def _patterns(filter: Filter) -> Sequence[str] | None:
    if isinstance(filter, str):
        return [filter]
    return None if filter is None or callable(filter) else list(filter)


def skip_patterns(filter: Filter, skip: Sequence[str] | str) -> Sequence[str]:
    """Return ``skip`` as patterns.

    Raises:
        RecipeError: ``filter`` or ``skip`` is of no kind that names layers.
    """
    if filter is not None and not callable(filter) and not isinstance(filter, str | Sequence):
        raise RecipeError(f"convert(filter={filter!r}): expected a function or patterns of names.")
    if not isinstance(skip, str | Sequence):
        raise RecipeError(f"convert(skip={skip!r}): expected patterns of names.")
    return [skip] if isinstance(skip, str) else skip


def check_patterns(
    filter: Filter, skip: Sequence[str], possible: Sequence[str], obstacles: dict[str, str]
) -> None:
    """Check that every pattern of ``filter`` and ``skip`` matches one of the paths ``possible``.

    ``obstacles`` are the paths of layers that cannot be chosen, and why.

    Raises:
        RecipeError: a pattern matches nothing; names the nearest word.
        UnsupportedError: a pattern of ``filter`` matches such layers alone.
    """
    paths = [*possible, *obstacles]
    for argument, patterns in (("filter", _patterns(filter) or ()), ("skip", skip)):
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise RecipeError(f"convert({argument}=...): {pattern!r} is no pattern of names.")
            if not any(is_match(path, pattern) for path in paths):
                words = {word for path in paths for word in (path, *path.split("."))}
                raise RecipeError(
                    f"convert({argument}={pattern!r}): no layer has that in its path."
                    f"{did_you_mean(pattern, words)}"
                )
            matched = [path for path in possible if is_match(path, pattern)]
            if argument == "filter" and not matched:
                refused = next(path for path in obstacles if is_match(path, pattern))
                raise UnsupportedError(
                    f"convert(filter={pattern!r}): {refused!r} cannot be converted: "
                    f"{obstacles[refused]}."
                )


def unwanted(
    model: torch.nn.Module,
    filter: Filter,
    skip: Sequence[str],
    kinds: tuple[type[torch.nn.Module], ...] = (torch.nn.Linear,),
) -> Callable[[ModuleNode], str]:
    """Return a function that gives the reason to leave out a layer, or an empty string.

    ``kinds`` are the classes of layers that are output heads, routers or parts of adapters where
    their names say so, unless there is a ``filter``.
    """
    heads = _heads(model)
    embeddings: dict[object, str] = {
        node.module.weight: node.path
        for node in module_nodes(model)
        if isinstance(node.module, torch.nn.Embedding)
    }
    patterns = _patterns(filter)
    adapted = [node.path for node in module_nodes(model) if _ADAPTED in node.module._modules]

    def reason_of(node: ModuleNode) -> str:
        path, module, _ = node
        if any(is_match(path, pattern) for pattern in skip):
            return "named in skip"
        if callable(filter):
            return "" if filter(module, path) else "the filter leaves it out"
        if patterns is not None:
            is_in = any(is_match(path, pattern) for pattern in patterns)
            return "" if is_in else "the filter leaves it out"
        if not isinstance(module, kinds) and conv1d_sizes(module) is None:
            return ""
        if _is_of_adapter(path, adapted):
            return "low-rank factor of an adapter; convert it with a filter that names it"
        tied = embeddings.get(module._parameters.get("weight"))
        if tied is not None:
            return f"output head: its weight is that of the embedding {tied!r}"
        if module in heads or is_named_head(path):
            return "output head; convert it with a filter that names it"
        return "router of experts" if _is_router(node) else ""

    return reason_of


def _heads(model: torch.nn.Module) -> set[object]:
    """Return the output heads that ``get_output_embeddings()`` of the model, or of a model inside
    it, names."""
    getters = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    heads = {ask() for ask in getters if callable(ask)}
    return heads | {getattr(head, _ADAPTED, None) for head in heads}


def is_named_head(path: str) -> bool:
    """Whether the last word of ``path`` names an output head, outside of numbered blocks."""
    words = path.removesuffix(f".{_ADAPTED}").split(".")
    return words[-1] in _HEADS and not any(word.isdigit() for word in words)


def _is_of_adapter(path: str, adapted: Sequence[str]) -> bool:
    """Whether the layer at ``path`` belongs to an adapter: by its name, or as a sibling of the
    layer that the adapter wraps."""
    words = path.split(".")
    if words[-1] != _ADAPTED and any(map(_ADAPTER.fullmatch, words[-2:])):
        return True
    return any(
        path.startswith(f"{owner}." if owner else "")
        and path.removeprefix(owner).lstrip(".").split(".")[0] != _ADAPTED
        for owner in adapted
    )


def is_named_router(path: str) -> bool:
    """Whether a word of ``path`` names a router of experts."""
    return bool(_ROUTERS & set(path.split(".")))


def _is_router(node: ModuleNode) -> bool:
    has_experts = node.parent is not None and "experts" in node.parent._modules
    return is_named_router(node.path) or (has_experts and node.path.endswith(_GATES))


def _nothing(model: torch.nn.Module, filter: Filter, refused: Iterable[Refused]) -> str:
    # torch's layers first: these were left out by choice, and an argument may convert them.
    torch_first = sorted(refused, key=lambda refusal: type(refusal.node.module) not in _SOURCES)
    reasons = [
        f"  {line}"
        for line in grouped(
            (p.path, type(p.module).__name__, reason) for p, reason, _ in torch_first
        )
    ]
    argument = "" if filter is None else ", filter=..."
    if len(reasons) > _SHOWN:
        reasons[_SHOWN:] = [f"  and {len(reasons) - _SHOWN} more"]
    first = f"convert({type(model).__name__}{argument}): no torch.nn.Linear is left to convert."
    first += " Left out:" if reasons else ""
    return "\n".join([first, *reasons])
