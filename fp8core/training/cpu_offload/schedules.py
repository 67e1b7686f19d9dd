"""When the layers of a model are copied to the host, freed and copied back."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core.training.cpu_offload.copies import SavedTensor, Streams, check_version
from fp8core.training.cpu_offload.selection import is_offloaded

__all__ = ["DefaultSynchronizer", "ManualOffloadSynchronizer", "Synchronizer"]


class Layer:
    """What one layer saved in one forward pass."""

    def __init__(self, buffers: list[torch.Tensor] | None) -> None:
        self.saved: list[SavedTensor] = []
        self._known: dict[Any, SavedTensor] = {}
        self._buffers = buffers

    def push(self, tensor: torch.Tensor, streams: Streams) -> SavedTensor:
        """Return the entry of ``tensor``; a tensor that several nodes save has one."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = SavedTensor(tensor, streams, self._buffer_for(tensor))
            self.saved.append(known)
        return known

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
        for one in self.saved:
            one.copy_out()

    def release(self) -> None:
        """Free the memory on the device."""
        self._known.clear()
        for one in self.saved:
            one.release()

    def copy_back(self) -> None:
        """Enqueue the copies to the device; backward needs first what was saved last."""
        for one in reversed(self.saved):
            one.copy_back()


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
        """Return what autograd holds for a tensor that it saves."""
        if not (self.offloads(self.current) and is_offloaded(tensor)):
            return tensor.detach(), tensor._version
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = Streams(device, self._stream)
        return self.layers[self.current].push(tensor, self._streams[device])

    def unpack(self, held: Any) -> torch.Tensor:
        """Return the tensor that autograd saved."""
        if isinstance(held, SavedTensor):
            return held.take()
        tensor: torch.Tensor = held[0]
        check_version(tensor, held[1])
        return tensor

    def get_offloaded_total_size_mb(self) -> float:
        """Return how much of the last forward pass lies on the host, MiB."""
        return sum(one.nbytes for layer in self.layers for one in layer.saved) / 2**20


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
        """Return what autograd holds for a tensor that it saves; its copy begins at once."""
        held = super().pack(tensor)
        if isinstance(held, SavedTensor):
            held.copy_out()
        return held

    def leave_backward(self, layers: list[Layer], layer: int) -> None:
        """Bring a layer back while backward of ``layer`` runs."""
        if layer == self.num_layers - 1:
            for one in layers[: self._num_offloaded]:
                one.release()
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
