"""The Transformer layer of torch's own modules, and the arguments of Transformer Engine's."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.benchmarks.layers_gpu.cases import EPS, Case

nvidia: Any
try:
    import nvidia  # the wheels of torch's libraries
except ImportError:
    nvidia = None

__all__ = [
    *("TorchTransformer", "attend", "attention_by_cudnn", "layer_arguments"),
    "use_cudnn_of_torch",
]


def use_cudnn_of_torch(environment: MutableMapping[str, str]) -> None:
    """Have every library of this process run the cuDNN that torch was built with; call it before
    Transformer Engine is imported.

    That one looks for a cuDNN in CUDNN_HOME and then in the CUDA toolkit, and is linked to parts of
    cuDNN, which the loader takes from the system where none is loaded. Another release of one part
    does not load beside torch's, or torch refuses the two in one process.
    """
    torch.backends.cudnn.version()  # loads it
    for folder in map(Path, nvidia.__path__ if nvidia is not None else ()):
        libraries = folder / "cudnn" / "lib"
        if libraries.is_dir():
            environment["CUDNN_HOME"] = str(libraries.parent)
            for part in sorted(libraries.glob("libcudnn*.so.*")):
                ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def attention_by_cudnn(device: torch.device) -> Iterator[None]:
    """Have torch's attention run by cuDNN, which is its fastest; else by its flash kernels.

    Nothing changes on other devices than GPUs.
    """
    if device.type != "cuda":
        yield
        return
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(kernels, set_priority=True):
        yield


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Return torch's attention of ``q [b, s, heads, d]``, ``k`` and ``v [b, s, groups, d]``."""
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        is_causal=is_causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


class TorchTransformer(torch.nn.Module):
    """A pre-LN Transformer layer ``[b, s, hidden]`` without dropout.

    ``linears`` are the projection to queries, keys and values, the one behind attention, and the
    two of the MLP.
    """

    def __init__(
        self,
        case: Case,
        norms: list[torch.nn.Module],
        linears: list[torch.nn.Module],
        activation: torch.nn.Module,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.qkv, self.proj, self.fc1, self.fc2 = linears
        self.activation = activation
        self._heads = [case.size.heads, case.size.groups, case.size.groups]
        self._head_dim = case.size.hidden // case.size.heads
        self._is_causal = case.layer.is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.qkv(self.norm1(x)).unflatten(-1, (-1, self._head_dim))
        q, k, v = packed.split(self._heads, dim=-2)
        x = x + self.proj(attend(q, k, v, is_causal=self._is_causal).flatten(-2))
        y: torch.Tensor = x + self.fc2(self.activation(self.fc1(self.norm2(x))))
        return y


def layer_arguments(case: Case, normalization: str) -> dict[str, Any]:
    """Return the arguments that make the layer, of Transformer Engine and of fp8core.

    Queries, keys and values have one weight, one after the other, so that each of them is a view of
    the projection.
    """
    size, layer = case.size, case.layer
    return {
        "hidden_size": size.hidden,
        "ffn_hidden_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_gqa_groups": size.groups,
        "layernorm_epsilon": EPS,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "self_attn_mask_type": "causal" if layer.is_causal else "no_mask",
        "normalization": normalization,
        "activation": layer.activation,
        "bias": layer.has_bias,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
        "attn_input_format": "bshd",
    }
