"""Writes te_signatures.json: parameter names, kinds and defaults of Transformer Engine's functions.

Names alone, read with ``ast`` from the wheel, which is neither imported nor installed::

    pip download --no-deps --only-binary :all: transformer_engine_cu13==2.20.2
    python -m tests.te_signatures transformer_engine_cu13-2.20.2-*.whl

A parameter is ``[name, kind, default]``; the default is its source text, null where there is none.
``self`` is left out. ``*args`` and ``**kwargs`` have the kinds ``var_positional`` and
``var_keyword``; a dataclass's fields are the parameters of its ``__init__``. A class without one of
its own has that of its base in the same file. Operations are called ``ops.NAME``.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias
from zipfile import ZipFile

TABLE = Path(__file__).with_suffix(".json")
FILES = {
    "pytorch/module/linear.py": ("Linear",),
    "pytorch/module/layernorm_linear.py": ("LayerNormLinear",),
    "pytorch/module/layernorm_mlp.py": ("LayerNormMLP",),
    "pytorch/module/grouped_linear.py": ("GroupedLinear",),
    "pytorch/module/layernorm.py": ("LayerNorm",),
    "pytorch/module/rmsnorm.py": ("RMSNorm",),
    "pytorch/attention/dot_product_attention/dot_product_attention.py": ("DotProductAttention",),
    "pytorch/attention/multi_head_attention.py": ("MultiheadAttention",),
    "pytorch/transformer.py": ("TransformerLayer",),
    "pytorch/quantization.py": (
        *("autocast", "fp8_autocast", "fp8_model_init", "quantized_model_init"),
        *("get_default_recipe", "DelayedScalingRequest"),
    ),
    "pytorch/distributed.py": ("checkpoint",),
    "pytorch/tensor/float8_tensor.py": ("Float8Quantizer", "Float8CurrentScalingQuantizer"),
    "pytorch/tensor/float8_blockwise_tensor.py": ("Float8BlockQuantizer",),
    "pytorch/tensor/mxfp8_tensor.py": ("MXFP8Quantizer",),
    "pytorch/tensor/nvfp4_tensor.py": ("NVFP4Quantizer",),
    "pytorch/attention/inference.py": ("InferenceParams",),
    "pytorch/attention/rope.py": (
        *("RotaryPositionEmbedding", "apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"),
    ),
    "pytorch/graph.py": ("make_graphed_callables",),
    "pytorch/permutation.py": (
        *("moe_permute", "moe_permute_with_probs", "moe_permute_and_pad_with_probs"),
        *("moe_unpermute", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"),
    ),
    "pytorch/cpu_offload.py": ("get_cpu_offload_context", "mark_not_offload"),
    "pytorch/cross_entropy.py": ("parallel_cross_entropy",),
    "pytorch/module/fp8_padding.py": ("Fp8Padding",),
    "pytorch/module/fp8_unpadding.py": ("Fp8Unpadding",),
    "pytorch/ops/linear.py": ("Linear",),
    "pytorch/ops/basic/bias.py": ("Bias",),
    "pytorch/ops/basic/dropout.py": ("Dropout",),
    "pytorch/ops/basic/quantize.py": ("Quantize",),
    "pytorch/ops/basic/add_extra_input.py": ("AddExtraInput",),
    "pytorch/ops/basic/swiglu.py": (
        *("SwiGLU", "ClampedSwiGLU", "SiTUGLU", "ScaledSwiGLU", "ScaledSiTUGLU"),
        "ScaledClampedQGeGLU",
    ),
    "pytorch/ops/basic/activation.py": (
        *("GELU", "GEGLU", "GLU", "QGELU", "QGEGLU", "ReLU", "ReGLU", "SReLU", "SReGLU", "SiLU"),
        *("ScaledSReLU", "ScaledTanhSReLU"),
    ),
    "pytorch/ops/basic/basic_linear.py": ("BasicLinear",),
    "pytorch/ops/basic/grouped_linear.py": ("GroupedLinear",),
    "pytorch/ops/basic/constant_scale.py": ("ConstantScale",),
    "pytorch/ops/basic/l2normalization.py": ("L2Normalization",),
    "pytorch/ops/basic/make_extra_output.py": ("MakeExtraOutput",),
    "pytorch/ops/basic/reshape.py": ("Reshape",),
    "common/recipe/__init__.py": (
        *("MMParams", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"),
        *("Float8BlockScaling", "NVFP4BlockScaling", "CustomRecipe"),
    ),
}
METHODS = ("__init__", "forward", "reset_parameters")
OPERATIONS = "pytorch/ops/"

Parameter: TypeAlias = tuple[str, str, str | None]
Definition: TypeAlias = ast.FunctionDef | ast.ClassDef


def parameters(function: ast.FunctionDef) -> Iterator[Parameter]:
    """Yield the parameters of ``function``, ``self`` excluded."""
    own = function.args
    positional = [*own.posonlyargs, *own.args]
    defaults = [None] * (len(positional) - len(own.defaults)) + list(map(ast.unparse, own.defaults))
    for argument, default in zip(positional, defaults, strict=True):
        if argument.arg != "self":
            yield argument.arg, "positional", default
    if own.vararg:
        yield own.vararg.arg, "var_positional", None
    for argument, value in zip(own.kwonlyargs, own.kw_defaults, strict=True):
        yield argument.arg, "keyword_only", None if value is None else ast.unparse(value)
    if own.kwarg:
        yield own.kwarg.arg, "var_keyword", None


def fields(definition: ast.ClassDef) -> Iterator[Parameter]:
    """Yield the fields of a dataclass in the order of its ``__init__``."""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, "positional", node.value and ast.unparse(node.value)


def signatures(definition: Definition) -> Iterator[tuple[str, list[Parameter]]]:
    """Yield name and parameters of a function, or of a class and its methods."""
    if isinstance(definition, ast.FunctionDef):
        yield definition.name, list(parameters(definition))
        return
    if any("dataclass" in ast.unparse(node) for node in definition.decorator_list):
        yield definition.name, list(fields(definition))
        return
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name in METHODS:
            suffix = "" if node.name == "__init__" else f".{node.name}"
            yield definition.name + suffix, list(parameters(node))


def constructor(name: str, top: Mapping[str, Definition]) -> Iterator[tuple[str, list[Parameter]]]:
    """Yield name and parameters of the operation ``name``, with the constructor of its base."""
    definition: Definition | None = top[name]
    while isinstance(definition, ast.ClassDef):
        found = dict(signatures(definition))
        if definition.name in found:
            yield f"ops.{name}", found[definition.name]
            return
        definition = next((top[n] for b in definition.bases if (n := ast.unparse(b)) in top), None)


def read(wheel: Path) -> dict[str, object]:
    """Return the table of ``wheel``.

    Raises:
        LookupError: it lacks one of the names.
    """
    found: dict[str, list[Parameter]] = {}
    with ZipFile(wheel) as archive:
        for file, names in FILES.items():
            tree = ast.parse(archive.read(f"transformer_engine/{file}"))
            top = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef))
            own = {node.name: node for node in top}
            if missing := set(names) - set(own):
                raise LookupError(f"{wheel.name}: {file} has no {sorted(missing)}")
            for name in names:
                is_operation = file.startswith(OPERATIONS)
                found.update(constructor(name, own) if is_operation else signatures(own[name]))
    return {"package": "transformer_engine_cu13", "version": wheel.name.split("-")[1], **found}


if __name__ == "__main__":
    table = read(Path(sys.argv[1]))
    lines = [f"  {json.dumps(key)}: {json.dumps(own)}" for key, own in table.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
