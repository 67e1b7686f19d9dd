"""Every private name of torch that fp8core uses, under a name that says what it is for.

torch may rename or remove a private name in any release. All of these are in torch 2.11 and in
torch 2.13. Where a later torch lacks one of the first group, ``import fp8core`` raises an
ImportError that names it. Attributes of single objects are looked up when they are used, and raise
an AttributeError then. The names under "With a public way" state what fp8core does without them.

A C function is bound here without a wrapper, so that calling it costs no Python frame. Three kinds
of names with an underscore are used elsewhere: ``Tensor._version`` and ``Tensor._base``, which
torch's notes on autograd and on views describe; the dictionaries ``_parameters``, ``_buffers`` and
``_modules`` of a Module, which hold what ``getattr`` would compute or hide; and the names of
operators in ``torch.ops.aten``, by which torch calls ``__torch_dispatch__``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, Final, NoReturn

import torch
from torch import overrides
from torch.autograd import forward_ad, grad_mode
from torch.optim import optimizer

try:
    from torch._C import _TensorMeta
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    # A thread's variables of torch.compile, where a capture leaves its context.
    from torch._guards import _TLS as _compile_variables
    from torch._library.effects import EffectType

    # The tensors that torch traces with: they have shapes, and no memory of their own.
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
    from torch.utils import _pytree

    # The mode that is active where a default device is set.
    from torch.utils._device import DeviceContext as DeviceContext

    # A mode sees each operator that runs within it.
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes

    # The metaclass of torch.Tensor, for classes that answer isinstance() themselves.
    TensorMeta = _TensorMeta
    # Clears functorch's stack of transforms while a context is open.
    without_interpreters = temporarily_clear_interpreter_stack
    # tree_map_only and tree_leaves: torch's nested arguments, with its own registered containers.
    pytree = _pytree
    # Makes real tensors while torch traces.
    without_modes = _disable_current_modes
    # All of them in a dictionary; to ask for one that is not set costs an exception in torch's C.
    compile_variables: Callable[[], dict[str, Any]] = partial(
        getattr, _compile_variables, "__dict__"
    )
    COMPILE_CONTEXT: Final = "compile_context"
    # The active function modes, a DeviceContext among them where a default device is set.
    function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack

    # Backward passes. The number of the one that the calling thread runs, the node it computes, and
    # where a function is left that the engine calls when the pass ends.
    current_backward_pass: Callable[[], int] = torch._C._current_graph_task_id
    current_node: Callable[[], Any] = torch._C._current_autograd_node
    queue_callback: Callable[[Callable[[], None]], None] = (
        torch.autograd.Variable._execution_engine.queue_callback
    )

    # Each thread numbers the autograd nodes that it makes: the number of the next one, and of a
    # node that exists. They order a forward's nodes against other events of its thread.
    next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
    node_number: Callable[[Any], int] = methodcaller("_sequence_nr")

    # The shapes, dtypes and devices of the gradients that a node takes.
    input_metadata: Callable[[Any], Any] = attrgetter("_input_metadata")

    # The hooks that pack and unpack saved tensors now: those of a checkpoint, in its function.
    saved_tensor_hooks: Callable[[bool], tuple[Any, Any] | None] = (
        torch._C._autograd._top_saved_tensors_default_hooks
    )

    # Whether torch's attention may take cuDNN's kernels, as ``sdpa_kernel`` says; whether programs
    # ask for deterministic algorithms, of which cuDNN's gradient is none.
    is_cudnn_attention_enabled: Callable[[], bool] = torch._C._get_cudnn_sdp_enabled
    is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms

    # Transforms of torch.func, and the older vmap that is_grads_batched and vectorize use.
    is_transform_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    is_transform_wrapped: Callable[[torch.Tensor], bool] = (
        torch._C._functorch.is_functorch_wrapped_tensor
    )
    is_legacy_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
    interpreter_stack: Callable[[], Any] = torch._C._functorch.get_interpreter_stack
    legacy_vmap: Final[Any] = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))
    without_keys: type[Any] = torch._C._ExcludeDispatchKeyGuard
    # Has views share the count of writes with what they view also within __torch_dispatch__.
    counting_views: Callable[[], Any] = partial(
        torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False
    )

    # The depth of forward-mode differentiation, a variable of torch's module; -1 outside of it.
    forward_ad._current_level  # noqa: B018  an early AttributeError where torch lacks it
    forward_mode_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")

    # A context in which functions of tensor subclasses run as those of plain tensors.
    within_no_subclass: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
    # How a class of tensors says that it overrides neither functions nor operators.
    no_torch_function: Final[Any] = torch._C._disabled_torch_function_impl
    no_torch_dispatch: Final[Any] = torch._C._disabled_torch_dispatch_impl
    # A tensor of such a class without memory of its own; torch's guide to subclasses uses it.
    make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
    # Whether functorch's functionalization holds the tensor, and whether torch has yet to fill it
    # with zeros. The two makers of lazy tensors serve the conformance kit.
    is_functional: Callable[[torch.Tensor], bool] = torch._is_functional_tensor
    is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
    lazy_zeros: Callable[..., torch.Tensor] = torch._efficientzerotensor
    lazily_negated: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view

    # What an operator writes and aliases, and the key under which torch composes it of others.
    schema_of: Callable[[Any], Any] = attrgetter("_schema")
    COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd

    # Counts a write to each tensor of a list, for writes that torch does not see. The function of
    # torch.autograd.graph looks at the list first.
    count_writes: Callable[[list[torch.Tensor]], None] = torch._C._increment_version

    # Counts no write to a tensor while it is open.
    preserved_versions: Callable[[Any], Any] = grad_mode._unsafe_preserve_version_counter

    # Copies a list of tensors into another in one call; ``non_blocking`` as of Tensor.copy_.
    copy_all: Callable[..., None] = torch._foreach_copy_

    # The product of each tensor of a list and a number, or a tensor of one element, in one call.
    foreach_mul: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_mul

    # The norm of each tensor of a list, in one call.
    foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm

    # The code of a frame in which a Module is being called, and what Module.compile() leaves in it.
    MODULE_CALL: Final = torch.nn.Module._call_impl.__code__
    torch.nn.Module._compiled_call_impl  # noqa: B018  an early AttributeError, as above
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"fp8core uses private names of torch that torch 2.11 to 2.13 have, and torch "
        f"{torch.__version__} lacks one: {error}. Install one of those versions, or a later "
        f"fp8core."
    ) from error

NO_BACKWARD_PASS: Final = -1
"""What :data:`current_backward_pass` returns outside of a backward pass."""

# Hooks of a Module, by the key that their handle has. A public way removes a hook by its handle
# alone, which a copy of the module lacks.
forward_hooks: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
forward_pre_hooks: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
# They are objects that have the function itself as ``hook``.
load_pre_hooks: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter(
    "_load_state_dict_pre_hooks"
)
always_called_hooks: Callable[[torch.nn.Module], dict[int, bool]] = attrgetter(
    "_forward_hooks_always_called"
)


@contextlib.contextmanager
def load_pre_hooks_called(module: torch.nn.Module, *arguments: Any) -> Iterator[None]:
    """Call the hooks that torch calls first when ``module`` loads; within, it calls none again."""
    hooks = load_pre_hooks(module)
    for hook in hooks.values():
        hook(*arguments)
    module._load_state_dict_pre_hooks = OrderedDict()
    try:
        yield
    finally:
        module._load_state_dict_pre_hooks = hooks


has_global_hooks: Callable[[], object] = torch.nn.modules.module._has_any_global_hook
"""Whether calls of all modules run hooks; true or empty."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks_of: Callable[[torch.nn.Module], tuple[Any, ...]] = attrgetter(*_HOOKS)

