"""CUDA graphs of layers: forward and backward replayed with one launch each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from fp8core.context.autocast import autocast
from fp8core.context.capture import Hooks, Pass, Schedule, passes_of
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.modules.models.inventory import layers_in
from fp8core.modules.sequences.inference import restored_caches
from fp8core.recipe import Recipe
from fp8core.tensors.delayed_state import BUFFERS
from fp8core.tensors.weights import WeightStore
from fp8core.torch_ops.private import has_hooks

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def make_graphed_callables(
    modules: torch.nn.Module | Sequence[torch.nn.Module],
    sample_args: tuple[torch.Tensor, ...] | Sequence[tuple[torch.Tensor, ...]],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | str | None = None,
    amax_reduction_group: torch.distributed.ProcessGroup | None = None,
    cache_quantized_params: bool = False,
    _order: Sequence[int] | None = None,
    _num_layers_per_chunk: Sequence[int] | int | None = None,
    pool: tuple[int, int] | None = None,
    retain_graph_in_backward: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], object] | None = None,
    post_warmup_hook: Callable[[], object] | None = None,
    capture_time_hooks: Sequence[Hooks | None] | None = None,
) -> Any:
    """Return ``modules`` with forward and backward captured in CUDA graphs, under ``recipe``.

    The argument order is Transformer Engine's. Each module is captured inside an
    ``autocast(enabled, recipe=recipe)`` of its own, so the graph updates delayed scales and
    quantizes the weights as they are at every replay; calling it needs no autocast. Warming up and
    capturing leave delayed scales, amax histories, and KV caches whose steps are on the device, as
    they were. Sizes, strides, dtypes and
    ``requires_grad`` of later inputs have to be those of ``sample_args``.

    Args:
        modules: one module, or several that run one after the other; none may have hooks.
        sample_args: the positional tensors of one call, or a tuple of them for each module.
        num_warmup_iters: runs before the capture, in which algorithms are chosen.
        allow_unused_input: whether an input may have no gradient.
        sample_kwargs: tensors of one call by keyword, or a mapping of them for each sample.
        enabled: False captures high precision.
        calibrating: as in ``autocast``.
        recipe: a Recipe, or its name; None takes :func:`fp8core.get_default_recipe`.
        amax_reduction_group: as in ``autocast``.
        cache_quantized_params: graphs multiply by weights that are quantized outside of them. Each
            call then has ``is_first_microbatch=True``, which quantizes the weights as they are, or
            False; the modules' forward has to take it.
        _order: the order in which chunks of the modules run, ``c`` forward and ``-c`` backward, c
            from 1, as in a pipeline. There is a sample for each forward: those of the first chunk
            first, of each chunk by microbatch. Functions are returned, one for each sample.
        _num_layers_per_chunk: how many modules each chunk has, all the same if None.
        pool: memory to share with other graphs, of ``torch.cuda.graph_pool_handle()``.
        retain_graph_in_backward: keep what backward reads in memory of its own.
        clone_param_grads_on_return: copy the gradients of parameters, so that the next replay does
            not write to those that somebody keeps.
        pre_warmup_hook, post_warmup_hook: called once before and after warming up.
        capture_time_hooks: for each module, functions of it that run while it warms up and is
            captured, outside of the graph: a mapping of ``forward_pre_hooks``, ``forward_hooks``,
            ``backward_pre_hooks`` and ``backward_hooks`` to functions by any key.

    Raises:
        RecipeError: ``recipe`` is not a Recipe, or there are no modules.
        OperandError: samples, order or hooks do not fit the modules.
        UnsupportedError: there is no CUDA device, or a module is not on one.
    """
    is_module = isinstance(modules, torch.nn.Module)
    each: tuple[torch.nn.Module, ...] = (modules,) if is_module else tuple(modules)  # type: ignore[arg-type, assignment]  # as is_module says
    _check_modules(each)
    for layer in itertools.chain(*(layers_in(module).values() for module in each)):
        layer.count_nonfinite()  # nobody can ask a graph later
    context = autocast(
        enabled=enabled,
        calibrating=calibrating,
        recipe=recipe,
        amax_reduction_group=amax_reduction_group,
    )
    is_single = is_module and _order is None
    args: tuple[Any, ...] = (sample_args,) if is_single else tuple(sample_args)
    keywords = _keywords(sample_kwargs, len(args), is_single=is_single)
    hooks = _hooks(capture_time_hooks, len(each))
    steps = passes_of(_schedule(_order, len(each), len(args), _num_layers_per_chunk))
    owners = {sample: module for module, sample, _ in steps}
    passes = [
        Pass(each[owners[at]], args[at], keywords[at], hooks[owners[at]]) for at in range(len(args))
    ]
    caches, clones = cache_quantized_params, clone_param_grads_on_return
    stores = [_stores(module) if caches else [] for module in each]
    with (
        _restored_states(each),
        restored_caches(),
        _inside(context, each),
        _used_by_graphs([*itertools.chain(*stores)]),
    ):
        around = pre_warmup_hook, post_warmup_hook
        _warm_up(passes, num_warmup_iters, allow_unused_input, caches=caches, hooks=around)
        _capture(
            passes,
            steps,
            pool,
            caches=caches,
            allow_unused=allow_unused_input,
            retain=retain_graph_in_backward,
        )
        forwards = [
            _forward(sample_pass, stores[owners[at]], caches, clones)
            for at, sample_pass in enumerate(passes)
        ]
    if _order is not None:
        return tuple(forwards)
    for module, forward in zip(each, forwards, strict=True):
        module.forward = forward
    return each[0] if is_module else each


def _schedule(
    order: Sequence[int] | None, modules: int, samples: int, chunks: Sequence[int] | int | None
) -> Schedule:
    """Return the order of the passes; without ``order`` modules run one after the other."""
    if order is not None:
        return Schedule.of(order, modules, samples, chunks)
    if samples != modules:
        raise OperandError(f"make_graphed_callables: {samples} sample_args for {modules} modules.")
    return Schedule([*range(1, modules + 1), *range(-modules, 0)], [1] * modules)


def _check_modules(modules: Sequence[torch.nn.Module]) -> None:
    if not modules:
        raise RecipeError("make_graphed_callables: there are no modules.")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "make_graphed_callables captures CUDA graphs; no CUDA device is visible."
        )
    for module in modules:
        devices = {str(parameter.device) for parameter in module.parameters()}
        if any(not device.startswith("cuda") for device in devices):
            raise UnsupportedError(
                f"make_graphed_callables: {type(module).__name__} is on "
                f"{', '.join(sorted(devices))}; "
                f"move it to a CUDA device."
            )
        if has_hooks(module):
            raise OperandError(
                f"make_graphed_callables: {type(module).__name__} has hooks, which a replay would "
                f"not call. Register them afterwards, or give capture_time_hooks."
            )
        if any(layer.need_backward_dw() for layer in layers_in(module).values()):
            raise UnsupportedError(
                f"make_graphed_callables: {type(module).__name__} has a layer with "
                f"delay_wgrad_compute=True, whose weight gradients no graph computes. Leave it out."
            )
    if len({module.training for module in modules}) > 1:
        raise OperandError("make_graphed_callables: some modules train, and some evaluate.")
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise OperandError(
            "make_graphed_callables under torch.autocast needs torch.autocast(cache_enabled=False)."
        )


def _keywords(samples: Any, count: int, *, is_single: bool) -> list[Mapping[str, Any]]:
    """Return the keyword tensors of each sample."""
    if samples is None:
        return [{}] * count
    each = [samples] if is_single else list(samples)
    if len(each) != count or not all(isinstance(sample, Mapping) for sample in each):
        raise OperandError(
            f"make_graphed_callables: sample_kwargs for {len(each)} samples, of {count}; expected "
            f"a mapping for each."
        )
    return each


def _hooks(hooks: Sequence[Hooks | None] | None, count: int) -> list[Hooks]:
    """Return the capture-time hooks of each module."""
    each = [entry or {} for entry in hooks] if hooks is not None else [{}] * count
    unknown = {name for entry in each for name in entry} - set(_HOOKS)
    if len(each) != count or unknown:
        problem = f"keys {sorted(unknown)}" if unknown else f"{len(each)} entries"
        raise OperandError(
            f"make_graphed_callables(capture_time_hooks=...): {problem}; expected one entry for "
            f"each of {count} modules, with keys among {', '.join(_HOOKS)}."
        )
    return each


_FIRST, _LATER = {"is_first_microbatch": True}, {"is_first_microbatch": False}


def _warm_up(
    passes: Sequence[Pass],
    times: int,
    allow_unused: bool,
    *,
    caches: bool,
    hooks: tuple[Callable[[], object] | None, Callable[[], object] | None],
) -> None:
    """Run every pass on a stream of its own; with ``caches`` at least once, to keep the weights."""
    before, after = hooks
    if before is not None:
        before()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch's
        for sample_pass in passes:
            extra = [_FIRST, _LATER] if caches else [{}]
            sample_pass.warm_up(max(times, 2) if caches else times, allow_unused, extra)
    torch.cuda.synchronize()
    if after is not None:
        after()


def _capture(
    passes: Sequence[Pass],
    steps: Sequence[tuple[int, int, bool]],
    pool: Any,
    *,
    caches: bool,
    allow_unused: bool,
    retain: bool,
) -> None:
    shared = torch.cuda.graph_pool_handle() if pool is None else pool
    for _, sample, is_forward in steps:
        if is_forward:
            passes[sample].record_forward(shared, _LATER if caches else {})
        else:
            passes[sample].record_backward(shared, allow_unused=allow_unused, retain=retain)


def _forward(
    sample_pass: Pass, stores: Sequence[WeightStore], caches: bool, clones: bool
) -> Callable[..., Any]:
    """Return the forward that replays, and in the other mode, train or eval, runs the module's."""
    module = sample_pass.module
    was_training, plain = module.training, module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if module.training is not was_training:
            return plain(*args, **kwargs)
        if caches:
            first = kwargs.pop("is_first_microbatch", None)
            if not isinstance(first, bool):
                raise OperandError(
                    f"{type(module).__name__} in a graph with cache_quantized_params: "
                    f"is_first_microbatch={first!r}; expected True or False."
                )
            if first:
                for store in stores:
                    store.refresh()
        return sample_pass.run(args, kwargs, clones=clones)

    return forward


