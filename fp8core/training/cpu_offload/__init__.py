"""Tensors that layers save for backward, moved to the memory of the host and back.

The names and arguments are those of ``transformer_engine.pytorch``. Tensors of any layer that
autograd saves inside of the context are offloaded: activations, and the quantized inputs that
fp8core's layers save. The codes of their weights stay, as parameters do. Copies run on a stream of
their own beside the computation. On a device without streams, such as the CPU, the same steps copy
at once.

In the default schedule the first ``num_layers`` of ``model_layers`` are offloaded, each tensor as
soon as it is saved. With ``n = model_layers - num_layers`` the memory of layer i is free when layer
``i + n`` begins, which waits for its copies, and the layer comes back while backward of layer
``i + n - 1`` runs: so n layers are on the device at a time. With ``double_buffering`` there is one
more, ``n = model_layers - num_layers + 1``, and copies run beside the whole of a layer: where they
take longer than the layers compute, nothing else is waited for.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core.tensors.saving import set_note
from fp8core.training.cpu_offload.schedules import (
    DefaultSynchronizer,
    ManualOffloadSynchronizer,
    Synchronizer,
    mark_not_offload,
)

__all__ = ["ManualOffloadSynchronizer", "get_cpu_offload_context", "mark_not_offload"]


class _OffloadContext(contextlib.ContextDecorator):
    """The context of one layer; the function that ends the layer has to be called before the next
    one begins."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        self.synchronizer = synchronizer
        self._hooks: Any = None
        self._note: Any = None
        self._is_open = False

    def __enter__(self) -> _OffloadContext:
        if self._is_open:
            raise RuntimeError(
                "the context of get_cpu_offload_context was entered, and the layer in it is not "
                "ended: leave it, and call the second result with the layer's output."
            )
        self._is_open = True
        self.synchronizer.enter()
        hooks = torch.autograd.graph.saved_tensors_hooks
        self._hooks = hooks(self.synchronizer.pack, self.synchronizer.unpack)
        self._hooks.__enter__()
        self._note = set_note(mark_not_offload)
        return self

    def __exit__(self, *error: Any) -> None:
        set_note(self._note)
        self._hooks.__exit__(*error)
        self._is_open = False
        if error[0] is not None:
            self.synchronizer.give_up()

    def end_layer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer that ran last; its backward begins with this tensor."""
        node = tensor.grad_fn
        if node is not None:
            synchronizer = self.synchronizer
            layers, layer = synchronizer.layers, synchronizer.current

            def begin(grads: Any) -> None:
                synchronizer.leave_backward(layers, layer)

            node.register_prehook(begin)
        return tensor


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, ...]:
    """Return a context for a layer's forward, and a function to call with the layer's output::

        context, sync = fp8core.get_cpu_offload_context(True, num_layers=2, model_layers=4)
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)

    Tensors of at least 2**18 elements that autograd saves in the context are offloaded, except
    parameters and the codes of quantized weights, as in Transformer Engine. A saved tensor must not
    be written before it is copied.

    Args:
        enabled: without it, the context and the function do nothing.
        num_layers: how many layers are offloaded, the first ones; below ``model_layers``.
        model_layers: how many layers run in the context in a forward pass.
        offload_activations: offload what is saved; deprecated, as there is nothing else.
        offload_weights: deprecated, without effect.
        double_buffering: keep one more layer on the device, so that a layer's copies run beside the
            whole of another one; without effect beside ``manual_synchronization``.
        manual_synchronization: return a :class:`ManualOffloadSynchronizer` as well, and offload the
            layers that it is told to.
        retain_pinned_cpu_buffers: keep the memory on the host for the next forward pass, which must
            not begin before backward of this one; CUDA graphs need it.
        offload_stream: the stream of the copies; for manual synchronization.

    Raises:
        OperandError: numbers of layers that do not fit, nothing to offload, or a stream without
            manual synchronization.
    """
    owner = "get_cpu_offload_context"

    def identity(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    more: tuple[Any, ...] = (None,) if manual_synchronization else ()
    if not enabled:
        return contextlib.nullcontext(), identity, *more
    if not (offload_weights or offload_activations):
        raise OperandError(
            f"{owner}(offload_activations=False, offload_weights=False): expected something to "
            f"offload."
        )
    if offload_weights:
        text = "offload_weights has no effect: parameters stay on the device."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        if not offload_activations:
            return contextlib.nullcontext(), identity, *more
    if offload_stream is not None and not manual_synchronization:
        raise OperandError(
            f"{owner}(offload_stream=...): expected manual_synchronization=True beside it."
        )
    if model_layers < 1:
        raise OperandError(f"{owner}(model_layers={model_layers}): expected 1 or above.")
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream)
        context = _OffloadContext(manual)
        return context, context.end_layer, manual
    count = model_layers - 1 if num_layers is None else num_layers
    if not 0 <= count <= model_layers - 1:
        raise OperandError(
            f"{owner}(num_layers={num_layers}, model_layers={model_layers}): expected 0 to "
            f"{model_layers - 1}, as the last layer's tensors are needed at once."
        )
    synchronizer = DefaultSynchronizer(
        model_layers, count, retain_pinned_cpu_buffers, double_buffering=double_buffering
    )
    context = _OffloadContext(synchronizer)
    return context, context.end_layer
