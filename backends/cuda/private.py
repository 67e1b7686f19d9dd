"""Every private name of torch that this backend uses; all are in torch 2.11 and in torch 2.13.

Where a later torch lacks one of the first four, the public way next to its use takes its place and
costs more time on the host. The others raise an AttributeError at import; ``TorchDispatchMode``,
which sees each operator that torch runs within it, and ``apart_from_modes``, which hides them, an
ImportError.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

apart_from_modes = _disable_current_modes

Empty: TypeAlias = "Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]"
"""``empty(size, stride, dtype)``; a stride of 1 for a dimension of 1 will do."""

_guards: Any = getattr(torch._C._dynamo, "guards", None)

# Allocates on the current device. Torch's compiled code calls it: it parses no arguments and takes
# half the time of torch.empty_strided.
empty_strided: Empty | None = getattr(_guards, "_empty_strided_cuda", None)

# The index of the current device, without a look at whether CUDA is initialized.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# The address of torch's current stream on a device: 0.1 us instead of 1, as it makes no Stream.
raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Counts a write to each tensor of a sequence; the public function looks at the sequence first.
count_writes: Callable[[Sequence[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", increment_version
)

# A product of FP8 matrices by cuBLASLt.
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm

# cuDNN's attention with its statistics, and its gradients; the public function chooses a kernel by
# itself, and gives no statistics.
cudnn_attention: Callable[..., Any] = torch.ops.aten._scaled_dot_product_cudnn_attention.default
cudnn_attention_backward: Callable[..., Any] = (
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
)

# What reshape calls behind a copy: a view of new memory, which torch does not count as one.
view_of_copy: Callable[..., torch.Tensor] = torch.ops.aten._unsafe_view.default


def group_of(name: str) -> Any:
    """Return the process group ``name`` of this process."""
    groups: Any = torch.distributed.distributed_c10d
    return groups._resolve_process_group(name)


def store_of(name: str) -> Any:
    """Return the key-value store that the ranks of the process group ``name`` share."""
    groups: Any = torch.distributed.distributed_c10d
    return groups._get_process_group_store(group_of(name))


def timeout_of(name: str, device: torch.device) -> timedelta:
    """Return how long a collective of the process group ``name`` may take on ``device``."""
    timeout: timedelta = group_of(name)._get_backend(device).options._timeout
    return timeout


def _symmetric_memory() -> Any:
    # Takes 0.3 s to import, and only ranks that share memory need it.
    return importlib.import_module("torch.distributed._symmetric_memory")


def symmetric_empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory that the other ranks of a group may map, too."""
    memory: torch.Tensor = _symmetric_memory().empty(num_bytes, dtype=torch.uint8, device=device)
    return memory


def symmetric_handle(memory: torch.Tensor, group_name: str) -> Any:
    """Have the ranks of a group exchange such memory: a collective, which waits on the host."""
    return _symmetric_memory().rendezvous(memory, group_name)


def loaded_cudnn() -> int | None:
    """Return the release of the cuDNN in this process, such as 91900, None if there is none.

    torch's public function refuses one that is older than the one torch was built with.
    """
    try:
        release: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError:
        release = torch._C._cudnn.getVersionInt()
    return release