def _stores(module: torch.nn.Module) -> list[WeightStore]:
    return [layer._bindings.weights for layer in layers_in(module).values()]


@contextmanager
def _used_by_graphs(stores: Sequence[WeightStore]) -> Iterator[None]:
    """Have captured graphs read the kept weights of ``stores``, which are refreshed in place."""
    for store in stores:
        store.is_for_graphs = True
    try:
        yield
    except BaseException:
        for store in stores:
            store.is_for_graphs = False
        raise


@contextmanager
def _inside(context: autocast, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Have each module's forward enter ``context``, until the forwards are restored at the end."""
    before = [vars(module).get("forward") for module in modules]  # None: that of the class
    for module in modules:
        module.forward = _entering(context, module.forward)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _entering(context: autocast, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with context:
            return forward(*arguments, **keywords)

    return run


@contextmanager
def _restored_states(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore delayed scales and histories at the end; those created meanwhile start fresh."""
    layers = [layer for module in modules for layer in module.modules()]
    before = [{name: buffer.clone() for name, buffer in _delayed_state(layer)} for layer in layers]
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, saved in zip(layers, before, strict=True):
                for name, buffer in _delayed_state(layer):
                    if name in saved:
                        buffer.copy_(saved[name])
                    elif name.startswith("scale"):
                        buffer.fill_(1.0)
                    elif name.startswith("amax_history"):
                        buffer.zero_()


def _delayed_state(layer: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = layer.named_buffers(recurse=False)
    return [(name, buffer) for name, buffer in buffers if name in BUFFERS]
