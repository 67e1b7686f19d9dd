"""Forward and backward passes of modules as CUDA graphs, captured in the order of a schedule.

:func:`torch.cuda.make_graphed_callables` captures all forwards, then all backwards in reverse,
which is the order of one batch. A pipeline runs them in another one, and graphs that share memory
have to be captured in the order of their replays; see :class:`Pass`.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from fp8core.errors import OperandError
from fp8core.torch_ops.private import pytree

Hooks = Mapping[str, Mapping[Any, Callable[[torch.nn.Module], None]]]
"""Functions of the module for ``forward_pre_hooks``, ``forward_hooks``, ``backward_pre_hooks`` and
``backward_hooks``, which run at capture and outside of it, and are not replayed."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Leave garbage for later: a CUDA graph in it, whose end invalidates a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graph:
    """A CUDA graph of one function."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, function: Callable[[], Any], pool: Any) -> Any:
        """Capture ``function()`` in the memory of ``pool``, and return its result."""
        # NCCL's watchdog, a thread of its own, asks CUDA about collectives meanwhile, which would
        # invalidate a capture that watches all threads.
        has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        mode = "thread_local" if has_ranks else "global"
        graph = torch.cuda.graph(self._graph, pool=pool, capture_error_mode=mode)
        with _without_collections(), graph:
            return function()

    def replay(self) -> None:
        """Compute again, from and into the same memory."""
        self._graph.replay()

    def reset(self) -> None:
        """Free the graph, and with the last graph of a pool the pool's memory."""
        self._graph.reset()

    @staticmethod
    def borrowed(tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor at the memory of ``tensor`` that does not keep it, so that later graphs
        of the pool may write there."""
        if type(tensor) is not torch.Tensor or not tensor.is_cuda or not tensor.numel():
            return tensor.detach()
        storage, size = tensor.untyped_storage(), tensor.element_size()
        interface = {
            "version": 3,
            "shape": (storage.nbytes() // size * size,),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
        }
        memory = SimpleNamespace(__cuda_array_interface__=interface)
        whole = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Schedule(NamedTuple):
    """The order in which passes are captured and replayed.

    Attributes:
        order: chunk ``c`` of the modules as ``c``, from 1, for a forward, and ``-c`` for the
            backward of its earliest forward that has none yet.
        sizes: how many modules each chunk has.
    """

    order: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def of(
        cls,
        order: Sequence[int | float],
        num_modules: int,
        num_samples: int,
        sizes: Sequence[int] | int | None,
    ) -> Schedule:
        """Check the arguments ``_order`` and ``_num_layers_per_chunk``.

        Raises:
            OperandError: they contradict each other, or the number of modules or of samples.
        """
        if not order or any(not isinstance(number, int) or number == 0 for number in order):
            raise OperandError(
                f"make_graphed_callables(_order={order!r}): expected chunk numbers from 1, "
                f"negative ones for backward. Weight gradients that are delayed are not captured."
            )
        whole = [int(number) for number in order]
        chunks = max(map(abs, whole))
        if sizes is None:
            sizes = [num_modules // chunks] * chunks
        each = [sizes] * chunks if isinstance(sizes, int) else list(sizes)
        forwards = [whole.count(chunk) for chunk in range(1, chunks + 1)]
        backwards = [whole.count(-chunk) for chunk in range(1, chunks + 1)]
        ahead = [itertools.accumulate(_signs(whole, chunk)) for chunk in range(1, chunks + 1)]
        if (
            len(each) != chunks
            or sum(each) != num_modules
            or len(set(forwards)) != 1
            or forwards != backwards
            or any(min(steps) < 0 for steps in ahead)
        ):
            raise OperandError(
                f"make_graphed_callables(_order={whole}): expected each of {chunks} chunks of "
                f"{each} modules as often forward as backward, and forward first; there are "
                f"{num_modules} modules."
            )
        if num_samples != num_modules * forwards[0]:
            raise OperandError(
                f"make_graphed_callables(_order={whole}): {num_samples} sample_args; expected "
                f"{num_modules} modules x {forwards[0]} microbatches, those of a chunk's first "
                f"microbatch first."
            )
        return cls(whole, each)


def _signs(order: Iterable[int], chunk: int) -> list[int]:
    return [1 if number > 0 else -1 for number in order if abs(number) == chunk]


def passes_of(schedule: Schedule) -> list[tuple[int, int, bool]]:
    """Return the module, the sample, and whether it is a forward, of each pass in order.

    Samples are numbered by chunk, then by microbatch, then by module of the chunk.
    """
    first_module = [0, *itertools.accumulate(schedule.sizes)]
    count = [schedule.order.count(chunk + 1) for chunk in range(len(schedule.sizes))]
    done = {True: [0] * len(schedule.sizes), False: [0] * len(schedule.sizes)}
    passes = []
    for step in schedule.order:
        chunk, is_forward = abs(step) - 1, step > 0
        size = schedule.sizes[chunk]
        start = first_module[chunk] * count[chunk] + done[is_forward][chunk] * size
        done[is_forward][chunk] += 1
        layers = range(size) if is_forward else reversed(range(size))
        passes += [(first_module[chunk] + at, start + at, is_forward) for at in layers]
    return passes


class Pass:
    """A forward of a module and its backward, each a graph over the same memory.

    The sample's tensors are that memory for the inputs, which a call copies its own into.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        hooks: Hooks,
        new_graph: Callable[[], Graph] = Graph,
    ) -> None:
        leaves, self._inputs_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise OperandError(
                    f"make_graphed_callables: a sample of {type(module).__name__} holds "
                    f"{type(leaf).__name__}; expected tensors alone."
                )
        self.module = module
        self._hooks = hooks
        self._inputs: list[torch.Tensor] = leaves  # the memory of all calls' inputs
        self._params = list(module.parameters())
        self._graphs: tuple[Graph, ...] = new_graph(), new_graph()
        self._outputs: list[torch.Tensor] = []
        self._spec: Any = None
        self._grad_outputs: list[torch.Tensor | None] = []
        self._grads: list[torch.Tensor | None] = []

    def run_forward(self, pool: Any = None) -> None:
        """Run the forward, captured in the memory of ``pool`` if there is one."""
        args, kwargs = pytree.tree_unflatten(self._inputs, self._inputs_spec)
        self._run_hooks("forward_pre_hooks")
        result = self._compute(0, lambda: self.module(*args, **kwargs), pool)
        self._run_hooks("forward_hooks")
        self._outputs, self._spec = pytree.tree_flatten(result)

    def run_backward(
        self,
        pool: Any = None,
        *,
        allow_unused: bool,
        retain: bool = False,
        buffers: dict[object, torch.Tensor] | None = None,
    ) -> None:
        """Run the backward of the forward that ran last, and capture it as that.

        ``buffers`` are gradients of outputs by what they are like, of passes that share them.
        """
        self._run_hooks("backward_pre_hooks")
        self._grad_outputs = [
            _buffer_like(output, at, {} if buffers is None else buffers)
            if output.requires_grad
            else None
            for at, output in enumerate(self._outputs)
        ]
        grads = [grad for grad in self._grad_outputs if grad is not None]
        self._grads = [None] * len(self._surface)
        if grads:
            computed = self._compute(
                1, lambda: self._grads_of(self._outputs, grads, allow_unused, retain=retain), pool
            )
            left = iter(computed)
            self._grads = [next(left) if tensor.requires_grad else None for tensor in self._surface]
        self._run_hooks("backward_hooks")
        if pool is None:
            self._outputs, self._grads = [], []

    def _compute(self, number: int, function: Callable[[], Any], pool: Any) -> Any:
        return function() if pool is None else self._graphs[number].record(function, pool)

    @property
    def likeness(self) -> object:
        """The value that passes have in common whose inputs may be in the same memory."""
        leaves = [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in self._inputs
        ]
        return str(self._inputs_spec), *leaves

    def share_inputs(self, earlier: Pass) -> None:
        """Have the inputs in the memory of those of ``earlier``, a pass that is over before."""
        self._inputs = earlier._inputs

    def release_outputs(self) -> None:
        """Leave the memory of the outputs to graphs that are captured from now on."""
        self._outputs = [Graph.borrowed(output) for output in self._outputs]

    def release_grads(self) -> None:
        """Leave the memory of the gradients to graphs that are captured from now on."""
        self._grads = [None if grad is None else Graph.borrowed(grad) for grad in self._grads]

    def reset(self) -> None:
        """Free the graphs and their memory; a replay is an OperandError from then on."""
        for graph in self._graphs:
            graph.reset()
        self._graphs = ()
        self._inputs, self._outputs, self._grad_outputs, self._grads = [], [], [], []

    @property
    def is_captured(self) -> bool:
        """Whether there are graphs, which :meth:`reset` has not freed."""
        return bool(self._graphs)

    def _check_is_captured(self) -> None:
        if not self.is_captured:
            raise OperandError(
                f"{type(self.module).__name__} in a graph: reset() has freed the graph. Capture it "
                f"again, by make_graphed_callables."
            )

    @property
    def _surface(self) -> list[torch.Tensor]:
        return [*self._inputs, *self._params]

    def _grads_of(
        self,
        outputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        allow_unused: bool,
        *,
        retain: bool,
    ) -> tuple[torch.Tensor, ...]:
        trained = [output for output in outputs if output.requires_grad]
        inputs = [tensor for tensor in self._surface if tensor.requires_grad]
        if not trained or not inputs:
            return ()
        return torch.autograd.grad(
            trained, inputs, grads, retain_graph=retain, allow_unused=allow_unused
        )

    def _run_hooks(self, kind: str) -> None:
        for hook in self._hooks.get(kind, {}).values():
            if hook(self.module) is not None:
                raise OperandError(
                    f"make_graphed_callables: one of capture_time_hooks[{kind!r}] returned a "
                    f"value; expected None."
                )

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, clones: bool) -> Any:
        """Replay for other inputs; ``clones``: gradients of parameters are copied on return.

        Raises:
            OperandError: the inputs are not like the sample, or the graph was freed.
        """
        self._check_is_captured()
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self._inputs_spec:
            raise OperandError(
                f"{type(self.module).__name__} in a graph: arguments {spec}; the sample had "
                f"{self._inputs_spec}."
            )
        for leaf, static in zip(leaves, self._inputs, strict=True):
            like = (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
            if like != (static.shape, static.dtype, static.device, static.requires_grad):
                raise OperandError(
                    f"{type(self.module).__name__} in a graph: an input is {leaf.dtype} "
                    f"{list(leaf.shape)} on {leaf.device}, requires_grad={leaf.requires_grad}; "
                    f"the sample was {static.dtype} {list(static.shape)} on {static.device}, "
                    f"requires_grad={static.requires_grad}."
                )
        outputs = _Replay.apply(self, clones, *leaves, *self._params)  # type: ignore[no-untyped-call]  # torch's
        return pytree.tree_unflatten(list(outputs), self._spec)

    def replay_forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copy ``inputs`` in, compute, and return the outputs' memory."""
        for static, tensor in zip(self._inputs, inputs, strict=False):
            _copy_into(static.detach(), tensor)
        self._graphs[0].replay()
        return tuple(output.detach() for output in self._outputs)

    def replay_backward(
        self, grads: Sequence[torch.Tensor], *, clones: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Copy ``grads`` in, compute, and return the gradients of inputs and parameters."""
        self._check_is_captured()
        for static, incoming in zip(self._grad_outputs, grads, strict=True):
            if static is not None:
                _copy_into(static, incoming)
        if any(static is not None for static in self._grad_outputs):
            self._graphs[1].replay()
        first_param = len(self._inputs)
        return tuple(
            None
            if grad is None
            else grad.clone()
            if clones and at >= first_param
            else grad.detach()
            for at, grad in enumerate(self._grads)
        )


def _copy_into(static: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy ``tensor`` to the memory of a graph, unless it is that memory; another view of it, which
    the copy would overwrite, is read before."""
    if (static.data_ptr(), static.stride()) == (tensor.data_ptr(), tensor.stride()):
        return
    owners = [each.untyped_storage().data_ptr() for each in (static, tensor)]
    static.copy_(tensor.clone() if owners[0] == owners[1] else tensor)


def _buffer_like(
    tensor: torch.Tensor, number: int, buffers: dict[object, torch.Tensor]
) -> torch.Tensor:
    key = number, tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if key not in buffers:
        buffers[key] = torch.empty_like(tensor)
    return buffers[key]


def capture(
    passes: Sequence[Pass],
    steps: Sequence[tuple[int, int, bool]],
    pool: Any,
    *,
    allow_unused: bool,
    retain: bool,
    reuses: bool,
) -> None:
    """Capture ``passes`` in the order of ``steps``, as :func:`passes_of` returns them.

    With ``reuses`` the inputs and gradients of outputs of passes that are over are those of later
    ones, and so is the memory of outputs and gradients: of outputs from their backward on; of
    gradients from the end of their step on, but for the last, which leave the modules, from the end
    of the backward step after it on.
    """
    free: dict[object, list[Pass]] = {}
    buffers: dict[object, torch.Tensor] | None = {} if reuses else None
    waiting: list[Pass] = []
    for number, (module, sample, is_forward) in enumerate(steps):
        step = passes[sample]
        spare = free.setdefault(step.likeness, []) if reuses else []
        if is_forward:
            if spare:
                step.share_inputs(spare.pop())
            step.run_forward(pool)
            continue
        step.run_backward(pool, allow_unused=allow_unused, retain=retain, buffers=buffers)
        if reuses:
            spare.append(step)
            step.release_outputs()
            waiting.append(step)
            if (module - 1, sample - 1, False) not in steps[number + 1 : number + 2]:  # a step ends
                for earlier in waiting[:-1]:
                    earlier.release_grads()
                del waiting[:-1]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: Pass, clones: bool, *tensors: torch.Tensor) -> Any:
        ctx.captured, ctx.clones = captured, clones
        return captured.replay_forward(tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.captured.replay_backward(grads, clones=ctx.clones)
