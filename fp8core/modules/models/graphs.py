"""CUDA graphs of layers: forward and backward replayed with one launch each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from typing import Any

import torch
import torch.distributed

from fp8core.context.autocast import OUTSIDE, activated, autocast
from fp8core.context.capture import Hooks, Pass, Schedule, capture, passes_of
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.modules.calls.inputs import takes_keyword
from fp8core.modules.models.inventory import layers_in
from fp8core.modules.sequences.inference import restored_caches
from fp8core.recipe import Recipe
from fp8core.tensors.delayed_state import BUFFERS
from fp8core.tensors.weights import WeightStore
from fp8core.torch_ops import nonfinite
from fp8core.torch_ops.private import has_hooks

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def make_graphed_callables(
    modules: torch.nn.Module | Sequence[torch.nn.Module],
    sample_args: tuple[torch.Tensor, ...] | Sequence[tuple[torch.Tensor, ...]],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    enabled: bool | Sequence[bool | None] | None = True,
    calibrating: bool = False,
    recipe: Recipe | str | None = None,
    amax_reduction_group: torch.distributed.ProcessGroup | None = None,
    cache_quantized_params: bool = False,
    _order: Sequence[int] | None = None,
    _num_layers_per_chunk: Sequence[int] | int | None = None,
    pool: tuple[int, int] | None = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
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
    they were. Sizes, strides, dtypes and ``requires_grad`` of later inputs have to be those of
    ``sample_args``. What is returned has ``reset()``, which frees the graphs; a call is an error
    from then on, until the module is captured again.

    Args:
        modules: one module, or several that run one after the other; none may have hooks, or be
            captured already.
        sample_args: the positional tensors of one call, or a tuple of them for each module.
        num_warmup_iters: runs before the capture, in its order, in which algorithms are chosen.
        allow_unused_input: whether an input may have no gradient.
        sample_kwargs: tensors of one call by keyword, or a mapping of them for each sample.
        enabled: False captures high precision, also of weights that are stored quantized; None
            captures what a call outside of any autocast runs, as for a model of
            :func:`fp8core.quantize_`. For all modules, or one for each.
        calibrating: as in ``autocast``.
        recipe: a Recipe, or its name; None takes :func:`fp8core.get_default_recipe`.
        amax_reduction_group: as in ``autocast``.
        cache_quantized_params: graphs multiply by weights that are quantized outside of them. Each
            call then has ``is_first_microbatch=True``, which quantizes the weights as they are, or
            False, also of a module that does not take it, for the layers inside.
        _order: the order in which chunks of the modules run, ``c`` forward and ``-c`` backward, c
            from 1, as in a pipeline. There is a sample for each forward: those of the first chunk
            first, of each chunk by microbatch. Functions are returned, one for each sample.
        _num_layers_per_chunk: how many modules each chunk has, all the same if None.
        pool: memory to share with other graphs, of ``torch.cuda.graph_pool_handle()``.
        retain_graph_in_backward: keep what backward reads in memory of its own.
        _reuse_graph_input_output_buffers: with ``_order``, have passes that are over leave the
            memory of their inputs, outputs and gradients to later ones: what a call returns is
            overwritten after the end of its backward, a gradient after that of the next backward.
        clone_param_grads_on_return: copy the gradients of parameters, so that the next replay does
            not write to those that somebody keeps.
        pre_warmup_hook, post_warmup_hook: called once before and after warming up.
        capture_time_hooks: for each module, functions of it that run while it warms up and is
            captured, outside of the graph: a mapping of ``forward_pre_hooks``, ``forward_hooks``,
            ``backward_pre_hooks`` and ``backward_hooks`` to functions by any key.

    Raises:
        RecipeError: ``recipe`` is not a Recipe, or there are no modules.
        OperandError: what is no module, or replays graphs already; samples, order or hooks do not
            fit the modules.
        UnsupportedError: there is no CUDA device, or a module is not on one.
    """
    is_module = isinstance(modules, torch.nn.Module) or not isinstance(modules, Iterable)
    each: tuple[torch.nn.Module, ...] = (modules,) if is_module else tuple(modules)  # type: ignore[arg-type, assignment]  # as is_module says
    _check_modules(each)
    for layer in itertools.chain(*(layers_in(module).values() for module in each)):
        layer.count_nonfinite()  # nobody can ask a graph later
    nonfinite.ask()
    if _reuse_graph_input_output_buffers and _order is None:
        raise OperandError(
            "make_graphed_callables(_reuse_graph_input_output_buffers=True) needs _order, which "
            "says when a pass is over."
        )
    chosen: dict[str, Any] = {"calibrating": calibrating, "recipe": recipe}
    chosen["amax_reduction_group"] = amax_reduction_group
    are_enabled = _enabled(enabled, len(each))
    if {*are_enabled} == {None} and any(chosen.values()):
        raise OperandError(
            f"make_graphed_callables(enabled={enabled!r}) captures without an autocast, which "
            f"{', '.join(name for name in chosen if chosen[name])} would be of; leave it out, or "
            f"give enabled=True."
        )
    contexts = [
        activated(OUTSIDE) if is_enabled is None else autocast(enabled=is_enabled, **chosen)
        for is_enabled in are_enabled
    ]
    is_single = is_module and _order is None
    args: tuple[Any, ...] = (sample_args,) if is_single else tuple(sample_args)
    keywords = _keywords(sample_kwargs, len(args), is_single=is_single)
    hooks = _hooks(capture_time_hooks, len(each))
    steps = passes_of(_schedule(_order, len(each), len(args), _num_layers_per_chunk))
    owners = {sample: module for module, sample, _ in steps}
    passes = [
        Pass(each[owners[at]], args[at], keywords[at], hooks[owners[at]]) for at in range(len(args))
    ]
    _restore(itertools.chain(*(module.modules() for module in each)))
    caches, clones = cache_quantized_params, clone_param_grads_on_return
    stores = [_stores(module) if caches else [] for module in each]
    takers = [*itertools.chain(*map(_takers, each))] if caches else []
    microbatch: dict[str, bool] = {}  # the argument of takers meanwhile
    with (
        _restored_states(each),
        restored_caches(),
        _inside(contexts, each, takers, microbatch),
        _used_by_graphs([*itertools.chain(*stores)]),
    ):
        if pre_warmup_hook is not None:
            pre_warmup_hook()
        times = max(num_warmup_iters, 2) if caches else num_warmup_iters  # to keep the weights
        _warm_up(passes, [*steps] * times, allow_unused_input, microbatch)
        if post_warmup_hook is not None:
            post_warmup_hook()
        capture(
            passes,
            steps,
            torch.cuda.graph_pool_handle() if pool is None else pool,
            allow_unused=allow_unused_input,
            retain=retain_graph_in_backward,
            reuses=_reuse_graph_input_output_buffers,
        )
        forwards = [
            _forward(sample_pass, stores[owners[at]], caches, clones)
            for at, sample_pass in enumerate(passes)
        ]
    if _order is not None:
        for forward, sample_pass in zip(forwards, passes, strict=True):
            forward.reset = sample_pass.reset  # type: ignore[attr-defined]  # as Transformer Engine's have it
        return tuple(forwards)
    for module, forward, sample_pass in zip(each, forwards, passes, strict=True):
        _start(module, forward, sample_pass)
    return each[0] if is_module else each


