"""Attention of a converted layer by one query a sequence, as when it generates: a backend's kernel
in the place of transformers' ``sdpa``.

The kernel reads keys and values where a cache has them, and the mask that transformers hands to the
layers: which cache it is, and how the mask came about, changes nothing. The mask is a tensor, so
that nothing is assumed of it and no length is read: padding, windows and a static cache's free
places are all in it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from fp8core.backend_api import AttentionDesc, SingleQueryDesc
from fp8core.chain.alone import needs_node, offered
from fp8core.dispatch.isolation import attempt

_SDPA = "transformers.integrations.sdpa_attention"
_WITHOUT_EFFECT = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "num_items_in_batch"),
        *("output_hidden_states", "return_dict", "sliding_window"),
    }
)
"""Keywords of a layer that ``sdpa`` is given, and does not read."""


class Operands(NamedTuple):
    """Arguments of ``sdpa``: queries ``[b, heads, s, head size]``, keys and values ``[b, groups,
    s_kv, head size]``, and True where a query sees a key, or what it adds to logits."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None


def attended(
    attention: Any, operands: Operands, scaling: float, keywords: Mapping[str, Any], sdpa: Any
) -> torch.Tensor | None:
    """Return the result ``[b, 1, heads, head size]`` of the module ``attention``, which would call
    ``sdpa`` with ``keywords`` as well, without dropout; None for a call that it has to compute so,
    or that no kernel does."""
    q, k, v, mask = operands
    if q.shape[2] != 1 or needs_node(q, k, v) or not _is_plain(attention, operands):
        return None
    if not is_plain_sdpa(sdpa, keywords):
        return None
    sharing = getattr(attention, "num_key_value_groups", 1)
    heads, head_dim = q.shape[1], q.shape[3]
    plain = (q.dtype, "bshd", heads, heads // sharing, head_dim, head_dim, scaling)
    masked = (*plain, (-1, -1), False, False, mask is not None)  # the rest of a descriptor so far
    run = offered(SingleQueryDesc, masked, (AttentionDesc, plain), q)
    if run is None:
        return None
    excluded = None if mask is None else mask.logical_not()
    out: torch.Tensor = run(*(x.transpose(1, 2) for x in (q, k, v)), mask=excluded)[0]
    return out


def is_plain_sdpa(sdpa: Any, keywords: Mapping[str, Any]) -> bool:
    """Return whether ``sdpa`` is transformers' own, which calls torch's, and ``keywords`` change
    nothing in it."""
    expected = getattr(sys.modules.get(_SDPA), "sdpa_attention_forward", None)
    if sdpa is None or sdpa is not expected:
        return False  # the user has registered another one
    if not isinstance(functional.scaled_dot_product_attention, BuiltinFunctionType):
        return False  # or replaced torch's, which it calls
    for name, value in keywords.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            return False
    return True


def _is_plain(attention: Any, operands: Operands) -> bool:
    """Whether the operands are tensors in memory, of one dtype, and a mask is one for all heads."""
    q, k, v, mask = operands
    for x in (q, k, v):
        if type(x) is not torch.Tensor or x.dtype != q.dtype or x.device != q.device:
            return False
    batch, heads, _, head_dim = q.shape
    groups = heads // getattr(attention, "num_key_value_groups", 1)
    if k.dim() != 4 or k.shape != v.shape or batch == 0 or k.shape[2] == 0:
        return False
    if k.shape[0] != batch or k.shape[1] != groups or k.shape[3] != head_dim:
        return False
    if mask is None:
        return True
    if type(mask) is not torch.Tensor or mask.dtype != torch.bool or mask.dim() != 4:
        return False
    of_heads = mask.shape[1] == 1 and mask.shape[2] == 1 and mask.shape[3] == k.shape[2]
    return of_heads and mask.shape[0] in (1, batch) and mask.device == q.device


# --- a token's keys and values in a static cache ---

_CACHES = "transformers.cache_utils"
_writes_plainly: dict[tuple[Any, Any], bool] = {}


def updated(
    cache: Any, k: torch.Tensor, v: torch.Tensor, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values that ``cache`` has with ``k`` and ``v [b, groups, s, head size]``
    of the layer ``index`` behind: by its ``update``, or, of a token in a static cache that writes
    what this writes, in three launches instead of five."""
    layer = None if k.shape[2] != 1 or torch.compiler.is_compiling() else _static(cache, index)
    if layer is None:
        return cache.update(k, v, index)  # type: ignore[no-any-return]  # transformers'
    return _write(layer, k, v)


def _write(layer: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    place = layer.cumulative_length.view(1)  # no sum with the numbers of new tokens
    layer.keys.index_copy_(2, place, k)
    layer.values.index_copy_(2, place, v)
    layer.cumulative_length.add_(1)
    return layer.keys, layer.values


def _static(cache: Any, index: int) -> Any:
    """Return the layer ``index`` of ``cache`` if its ``update`` is :func:`_write`, else None."""
    module: Any = sys.modules.get(_CACHES)
    kinds = getattr(module, "StaticCache", None), getattr(module, "StaticLayer", None)
    if (
        type(cache) is not kinds[0]
        or cache.offloading
        or cache.layer_class_to_replicate is not None
    ):
        return None
    layer = cache.layers[index]
    if type(layer) is not kinds[1] or not layer.is_initialized:
        return None
    if any("update" in vars(each) for each in (cache, layer)):
        return None
    updates: Any = tuple(kind.update for kind in kinds)  # type: ignore[union-attr]  # both are there
    if updates not in _writes_plainly:
        _writes_plainly[updates] = attempt(lambda: _is_write(module, *updates)) is True
    return layer if _writes_plainly[updates] else None


def _is_write(module: Any, of_cache: Any, of_layer: Any) -> bool:
    """Return whether both are the library's functions, and write as here: a few tokens on the CPU,
    to a cache of what ``update`` may read."""
    if any(each.__code__.co_filename != module.__file__ for each in (of_cache, of_layer)):
        return False
    options: Any = {"device": "cpu", "dtype": torch.float32}
    with torch.no_grad(), torch.device("cpu"):
        layers = [module.StaticLayer(4) for _ in range(2)]
        cache = module.StaticCache.__new__(module.StaticCache)
        empty = {"layer_class_to_replicate": None, "offloading": False}
        vars(cache).update(layers=layers[:1], **empty)
        for token in torch.arange(24, **options).view(3, 2, 1, 2, 1, 2):
            of_cache(cache, *token, 0)
            _write(layers[1], *token) if layers[1].is_initialized else layers[1].update(*token)
    states = [vars(layer) for layer in layers]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name])
        if isinstance(value, torch.Tensor)
        else value == states[1][name]
        for name, value in states[0].items()
    )


# --- attention of layers that run by their modules ---

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_NAME = "fp8core_sdpa"
"""Of what attends for them, in transformers' registry of attentions: another name than those that
other modules ask for."""


class SdpaConfig:
    """A config, by which transformers' ``sdpa`` is :func:`attend`; all else is the config's own,
    written to it as well."""

    def __init__(self, config: Any) -> None:
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # of an object that is being copied
            raise AttributeError(name)
        value = getattr(self._config, name)
        return _NAME if name == "_attn_implementation" and value == "sdpa" else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


def registry() -> Any:
    """Return transformers' registry of attentions, None where transformers is not loaded."""
    return getattr(sys.modules.get("transformers.modeling_utils"), _REGISTRY, None)


def asks_registry(module: torch.nn.Module) -> bool:
    """Return whether ``module`` attends by what transformers' registry has under the name in its
    config, which it reads for nothing else."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or "forward" in vars(module) or "config" not in vars(module):
        return False
    is_local = forward.__globals__.get(_REGISTRY) is not registry()  # in its file
    asks = {_REGISTRY, "_attn_implementation"} <= {*code.co_names}
    return asks and not is_local and "sdpa" not in code.co_consts


def offer_attention() -> None:
    """Have transformers' registry name :func:`attend`."""
    registry().register(_NAME, attend)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' ``sdpa``, or by one query a sequence by a kernel."""
    sdpa, operands = registry()["sdpa"], Operands(query, key, value, attention_mask)
    result = None
    if not keywords.get("dropout"):
        rest = {name: x for name, x in keywords.items() if name not in ("dropout", "scaling")}
        scaling = keywords.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        result = attended(module, operands, scaling, rest, sdpa)
    if result is None:
        return sdpa(module, *operands, **keywords)  # type: ignore[no-any-return]  # transformers'
    return result, None
