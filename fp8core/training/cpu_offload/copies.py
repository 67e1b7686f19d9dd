"""The copies of a saved tensor to the host and back, on a stream of their own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["SavedTensor", "Streams", "check_version"]


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
