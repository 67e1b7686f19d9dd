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
import weakref
from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core.tensors.saving import set_note

__all__ = ["ManualOffloadSynchronizer", "get_cpu_offload_context", "mark_not_offload"]


class Streams:
    """The stream of the copies on one device; without streams, copies happen at once."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self.is_async = device.type not in ("cpu", "meta")
        self._module: Any = None
        self._device = device
        self._stream = stream
        if self.is_async:
            self._module = torch.get_device_module(device)
            self._stream = stream or self._module.Stream(device=device)

    def event(self, *, of_copies: bool) -> Any:
        """Return an event that marks the point which a stream has reached; None without streams."""
        if not self.is_async:
            return None
        event = self._module.Event()
        event.record(self._stream if of_copies else self._current())
        return event

    def wait(self, event: Any, *, of_copies: bool) -> None:
        """Have the stream of the copies, or the current one, wait for ``event``."""
        if event is not None:
            (self._stream if of_copies else self._current()).wait_event(event)

    def copies(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch copies on the stream of the copies."""
        if not self.is_async:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def current(self) -> Any:
        """Return the current stream of the device; None without streams."""
        return self._current() if self.is_async else None

    def used_by_copies(self, tensor: torch.Tensor) -> None:
        """Keep the memory of ``tensor`` until the copies that are enqueued have run."""
        if self.is_async:
            tensor.record_stream(self._stream)

    def _current(self) -> Any:
        return self._module.current_stream(self._device)


class SavedTensor:
    """A tensor that autograd saved: as it is until it is released, then on the host, and back."""

    def __init__(self, tensor: torch.Tensor, streams: Streams, buffer: torch.Tensor | None) -> None:
        self._streams = streams
        self._device = tensor.device
        # Detached, or the node that saved its own result would hold itself; writes are counted for
        # both.
        self._original: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        self._ready = streams.event(of_copies=False)
        self._saved_on = streams.current()
        self._on_host = buffer
        self._copied: Any = None
        self._is_copied = False
        self._returned: tuple[torch.Tensor, Any] | None = None
        self._returned_on: Any = None  # the stream to which the memory goes back

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self._on_host.nbytes if self._on_host is not None and self._is_copied else 0

    def copy_out(self) -> None:
        """Enqueue the copy to the host."""
        if self._original is None or self._is_copied:
            return
        tensor = self._unwritten(self._original)
        if self._on_host is None:
            pins = self._streams.is_async
            self._on_host = torch.empty_like(tensor, device="cpu", pin_memory=pins)
        self._streams.wait(self._ready, of_copies=True)
        with self._streams.copies():
            self._on_host.copy_(tensor, non_blocking=True)
        self._copied = self._streams.event(of_copies=True)
        self._is_copied = True

    def release(self) -> None:
        """Free the memory on the device, for what is enqueued from now on."""
        if self._original is None or not self._is_copied:
            return
        self._unwritten(self._original)
        self._streams.wait(self._copied, of_copies=False)
        if self._saved_on != self._streams.current():
            # The memory goes back to the stream that the layer ran on, which has to wait as well.
            self._saved_on.wait_event(self._copied)
        self._original = None

    def copy_back(self) -> None:
        """Enqueue the copy to the device."""
        if self._original is not None or self._returned is not None:
            return
        assert self._on_host is not None
        tensor = torch.empty_like(self._on_host, device=self._device, pin_memory=False)
        # Its memory is free for what the current stream reaches, so the copy waits for that.
        self._streams.wait(self._streams.event(of_copies=False), of_copies=True)
        with self._streams.copies():
            tensor.copy_(self._on_host, non_blocking=True)
        self._streams.used_by_copies(tensor)
        self._returned = tensor, self._streams.event(of_copies=True)
        self._returned_on = self._streams.current()

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, for the current stream; a later backward pass of a graph
        that is retained copies it again."""
        if self._original is not None:
            return self._unwritten(self._original)
        self.copy_back()
        assert self._returned is not None
        (tensor, event), self._returned = self._returned, None
        self._streams.wait(event, of_copies=False)
        current = self._streams.current()
        if current != self._returned_on:
            tensor.record_stream(current)  # the other stream does not see who reads it
        return tensor

    def _unwritten(self, tensor: torch.Tensor) -> torch.Tensor:
        check_version(tensor, self._version)
        return tensor


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise as autograd does, which does not look where tensors are packed."""
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor {list(tensor.shape)} is at version {tensor._version}; expected "
            f"version {version} instead."
        )


MIN_ELEMENTS = 256 * 1024
"""Smaller tensors stay: their copies take longer to enqueue than they save."""