def _start(module: torch.nn.Module, forward: Callable[..., Any], captured: Pass) -> None:
    """Have ``module`` run ``forward``, which replays ``captured``."""
    attributes: dict[str, Any] = vars(module)
    before = {name: attributes[name] for name in ("forward", "reset") if name in attributes}

    def reset() -> None:
        """Free the graphs. A call is an error until the module is captured again."""
        captured.reset()

    vars(reset).update(captured=captured, before=before)
    attributes.update(forward=forward, reset=reset)


def _restore(modules: Iterable[torch.nn.Module]) -> None:
    """Give those of ``modules`` whose graphs were freed the forward of before."""
    for module in modules:
        attributes: dict[str, Any] = vars(module)
        graphed: dict[str, Any] = getattr(attributes.get("reset"), "__dict__", {})
        if "captured" not in graphed:
            continue
        if graphed["captured"].is_captured:
            raise OperandError(
                f"make_graphed_callables: {type(module).__name__} is captured already. Call its "
                f"reset() first."
            )
        del attributes["forward"], attributes["reset"]
        attributes.update(graphed["before"])


def _enabled(enabled: bool | Sequence[bool | None] | None, count: int) -> list[bool | None]:
    """Return whether each module is captured in low precision, None where no autocast says it."""
    if enabled is None or isinstance(enabled, bool):
        return [enabled] * count
    each = list(enabled) if isinstance(enabled, Sequence) else []
    if len(each) != count or not all(isinstance(entry, bool | None) for entry in each):
        raise OperandError(
            f"make_graphed_callables(enabled={enabled!r}): expected a bool, None, or one of them "
            f"for each of {count} modules."
        )
    return each


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
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise OperandError(
                f"make_graphed_callables: {module!r} is no torch.nn.Module; put a function "
                f"into the forward of one, whose parameters get gradients."
            )
    _check_devices(modules)
    for module in modules:
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