WATCHERS: Final = (*_HOOKS, "_compiled_call_impl")
"""The attributes that hold what runs in a call of a module besides its forward, each empty or None
if nothing does."""


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a call of ``module`` runs hooks besides its forward."""
    return bool(any(_hooks_of(module)) or has_global_hooks())


# Attributes that torch's own classes read or set, and names inside torch.utils.checkpoint.

COMPILED_MODULE: Final = "_orig_mod"
"""What torch.compile calls the module inside its wrapper."""

CHECKPOINTED_MODULE: Final = "_checkpoint_wrapped_module"
"""What torch's checkpoint_wrapper calls it, whose hook renames keys of a state_dict and no more."""

RENAMED_MODULES: Final = frozenset((CHECKPOINTED_MODULE, "_fsdp_wrapped_module"))
"""What those wrappers of torch call the module inside them whose hooks leave these names out of the
keys of a state_dict."""

WRAPPED_MODULES: Final = RENAMED_MODULES | {COMPILED_MODULE}
"""What torch's wrappers call the module inside them, where the name is no ordinary one."""

DDP_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a model: names that DistributedDataParallel neither broadcasts nor reduces."""

FSDP_FLATTENED: Final = "_fsdp_flattened"
"""Attribute of a parameter that FullyShardedDataParallel flattened with others."""

IS_PARAMETER: Final = "_is_param"
"""Attribute of a tensor of another class that passes for a torch.nn.Parameter."""

MARKED_CONSTANT: Final = "_dynamo_marked_constant"
"""Attribute of a function whose result torch.compile takes as a constant."""

MARKED_DISABLED: Final = "_torchdynamo_disable"
DISABLED_BECAUSE: Final = "_torchdynamo_disable_msg"
"""Attributes of a function that torch.compile leaves to Python, and of why, for its message."""

UNSCALE_GRADS: Final = "_unscale_grads_"
"""Method of torch.amp.GradScaler: returns its found-inf tensors by device. Also in FSDP's
ShardedGradScaler, which reduces them over its ranks."""

CHECKPOINT_HOOK: Final = "unpack_hook"
CHECKPOINT_FRAME: Final = "frame"
"""Names in torch.utils.checkpoint: the function that unpacks a saved tensor by a recompute, and
its variable that holds the checkpoint."""


PASSES_DATACLASSES: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch.compile passes frozen dataclasses to a function that is MARKED_CONSTANT."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a wrapper of torch.compile, or was compiled in place."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: nothing is compiled
    is_wrapper = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return is_wrapper or module._compiled_call_impl is not None


def at_static_address(memory: torch.Tensor) -> torch.Tensor:
    """Return ``memory``, which is then no argument that CUDA graphs of torch.compile copy, and must
    not write; as torch._dynamo.mark_static_address, which imports the compiler."""
    if not torch.compiler.is_compiling():
        memory._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return memory


def is_capturing() -> bool:
    """Return whether a CUDA graph is captured on the current stream.

    A torch that was built with CUDA raises in its own query where no device is visible, and one
    that was built without raises everywhere: neither captures before CUDA has been initialized.
    torch 2.11's Dynamo, which runs in no capture, cannot trace the query.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    return is_used and torch.cuda.is_current_stream_capturing()


