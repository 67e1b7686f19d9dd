"""How quantized weights are laid out in files: one entry of :data:`LAYOUTS` for each kind.

A weight ``[n, k]`` is stored as codes and scales under names that follow from its own. The values
are ``codes * scale`` of the element's block, with one scale more over the tensor in NVFP4, by which
is divided. Blocks at the ends may be partial. Sources: DeepSeek-V3, README_WEIGHTS.md;
compressed-tensors 0.20, compressors/; transformers 5.23, integrations/finegrained_fp8.py.

Experts have a tensor each in a file, and one parameter in a model:

=====================================  =================================================
parameter of transformers 5            in files, for expert ``e`` of ``[0, experts)``
=====================================  =================================================
``experts.gate_up_proj [e, 2 n, k]``   ``experts.e.gate_proj.weight [n, k]``, then
                                       ``up_proj``; of Mixtral ``w1``, then ``w3``
``experts.down_proj [e, k, n]``        ``experts.e.down_proj.weight``; of Mixtral ``w2``
=====================================  =================================================

Mixtral's files say ``block_sparse_moe`` where the model says ``mlp``. Source: transformers 5.23,
conversion_mapping.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core import formats
from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import OperandError, RecipeError, UnsupportedError, checked_choice
from fp8core.interchange.checkpoints.files import Header
from fp8core.modules.models.inventory import experts_of

Block: TypeAlias = "tuple[int, int]"

CODES = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
"""The element's format by safetensors' name of its dtype."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to store a weight.

    Attributes:
        name: in messages and reports; its first word is compressed-tensors' name of the format.
        method: the ``quant_method`` of the config.
        element: the element's format.
        blocks: the sizes of the blocks, as in OperandSpec; None for any two sizes.
        scale_format: of the scales, as in OperandSpec.
        scheme: fields of compressed-tensors' scheme for weights and for activations, None for
            those in high precision: NVFP4's would need a scale from a calibration.
    """

    name: str
    method: str
    element: str
    blocks: Block | None
    scale_format: str
    scheme: tuple[Mapping[str, Any], Mapping[str, Any] | None] | None = None

    def accepts(self, spec: OperandSpec) -> bool:
        """Say whether codes quantized as ``spec`` can be stored like this."""
        if (spec.format, spec.scale_format) != (self.element, self.scale_format):
            return False
        if spec.row_scaled or spec.transform is not None:
            return False
        if self.blocks is None:
            return 0 not in spec.block
        # A block of several rows is stored as as many equal blocks of one row.
        is_taller = 0 not in spec.block and self.blocks == (1, spec.block[1])
        return spec.block == self.blocks or is_taller

    def config(
        self, spec: OperandSpec, left: list[str], *, weights_alone: bool = False
    ) -> dict[str, Any]:
        """Return the ``quantization_config``; the modules ``left`` are in high precision, and with
        ``weights_alone`` activations too, which ``fp8`` has no word for."""
        if self.method == "fp8":
            return self._fp8_config(spec, left)
        assert self.scheme is not None
        weights, activations = self.scheme
        activations = None if weights_alone else activations
        file_format = self.name.partition(" ")[0]
        is_block = weights["strategy"] == "block"
        blocks = {"block_structure": list(spec.block)} if is_block else {}
        groups = {"group_size": spec.block[1]} if is_block else {}
        group = {
            "targets": ["Linear"],
            "weights": {**weights, **blocks, "dynamic": False},
            "input_activations": None if activations is None else {**activations, **groups},
            "output_activations": None,
            "format": file_format,
        }
        return {
            "quant_method": self.method,
            "format": file_format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": left,
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
        }

    def _fp8_config(self, spec: OperandSpec, left: list[str]) -> dict[str, Any]:
        is_power_of_two = spec.power_of_two or self.scale_format == "e8m0"
        block = self.blocks if self.scale_format == "e8m0" else spec.block
        return {
            "quant_method": "fp8",
            "fmt": spec.format,
            "activation_scheme": "dynamic",
            "weight_block_size": None if block is None or 0 in block else list(block),
            **({"scale_fmt": "ue8m0"} if is_power_of_two and block != (0, 0) else {}),
            # transformers reads the first, vLLM the second.
            "modules_to_not_convert": left,
            "ignored_layers": left,
        }


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
_TOKEN = {**_FP8, "strategy": "token", "dynamic": True}
_E4M3 = "torch.float8_e4m3fn"


def _group(first: Mapping[str, Any], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a scheme whose activations are grouped as its weights, and dynamic."""
    return {**first, **more}, {**first, **more, "dynamic": True}