def _check_devices(modules: Sequence[torch.nn.Module]) -> None:
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


_FIRST = "is_first_microbatch"


def _takers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost modules that take ``is_first_microbatch``, ``module`` or inside it."""
    if takes_keyword(module, _FIRST):
        yield module
        return
    for child in module.children():
        yield from _takers(child)


def _warm_up(
    passes: Sequence[Pass],
    steps: Sequence[tuple[int, int, bool]],
    allow_unused: bool,
    microbatch: dict[str, bool],
) -> None:
    """Run ``steps`` on a stream of their own.

    The first forward of each module is that of the first microbatch; another one would rewrite
    weights that a backward still has to read.
    """
    begun: set[int] = set()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch's
        for module, sample, is_forward in steps:
            if is_forward:
                microbatch[_FIRST] = module not in begun
                begun.add(module)
                passes[sample].run_forward()
            else:
                passes[sample].run_backward(allow_unused=allow_unused)
    torch.cuda.synchronize()


def _forward(
    sample_pass: Pass, stores: Sequence[WeightStore], caches: bool, clones: bool
) -> Callable[..., Any]:
    """Return the forward that replays, and in the other mode, train or eval, runs the module's."""
    module = sample_pass.module
    was_training, plain = module.training, module.forward
    takes_first = not caches or takes_keyword(module, _FIRST)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if module.training is not was_training:
            if not takes_first:
                kwargs.pop(_FIRST, None)
            return plain(*args, **kwargs)
        if caches:
            first = kwargs.pop(_FIRST, None)
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
def _inside(
    contexts: Sequence[ContextDecorator],
    modules: Sequence[torch.nn.Module],
    takers: Sequence[torch.nn.Module],
    microbatch: dict[str, bool],
) -> Iterator[None]:
    """Have each module's forward enter its context, and that of ``takers`` take ``microbatch``,
    until the forwards are restored at the end."""
    before = {
        module: vars(module).get("forward")  # None: that of the class
        for module in (*takers, *modules)
    }
    for layer in dict.fromkeys(takers):
        layer.forward = _taking(microbatch, layer.forward)
    for context, module in zip(contexts, modules, strict=True):
        module.forward = context(module.forward)
    try:
        yield
    finally:
        microbatch.clear()  # a forward of the other mode takes what its caller says
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _taking(keywords: Mapping[str, Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**keywords, **kwargs})

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