_resident: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Keep ``tensors``, and what else lies in their memory, on the device while they live."""
    for tensor in tensors:
        if tensor is not None:
            for part in tensor.tensors() if hasattr(tensor, "tensors") else (tensor,):
                _resident[part.untyped_storage().data_ptr()] = part


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Say whether a saved tensor is worth a copy: a large one that no parameter holds anyway."""
    if type(tensor) is not torch.Tensor or tensor.numel() < MIN_ELEMENTS:
        return False
    if isinstance(tensor._base, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_meta and tensor.untyped_storage().data_ptr() not in _resident


class Layer:
    """The tensors that a layer saved in one forward pass."""

    def __init__(self, buffers: list[torch.Tensor] | None) -> None:
        self.saved: list[SavedTensor] = []
        self._entries: dict[Any, SavedTensor] = {}
        self._buffers = buffers

    def push(self, tensor: torch.Tensor, streams: Streams) -> SavedTensor:
        """Return the entry of ``tensor``; a tensor that several nodes save has one."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = SavedTensor(tensor, streams, self._buffer_for(tensor))
            self.saved.append(entry)
        return entry

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return memory of the host that is kept from pass to pass, None for new memory."""
        if self._buffers is None:
            return None
        at = len(self.saved)
        if at == len(self._buffers):
            pins = tensor.device.type not in ("cpu", "meta")
            self._buffers.append(torch.empty_like(tensor, device="cpu", pin_memory=pins))
        buffer = self._buffers[at]
        fits = (buffer.shape, buffer.dtype, buffer.stride()) == (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        )
        return buffer if fits else None

    def copy_out(self) -> None:
        """Enqueue the copies to the host."""
        for tensor in self.saved:
            tensor.copy_out()

    def release(self) -> None:
        """Free the memory on the device."""
        self._entries.clear()
        for tensor in self.saved:
            tensor.release()

    def copy_back(self) -> None:
        """Enqueue the copies to the device; backward needs first what was saved last."""
        for tensor in reversed(self.saved):
            tensor.copy_back()


class Synchronizer:
    """The layers of a model, of the forward pass that runs or that ran last."""

    def __init__(self, num_layers: int, retains: bool, stream: Any) -> None:
        self.num_layers = num_layers
        self._stream = stream
        self._streams: dict[torch.device, Streams] = {}
        self._buffers: list[list[torch.Tensor] | None] = [
            [] if retains else None for _ in range(num_layers)
        ]
        self.current = num_layers - 1
        self.layers: list[Layer] = []

    def offloads(self, layer: int) -> bool:
        """Say whether what ``layer`` saves may be offloaded."""
        return True

    def enter(self) -> int:
        """Begin the next layer, and return its number; the first one begins a forward pass."""
        self.current = (self.current + 1) % self.num_layers
        if self.current == 0:
            self.layers = [Layer(buffers) for buffers in self._buffers]
        return self.current

    def give_up(self) -> None:
        """End a forward pass that failed: the next layer to begin is the first one of another."""
        self.current, self.layers = self.num_layers - 1, []

    def leave_backward(self, layers: list[Layer], layer: int) -> None:
        """Begin backward of ``layer`` of a forward pass."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd saves for ``tensor``."""
        if not (self.offloads(self.current) and is_offloaded(tensor)):
            return tensor.detach(), tensor._version
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = Streams(device, self._stream)
        return self.layers[self.current].push(tensor, self._streams[device])

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that autograd saved."""
        if isinstance(packed, SavedTensor):
            return packed.take()
        tensor: torch.Tensor = packed[0]
        check_version(tensor, packed[1])
        return tensor

    def get_offloaded_total_size_mb(self) -> float:
        """Return how much of the last forward pass lies on the host, MiB."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.saved) / 2**20


class DefaultSynchronizer(Synchronizer):
    """Offloads the first ``num_offloaded`` layers, in the schedule that the package describes."""

    def __init__(
        self, num_layers: int, num_offloaded: int, retains: bool, *, double_buffering: bool
    ) -> None:
        super().__init__(num_layers, retains, None)
        self._num_offloaded = num_offloaded
        self._on_device = num_layers - num_offloaded + double_buffering

    def offloads(self, layer: int) -> bool:
        """Say whether ``layer`` is one of the first."""
        return layer < self._num_offloaded

    def enter(self) -> int:
        """Begin the next layer: free the one whose time has come."""
        layer = super().enter()
        due = layer - self._on_device
        if due >= 0 and self.offloads(due):
            self.layers[due].release()
        return layer

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd saves for ``tensor``; its copy begins at once."""
        packed = super().pack(tensor)
        if isinstance(packed, SavedTensor):
            packed.copy_out()
        return packed

    def leave_backward(self, layers: list[Layer], layer: int) -> None:
        """Bring a layer back while backward of ``layer`` runs."""
        if layer == self.num_layers - 1:
            for resident in layers[: self._num_offloaded]:
                resident.release()
        due = layer - self._on_device + 1
        if 0 <= due < self._num_offloaded:
            layers[due].copy_back()


class ManualOffloadSynchronizer(Synchronizer):
    """Offloads the layers that the caller names, when the caller says so.

    ``get_cpu_offload_context(manual_synchronization=True)`` returns one. Layers are numbered from 0
    in the order of the forward pass that ran last.
    """

    def start_offload_layer(self, layer_id: int) -> None:
        """Enqueue the copies of a layer to the host."""
        self._layer(layer_id).copy_out()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Free the memory of a layer that is copied; the current stream waits for the copies."""
        self._layer(layer_id).release()

    def start_reload_layer(self, layer_id: int) -> None:
        """Enqueue the copies of a layer to the device."""
        self._layer(layer_id).copy_back()

    def _layer(self, layer_id: int) -> Layer:
        if not 0 <= layer_id < len(self.layers):
            raise OperandError(
                f"ManualOffloadSynchronizer: layer {layer_id} of {len(self.layers)}; expected one "
                f"that ran in the context."
            )
        return self.layers[layer_id]


class _OffloadContext(contextlib.ContextDecorator):
    """The context of one layer; the function that ends the layer has to be called before the next
    one begins."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        self.offload_synchronizer = synchronizer
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
        self.offload_synchronizer.enter()
        hooks = torch.autograd.graph.saved_tensors_hooks
        self._hooks = hooks(self.offload_synchronizer.pack, self.offload_synchronizer.unpack)
        self._hooks.__enter__()
        self._note = set_note(mark_not_offload)
        return self

    def __exit__(self, *error: Any) -> None:
        set_note(self._note)
        self._hooks.__exit__(*error)
        self._is_open = False
        if error[0] is not None:
            self.offload_synchronizer.give_up()

    def end_layer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer that ran last; its backward begins with this tensor."""
        node = tensor.grad_fn
        if node is not None:
            synchronizer = self.offload_synchronizer
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