FAKE: Final = torch._C._TorchDispatchModeKey.FAKE
mode_of: Callable[[Any], Any] = torch._C._get_dispatch_mode
_PROXY: Final = torch._C._TorchDispatchModeKey.PROXY
_PRE_DISPATCH: Final[Any] = torch._ops._mode_stack_state_for_pre_dispatch


def keep_order(library: torch.library.Library, operator: str) -> None:
    """Keep torch.compile from dropping, doubling or reordering calls of a library's operator."""
    library._register_effectful_op(operator, EffectType.ORDERED)


def is_exporting() -> bool:
    """Return ``torch.compiler.is_exporting()``, which is True in any graph of torch 2.11."""
    return torch.compiler._is_exporting_flag


def is_traced() -> bool:
    """Return whether make_fx or torch.jit.trace records operators, outside of torch.compile too."""
    return (
        torch._C._get_tracing_state() is not None
        or mode_of(_PROXY) is not None
        or _PRE_DISPATCH.get(0) is not None  # the slot of make_fx
    )


def wait_for_collective(tensor: Any) -> torch.Tensor:
    """Return the values of an AsyncCollectiveTensor, whose collective may still be under way."""
    return wait_for_result(tensor.elem)


COLLECTIVES: Final = "_c10d_functional"
"""The namespace of the collectives that return their result."""

PIN_MEMORY: Final[Any] = torch.ops.aten._pin_memory
"""The operator behind ``Tensor.pin_memory``."""

WAITING: Final = ("wait_tensor", "_wrap_tensor_autograd")
"""Its operators that return their argument."""