LAYOUTS = (
    Layout("fp8 block", "fp8", "e4m3", None, "float32"),
    Layout("fp8 tensor", "fp8", "e4m3", (0, 0), "float32"),
    Layout("fp8 microscaling", "fp8", "e4m3", (1, 32), "e8m0"),
    Layout(
        *("float-quantized tensor", "compressed-tensors", "e4m3", (0, 0), "float32"),
        scheme=({**_FP8, "strategy": "tensor"}, _TOKEN),
    ),
    Layout(
        *("float-quantized channel", "compressed-tensors", "e4m3", (1, 0), "float32"),
        scheme=({**_FP8, "strategy": "channel"}, _TOKEN),
    ),
    Layout(
        *("float-quantized block", "compressed-tensors", "e4m3", None, "float32"),
        scheme=({**_FP8, "strategy": "block"}, {**_FP8, "strategy": "group", "dynamic": True}),
    ),
    Layout(
        *("mxfp8-quantized", "compressed-tensors", "e4m3", (1, 32), "e8m0"),
        scheme=_group(_FP8, strategy="group", group_size=32, scale_dtype="torch.uint8"),
    ),
    Layout(
        *("nvfp4-pack-quantized", "compressed-tensors", "e2m1", (1, 16), "e4m3"),
        scheme=({**_FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": _E4M3}, None),
    ),
)
"""The layouts, the first that accepts a spec is its default."""

METHODS = tuple(dict.fromkeys(layout.method for layout in LAYOUTS))
"""The names of quantization methods that files may state."""


def layout_of(spec: OperandSpec, method: str | None = None) -> Layout:
    """Return the layout of weights quantized as ``spec``, of ``method`` if one is given.

    Raises:
        RecipeError: an unknown method.
        UnsupportedError: no layout of other libraries holds such codes.
    """
    checked_choice("save_pretrained", "method", method, (*METHODS, None), RecipeError)
    for layout in LAYOUTS:
        if method in (None, layout.method) and layout.accepts(spec):
            return layout
    methods = [layout.method for layout in LAYOUTS if layout.accepts(spec)]
    near = f" method={methods[0]!r} stores them." if methods else ""
    raise UnsupportedError(
        f"weights quantized as {spec} in a file of {method or 'any method'}: none of its layouts "
        f"holds them.{near} Layouts: {', '.join(layout.name for layout in LAYOUTS)}; elements are "
        f"e4m3, or e2m1 in NVFP4."
    )


class Stored(NamedTuple):
    """The names of one weight's tensors in the files: codes, scales, and the tensor's scale."""

    codes: str
    scale: str
    outer: str | None = None


def stored_names(name: str, headers: Mapping[str, Header]) -> Stored | None:
    """Return the tensors of the weight ``name``; None if it is stored in high precision, or not.

    Raises:
        OperandError: there are codes without scales, or scales without codes.
    """
    # Some files leave out the last word: "layers.0.fc1.scale" of "layers.0.fc1.weight".
    bare = name.removesuffix("weight") if name.endswith("weight") else f"{name}_"
    scales = [f"{name}_scale_inv", f"{name}_scale", f"{bare}scale", f"{bare}qscale_weight"]
    present = [scale for scale in dict.fromkeys(scales) if scale in headers]
    packed = f"{name}_packed"
    codes = packed if packed in headers else name
    is_coded = codes in headers and (codes == packed or headers[codes].dtype in CODES)
    if not is_coded:
        return None
    if len(present) != 1:
        raise OperandError(
            f"{codes!r} holds codes of {headers[codes].dtype}, and has {len(present)} scales: "
            f"expected one of {', '.join(scales)}."
        )
    outer = f"{name}_global_scale"
    if (codes == packed) != (outer in headers):
        raise OperandError(
            f"{codes!r} is stored {'without' if codes == packed else 'with'} {outer}."
        )
    return Stored(codes, present[0], outer if codes == packed else None)


def grid(shape: tuple[int, int], block: Block) -> tuple[int, int]:
    """Return how many blocks a matrix of ``shape`` has along each dimension; 0 is all of it."""
    counts = [-(-size // step) if step else 1 for size, step in zip(shape, block, strict=True)]
    return counts[0], counts[1]


def expanded(scale: torch.Tensor, block: Block, rows: int, target: Block) -> torch.Tensor:
    """Return the grid of scales of ``block`` as that of ``target``, whose blocks are lower."""
    if block == target or target[0] != 1:
        return scale
    return scale.repeat_interleave(block[0], 0)[:rows]


def file_tensors(
    layout: Layout, name: str, operand: Operand, spec: OperandSpec, shape: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Return the tensors that a file holds for the weight ``name``, without those of padding."""
    rows, columns = shape
    assert operand.scale_inv is not None
    codes_name, scale_name = name, f"{name}_{'scale_inv' if layout.method == 'fp8' else 'scale'}"
    if layout.element == "e4m3":
        codes = operand.data[:rows, :columns].contiguous()
        codes = codes.view(formats.by_name("e4m3").torch_dtype or torch.uint8)
    else:
        codes_name, codes = f"{name}_packed", operand.data[:rows, : columns // 2]
    block = layout.blocks or spec.block
    counts = grid(shape, block)
    scale = expanded(operand.scale_inv, spec.block, rows, block)[: counts[0], : counts[1]]
    if layout.blocks == (0, 0):
        scale = scale.reshape(() if layout.method == "fp8" else (1,))
    if layout.scale_format == "e4m3":
        scale = scale.contiguous().view(torch.float8_e4m3fn)
    tensors = {codes_name: codes.contiguous(), scale_name: scale.contiguous()}
    if operand.global_scale_inv is not None:
        tensors[f"{name}_global_scale"] = _divisor(operand.global_scale_inv).reshape(1)
    return tensors


def _divisor(scale_inv: torch.Tensor) -> torch.Tensor:
    """Return the float32 whose reciprocal is ``scale_inv``, or the nearest one to it."""
    ones = torch.ones_like(scale_inv)
    guess = ones / scale_inv
    for direction in (math.inf, -math.inf):
        neighbour = torch.nextafter(guess, torch.full_like(guess, direction))
        is_better = ((ones / guess) != scale_inv) & ((ones / neighbour) == scale_inv)
        guess = torch.where(is_better, neighbour, guess)
    return guess


_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
    "up_proj": (("up_proj",), ("w1",)),
}
_PREFIXES = ((".mlp.", ".mlp."), (".mlp.", ".block_sparse_moe."))
# The model types of transformers whose files have the last ways of these.
_MIXTRALS = ("mixtral", "minimax", "minimax_m2")


class Piece(NamedTuple):
    """An entry of a file: a tensor of the model, or rows of an expert's matrix.

    ``name`` is that of the weight in the file, ``target`` the model's; ``place`` is the expert, the
    first row and the number of rows, None for the whole tensor.
    """

    name: str
    target: str
    shape: tuple[int, ...]
    place: tuple[int, int, int] | None = None


def pieces_of(name: str, shape: Sequence[int], headers: Mapping[str, Header]) -> list[Piece]:
    """Return the pieces of the model's tensor ``name`` in the file; empty if the file has none.

    Pieces of experts are complete, whether the file has each of them or not.
    """
    for ours, theirs in _PREFIXES:
        if _is_in(name.replace(ours, theirs), headers):
            return [Piece(name.replace(ours, theirs), name, tuple(shape))]
    for names in _by_expert(name, shape):
        if any(_is_in(piece.name, headers) for piece in names):
            return names
    return []


def holds_experts(module: torch.nn.Module) -> bool:
    """Say whether ``module`` holds the weights of experts as the table of this module has them."""
    experts = experts_of(module)
    if experts is None or experts.is_transposed:
        return False
    return bool(getattr(module, "is_concatenated", True))


class Naming:
    """How the files of ``model`` name its tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        self._is_mixtral = getattr(config, "model_type", None) in _MIXTRALS

    def of(self, name: str) -> str:
        """Return the name in files of a tensor, or of a module, of the model."""
        if not self._is_mixtral:
            return name
        return f"{name}.".replace(*_PREFIXES[-1]).removesuffix(".")

    def pieces(self, name: str, shape: Sequence[int]) -> list[Piece]:
        """Return the pieces of a parameter of experts; nothing if it has another name or shape."""
        ways = list(_by_expert(name, shape))
        return ways[-1 if self._is_mixtral else 0] if ways else []


def _is_in(name: str, headers: Mapping[str, Header]) -> bool:
    return name in headers or stored_names(name, headers) is not None


def _by_expert(name: str, shape: Sequence[int]) -> Iterator[list[Piece]]:
    """Yield the pieces of a parameter of experts under each way to name them."""
    prefix, _, last = name.rpartition(".")
    if len(shape) != 3 or last not in _PARTS or not prefix.endswith("experts"):
        return
    count, rows, columns = shape
    for parts in _PARTS[last]:
        if rows % len(parts):
            continue
        size = rows // len(parts)
        for ours, theirs in _PREFIXES:
            start = prefix.replace(ours, theirs)
            yield [
                Piece(
                    f"{start}.{expert}.{part}.weight",
                    name,
                    (size, columns),
                    (expert, at * size, size),
                )
                for expert in range(count)
                for at, part in enumerate(parts)
            ]