def gathered_rows(part: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Return ``part`` of all ranks of a group along the first dimension, when they have arrived."""
    gather = functional_collective("all_gather_into_tensor")
    return wait_for_result(gather(part.contiguous(), group_size, group_name))


def functional_collective(name: str) -> Callable[..., torch.Tensor]:
    """Return the collective ``name`` that a graph can hold; its last argument is the group name."""
    collective: Callable[..., torch.Tensor] = getattr(torch.ops._c10d_functional, name)
    return collective


def wait_for_result(started: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective once it is complete."""
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return result


def group_by_name(name: str) -> Any:
    """Return the process group ``name`` of this process."""
    groups: Any = torch.distributed.distributed_c10d
    return groups._resolve_process_group(name)


def store_of(group: Any) -> Any:
    """Return the key-value store that the ranks of a process group share."""
    groups: Any = torch.distributed.distributed_c10d
    return groups._get_process_group_store(group)


def timeout_of(group: Any) -> timedelta:
    """Return how long a collective of a process group may take."""
    backends = [group._get_backend(device) for device in group._device_types]
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    timeouts: list[timedelta] = [one._timeout for one in options if hasattr(one, "_timeout")]
    groups: Any = torch.distributed.distributed_c10d
    return max(timeouts, default=groups.default_pg_timeout)


def gather_options() -> Any:
    """Return new options of a gather; ``asyncOp`` has it run beside the current stream."""
    groups: Any = torch.distributed.distributed_c10d
    return groups.AllgatherOptions()


def start_all_gather(group: Any, result: torch.Tensor, part: torch.Tensor, options: Any) -> Any:
    """Start the gather that torch.distributed.all_gather_into_tensor checks, logs and calls;
    ``options`` are :func:`gather_options`."""
    return group._allgather_base(result, part, options)


def start_reduce_scatter(
    group: Any, result: torch.Tensor, whole: torch.Tensor, options: Any
) -> Any:
    """Start the sum that torch.distributed.reduce_scatter_tensor checks, logs and calls;
    ``options`` are a torch.distributed.ReduceScatterOptions."""
    return group._reduce_scatter_base(result, whole, options)


def fsdp_state(module: Any) -> Any:
    """Return what FSDP2 keeps of ``module``, which it looks up in six calls."""
    return module._get_fsdp_state()


def forward_root(state: Any) -> torch.nn.Module | None:
    """Return the outermost module of FSDP2 around that of ``state`` whose forward is running, None
    outside of it."""
    outermost = state._state_ctx.iter_forward_root
    root: torch.nn.Module | None = None if outermost is None else outermost._modules[0]
    return root


def reshards_to_fewer_ranks(module: Any) -> bool:
    """Return whether ``fully_shard`` was told how many ranks hold ``module`` after forward."""
    return any(group._use_post_forward_mesh for group in _fsdp_groups(module._get_fsdp_state()))


def local_tensor(parameter: Any) -> torch.Tensor:
    """Return the tensor itself that a DTensor holds, of which its ``to_local`` makes a view."""
    local: torch.Tensor = parameter._local_tensor
    return local


def sharded_parameters() -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Yield each parameter that ``fully_shard`` has spread, as its module and its name there, and
    the mesh of the ranks that gather it and sum its gradients."""
    composable: Any = sys.modules.get("torch.distributed._composable_state")
    references = () if composable is None else composable._module_state_mapping.values()
    states = {id(state): state for state in (one() for one in list(references))}
    for state in states.values():
        for group in () if state is None else _fsdp_groups(state):
            for param in group.fsdp_params:
                info = param._module_info
                yield info.module, info.param_name, param.mesh_info.mesh


def _fsdp_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # of torch 2.12
    if groups is None:
        groups = [one for one in (state._fsdp_param_group,) if one is not None]
    return list(groups)


# With a public way

is_any_autocast_enabled: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", lambda: True
)
"""Say whether torch.autocast is on for any type of device but mps, which it leaves out.

Without it the answer is always True, and callers ask ``torch.is_autocast_enabled(device_type)``,
which costs as much as an allocation.
"""

tensor_guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
"""The class whose objects compare several tensors with earlier ones in one call; torch.compile
guards its graphs by them. Without it every call of a layer looks at its tensors one by one."""

refuse_address: Callable[[torch.Tensor], None] = getattr(
    torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None
)
"""Have C++ code raise that asks for the memory of a tensor without any. Without it such code, as of
a collective of lists of tensors, reads address 0, which ends the process."""

_reinterpreted: Callable[..., torch.Tensor] | None = getattr(
    getattr(torch._C._dynamo, "guards", None), "_reinterpret_tensor", None
)


def first_row(tensor: torch.Tensor, columns: slice) -> torch.Tensor:
    """Return ``tensor[0, columns]``, of one dimension ``tensor[columns]``, as a view without a
    history, whose writes torch does not count; in a fraction of the time of indexing where torch
    has what its compiled code calls."""
    if _reinterpreted is None:
        rows = tensor.data
        return rows[columns] if rows.dim() == 1 else rows[0, columns]
    start, stop, step = columns.indices(tensor.shape[-1])
    stride, count = tensor.stride(-1), max(0, -(-(stop - start) // step))
    return _reinterpreted(tensor, (count,), (step * stride,), start * stride)


end_process: Callable[[int], NoReturn] = os._exit
"""End the process with a status, whatever its threads wait for: sys.exit raises in one thread, and
waits for the others. Nothing is flushed, and nothing that was registered with atexit runs."""

foreach_types: list[type] = getattr(optimizer, "_foreach_supported_types", [])
"""The exact types of parameters that optimizers take all at once; without it, one by one."""


def enter_before_load(
    context: Callable[..., contextlib.AbstractContextManager[None]],
) -> None:
    """Have ``model.load_state_dict`` load in ``context(model, state_dict, assigns=...)``.

    torch loads one module after the other, calls hooks of a module as late as that, and raises when
    all others are loaded: no hook of a layer can keep what torch loads before it.
    """
    plain = torch.nn.Module.load_state_dict

    @functools.wraps(plain)
    def load_state_dict(
        self: torch.nn.Module, state_dict: Any, strict: bool = True, assign: bool = False
    ) -> Any:
        with context(self, state_dict, assigns=assign):
            return plain(self, state_dict, strict, assign)

    torch.nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]  # as said
