"""The floors of the library, its names and its signatures, read from the source text.

A module imports only from lower floors, or from its own floor without a cycle. Nothing in
``fp8core`` imports a backend, and a backend sees only the public contract. A module that is on no
floor fails: the place to add it is ``FLOORS``.
"""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "fp8core": "fp8core",
    "backends": "fp8core_backends",
    "fp8core_pytest": "fp8core_pytest",
    "tests": "tests",
}

# Lowest first; a name is a module or a package of fp8core, `__init__` is `fp8core` itself.
FLOORS = (
    ("errors", "formats", "names", "reporting"),
    ("backend_api",),
    ("dispatch", "recipe", "torch_ops"),
    ("collectives", "tensors"),
    ("context",),
    ("chain",),
    ("modules",),
    ("conversion", "distributed", "functional", "inspection", "interchange", "ops", "training"),
    ("__init__",),
    ("integrations",),
    ("conformance",),
    ("doctor",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# What a backend may know of fp8core.
CONTRACT = {"fp8core.backend_api", "fp8core.errors", "fp8core.formats"}
# What a plug-in's entry point may know besides: a recipe that it registers is one of these values.
ENTRY_POINTS_KNOW = {"fp8core.recipe"}
# Optional third-party packages: the only imports that a function below the top floor may hold.
OPTIONAL = {"cudnn", "matplotlib", "pytest", "rich", "torch.utils.tensorboard", "torch_npu"}
OPTIONAL |= {"safetensors", "safetensors.torch"}
# torch's own, which takes a second to import and is loaded where there is a sharded tensor.
OPTIONAL |= {"torch.distributed.tensor"}
# torch's as well, for ranks whose GPUs read each other's memory.
OPTIONAL |= {"torch.distributed._symmetric_memory"}
VAGUE_NAMES = {"common", "helper", "helpers", "manager", "managers", "types", "util", "utils"}

# Where private names of torch are written: those of fp8core in one file, a backend's in its own.
PRIVATE_FILES = {"fp8core/torch_ops/private.py", "backends/*/private.py"}
# Names with an underscore that fp8core does not define and that any file may use.
USABLE = {
    **dict.fromkeys(("_asdict", "_fields", "_make", "_replace"), "a NamedTuple's public methods"),
    "_getframe": "of Python's sys, which documents it",
    "_version": "of torch.Tensor; torch's notes on autograd describe it",
    "_base": "of torch.Tensor; torch's notes on views describe it",
    "_parameters": "of torch.nn.Module: what getattr would compute by a parametrization",
    "_buffers": "of torch.nn.Module, as _parameters",
    "_modules": "of torch.nn.Module, as _parameters",
    "_extra_state": "a key of Transformer Engine's checkpoints",
    **dict.fromkeys(
        ("_FormatHelper", "_OverrideLinearPrecision", "_load_from_bytes", "_rebuild_tensor_v2"),
        "classes and functions that pickles of Transformer Engine's states name",
    ),
    "_orig_dtype": "of torchao's Float8TrainingTensor",
    **dict.fromkeys(("_apply_gate", "_is_expert_parallel"), "of transformers' experts"),
    "_keys_to_ignore_on_load_unexpected": "of transformers' models, which their authors set",
    **dict.fromkeys(("_bias", "_data", "_global_scale", "_packed"), "the end of a name"),
    "_scale_inv": "likewise",
    **dict.fromkeys(
        ("_fp8core_conversion", "_fp8core_frozen", "_fp8core_record", "_fp8core_splices"),
        "set by fp8core, by text",
    ),
    "_attn_implementation": "of transformers' configs: which attention a model computes by",
    "_TRANSFORMER_ENGINE_AVAILABLE": "of Lightning: whether it has looked for the package",
    "_fp8core_alias_finder": "a module's name in sys.modules, which begins with an underscore",
}

MAX_POSITIONAL = 6
# Functions that may take more than MAX_POSITIONAL positional arguments, each with its reason.
LONG_SIGNATURES = {
    **{
        f"fp8core.modules.layers.{name}.__init__": "Transformer Engine's order"
        for name in (
            *("linear.Linear", "grouped_linear.GroupedLinear", "layernorm_mlp.LayerNormMLP"),
            "layernorm_linear.LayerNormLinear",
        )
    },
    "fp8core.modules.sequences.inference.InferenceParams.__init__": "Transformer Engine's order",
    "fp8core.functional.quantizers.NVFP4Quantizer.__init__": "Transformer Engine's order",
    "fp8core.modules.sequences.rotary.apply_rotary_pos_emb": "Transformer Engine's order",
    "fp8core.modules.sequences.rotary.apply_fused_qkv_rotary_pos_emb": "Transformer Engine's order",
    "fp8core.integrations.transformer_engine.distributed.get_batch_on_this_cp_rank": "its order",
    "fp8core.modules.attention.DotProductAttention.__init__": "Transformer Engine's order",
    "fp8core.modules.attention.DotProductAttention.forward": "Transformer Engine's order",
    "fp8core_backends.ascend.attention.attention_backward": "what the operation takes",
    "fp8core_backends.reference.attention.attention_backward": "what the operation takes",
    "fp8core.modules.multihead_attention.MultiheadAttention.__init__": "Transformer Engine's order",
    "fp8core.modules.multihead_attention.MultiheadAttention.forward": "Transformer Engine's order",
    "fp8core.modules.transformer_layer.TransformerLayer.__init__": "Transformer Engine's order",
    "fp8core.modules.transformer_layer.TransformerLayer.forward": "Transformer Engine's order",
    "fp8core.modules.state.delayed.DelayedModule._load_from_state_dict": "overrides torch's",
    "fp8core.training.cpu_offload.get_cpu_offload_context": "Transformer Engine's order",
    "fp8core.training.cross_entropy.parallel_cross_entropy": "Transformer Engine's order",
    **{
        f"fp8core.training.optimizers.multi_tensor_{name}": "its order of arguments"
        for name in ("adam", "adam_capturable", "adam_fp8", "sgd")
    },
    "fp8core.training.permutation.moe_unpermute": "Transformer Engine's order",
    "fp8core.training.router.fused_topk_with_score_function": "Transformer Engine's order",
    "fp8core.backend_api.attention.attention_backward": "what the operation takes",
}

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """One Python file; ``name`` is what it is imported as, ``path`` is relative to the root."""

    name: str
    path: Path
    text: str
    tree: ast.Module


class Import(NamedTuple):
    """One imported module, with the line and whether a function holds the statement."""

    target: str
    line: int
    in_function: bool


class Sources(dict[str, Source]):
    """The files of a checkout by imported name."""

    def __init__(self) -> None:
        super().__init__()
        self._imports: dict[str, list[Import]] = {}

    @classmethod
    def read(cls, root: Path) -> Sources:
        found = cls()
        for folder, package in FOLDERS.items():
            for path in sorted((root / folder).rglob("*.py")):
                parts = path.relative_to(root / folder).with_suffix("").parts
                name = ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
                text = path.read_text(encoding="utf-8")
                found[name] = Source(name, path.relative_to(root), text, ast.parse(text))
        return found

    def shipped(self) -> list[Source]:
        """The files that are installed."""
        return [source for name, source in self.items() if not is_within(name, "tests")]

    def imports(self, source: Source) -> list[Import]:
        """Every import of ``source``; ``from package import module`` imports the module."""
        if source.name not in self._imports:
            self._imports[source.name] = [
                Import(target, getattr(node, "lineno", 0), in_function)
                for node, in_function in nodes(source.tree)
                for target in self.targets(node)
            ]
        return self._imports[source.name]

    def targets(self, node: ast.AST) -> list[str]:
        match node:
            case ast.Import(names=names):
                return [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                inside = [f"{module}.{alias.name}" for alias in names]
                return sorted({name if name in self else module for name in inside})
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                return [target]
        return []


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def unit(name: str) -> str:
    """First name below the top-level package: the module, package or backend it belongs to."""
    return name.split(".")[1] if "." in name else "__init__"


def part(name: str) -> str:
    """The module or room, of those inside a package of fp8core, that a name belongs to."""
    return ".".join(name.split(".")[:3])


def nodes(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node of a tree, and whether a function holds it."""
    waiting = [(node, in_function)]
    while waiting:
        node, in_function = waiting.pop()
        yield node, in_function
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        waiting += [(child, in_function) for child in ast.iter_child_nodes(node)][::-1]


@functools.cache  # each rule asks for all
def walked(tree: ast.Module) -> list[ast.AST]:
    return [*ast.walk(tree)]


def functions(tree: ast.Module) -> dict[str, Function]:
    """Every function and method of a file by qualified name."""

    def collect(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # which holds no statement
                continue
            name = prefix
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                # An overload or a property's setter shares the name; both are kept.
                yield f"{prefix}{child.name}:{child.lineno}", child
            yield from collect(child, name)

    return dict(collect(tree, ""))


def floors(sources: Sources) -> Iterator[str]:
    """Every module of fp8core is on a floor and imports nothing from a higher one."""
    for source in sources.shipped():
        if not is_within(source.name, "fp8core"):
            continue
        floor = FLOOR_OF.get(unit(source.name))
        if floor is None:
            yield (
                f"{source.path}: '{unit(source.name)}' is on no floor; add it to FLOORS in "
                "tests/test_layering.py, as low as its imports allow"
            )
            continue
        for item in sources.imports(source):
            if is_within(item.target, "fp8core_backends"):
                yield f"{source.path}:{item.line}: fp8core never imports fp8core_backends"
            elif is_within(item.target, "fp8core") and not is_short_name(source, item):
                above = FLOOR_OF.get(unit(item.target), -1)  # an unknown one is reported by itself
                if above > floor:
                    yield (
                        f"{source.path}:{item.line}: floor {floor} imports {item.target} "
                        f"of floor {above}"
                    )


def is_short_name(source: Source, item: Import) -> bool:
    """Whether the import tells a type checker alone what a short name of a framework stands for."""
    return source.name == "fp8core" and is_within(item.target, "fp8core.integrations")


def cycles(sources: Sources) -> Iterator[str]:
    """Imports run in no circle: of modules, of packages of one floor, of rooms of a package."""
    modules: dict[str, set[str]] = {}
    units: dict[str, set[str]] = {}
    parts: dict[str, set[str]] = {}
    for source in sources.shipped():
        package = source.name.partition(".")[0]
        for item in sources.imports(source):
            # At the top, an import inside a function is how the command line loads on demand.
            is_late = item.in_function or is_short_name(source, item)
            if is_late or not is_within(item.target, package):
                continue
            modules.setdefault(source.name, set()).add(item.target)
            if unit(item.target) != unit(source.name):
                units.setdefault(f"{package}.{unit(source.name)}", set()).add(
                    f"{package}.{unit(item.target)}"
                )
            elif len({part(source.name), part(item.target), f"{package}.{unit(item.target)}"}) == 3:
                parts.setdefault(part(source.name), set()).add(part(item.target))
    for graph in (modules, units, parts):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            yield f"import cycle: {' -> '.join(reversed(error.args[1]))}"
            return  # a circle of modules is often one of packages too


def backends(sources: Sources) -> Iterator[str]:
    """A backend imports the public contract and itself; no backend imports another."""
    for source in sources.shipped():
        if not is_within(source.name, "fp8core_backends"):
            continue
        for item in sources.imports(source):
            where = f"{source.path}:{item.line}: {source.name} imports {item.target}"
            is_entry_point = source.path.name == "__init__.py"
            known = CONTRACT | ENTRY_POINTS_KNOW if is_entry_point else CONTRACT
            if is_within(item.target, "fp8core") and item.target not in known:
                yield f"{where}; a backend may import only {', '.join(sorted(known))}"
            if is_within(item.target, "fp8core_backends") and unit(item.target) != unit(
                source.name
            ):
                yield f"{where}; a backend imports no other"


def import_places(sources: Sources) -> Iterator[str]:
    """Imports are absolute and at the top of the file, except optional packages."""
    for source in sources.shipped():
        for node in walked(source.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{source.path}:{node.lineno}: relative import"
        floor = FLOOR_OF.get(unit(source.name), 0)
        on_top = is_within(source.name, "fp8core") and floor > FLOOR_OF["__init__"]
        on_top |= is_within(source.name, "fp8core_pytest")  # every pytest run imports it
        for item in sources.imports(source):
            package = item.target.partition(".")[0]
            allowed = bool({package, item.target} & OPTIONAL) or (on_top and package == "fp8core")
            if item.in_function and not allowed:
                yield f"{source.path}:{item.line}: import of {item.target} inside a function"


def faces(sources: Sources) -> Iterator[str]:
    """The names that other rooms and backends may use are listed in a room's face alone."""
    for source in sources.shipped():
        if source.path.name == "__init__.py":
            continue
        if any(isinstance(node, ast.Name) and node.id == "__all__" for node in walked(source.tree)):
            yield f"{source.path}: __all__ in a module that is no room's face"


def names(sources: Sources) -> Iterator[str]:
    """A file is named for what it holds."""
    for source in sources.values():
        for part in source.path.with_suffix("").parts:
            if part.strip("_") in VAGUE_NAMES:
                yield f"{source.path}: '{part}' says nothing about what is inside"


def signatures(sources: Sources) -> Iterator[str]:
    """A caller can tell what each positional argument is."""
    for source in sources.values():
        for key, function in functions(source.tree).items():
            name = f"{source.name}.{key.partition(':')[0]}"
            where = f"{source.path}:{function.lineno}: {name}"
            is_long = num_positional(function) > MAX_POSITIONAL
            if is_long and name not in LONG_SIGNATURES:
                yield (
                    f"{where} takes {num_positional(function)} positional arguments, at most "
                    f"{MAX_POSITIONAL}; make the rest keyword-only"
                )
            if not is_long and name in LONG_SIGNATURES:
                yield f"{where} needs no entry in LONG_SIGNATURES; remove it"


def private_names(sources: Sources) -> Iterator[str]:
    """A private name of torch is written in private.py alone, where its purpose is stated."""
    shipped = sources.shipped()
    known = USABLE.keys() | {name for source in shipped for name in defined(source.tree)}
    for source in shipped:
        if any(source.path.match(pattern) for pattern in PRIVATE_FILES):
            continue
        for name, line in torch_names(source.tree, known):
            yield (
                f"{source.path}:{line}: '{name}' is private to torch; give it a name and a purpose "
                "in fp8core/torch_ops/private.py, or in the private.py of the backend"
            )


def torch_names(tree: ast.Module, known: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the private names in a file that are torch's, or of nobody ``known``, with lines."""
    from_torch = {"torch"}
    for node in walked(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if is_within(f"{module}{alias.name}", "torch"):
                    from_torch.add(alias.asname or alias.name)
                    if has_private_part(f"{module}{alias.name}"):
                        yield f"{module}{alias.name}", node.lineno
    for node in walked(tree):
        if isinstance(node, ast.Attribute) and has_private_part(node.attr):
            path = ast.unparse(node)
            is_torch = path.partition(".")[0] in from_torch
            if (is_torch and not path.startswith("torch.ops.aten.")) or node.attr not in known:
                yield path, node.lineno
        elif isinstance(node, ast.Constant):
            text = str(node.value)
            if text.isidentifier() and has_private_part(text) and text not in known:
                yield text, node.lineno


def has_private_part(path: str) -> bool:
    """Return whether a dotted name has a part with one underscore in front."""
    return any(part[0] == "_" != part[1:2] for part in path.split(".") if part.strip("_"))


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file gives to functions, classes, variables, slots and attributes."""
    for node in walked(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                for item in ast.walk(value):
                    if isinstance(item, ast.Constant):
                        yield str(item.value)


def num_positional(function: Function) -> int:
    """Arguments that can be passed by position, ``self`` and ``cls`` not counted."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return len(arguments) - (bool(arguments) and arguments[0].arg in ("self", "cls"))


RULES: tuple[Callable[[Sources], Iterator[str]], ...] = (
    floors,
    cycles,
    backends,
    import_places,
    faces,
    names,
    signatures,
    private_names,
)


@pytest.fixture(scope="module")
def checkout() -> Iterator[Sources]:
    """All files, without Python's collector, which would visit each new tree many times."""
    gc.disable()
    yield Sources.read(ROOT)
    walked.cache_clear()
    gc.enable()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_checkout_obeys(rule: Callable[[Sources], Iterator[str]], checkout: Sources) -> None:
    assert checkout.shipped(), f"no sources under {ROOT}"
    problems = list(rule(checkout))
    assert not problems, "\n".join(["", *problems])


PLANTED = {
    "inner_list": (
        faces,
        {"fp8core/recipe/named.py": "__all__ = ['Recipe']"},
        "named.py: __all__ in a module that is no room's face",
    ),
    "upward": (floors, {"fp8core/errors.py": "import fp8core.chain"}, "errors.py:1: floor 0"),
    "upward_symbol": (floors, {"fp8core/recipe.py": "from fp8core import Linear"}, "of floor 8"),
    "upward_submodule": (
        floors,
        {"fp8core/chain/run.py": "from fp8core import modules", "fp8core/modules/__init__.py": ""},
        "floor 5 imports fp8core.modules of floor 6",
    ),
    "type_checking": (
        floors,
        {"fp8core/recipe/plan.py": "if TYPE_CHECKING:\n    import fp8core.chain.linear"},
        "plan.py:2: floor 2",
    ),
    "no_floor": (floors, {"fp8core/novelty/x.py": ""}, "'novelty' is on no floor; add it to"),
    "backend": (floors, {"fp8core/doctor.py": "import fp8core_backends.cuda"}, "never imports"),
    "backend_by_name": (
        floors,
        {"fp8core/doctor.py": "importlib.import_module('fp8core_backends.cuda')"},
        "never imports",
    ),
    "module_cycle": (
        cycles,
        {
            "fp8core/dispatch/select.py": "from fp8core.dispatch import table",
            "fp8core/dispatch/table.py": "from fp8core.dispatch.select import choose",
        },
        "import cycle: fp8core.dispatch.",
    ),
    "package_cycle": (
        cycles,
        {
            "fp8core/recipe.py": "import fp8core.dispatch.plugins",
            "fp8core/dispatch/plugins.py": "",
            "fp8core/dispatch/select.py": "import fp8core.recipe",
        },
        "import cycle: fp8core.",
    ),
    "inner_cycle": (
        cycles,
        {
            "fp8core/modules/calls/bind.py": "import fp8core.modules.state.delayed",
            "fp8core/modules/state/delayed.py": "",
            "fp8core/modules/state/loading.py": "import fp8core.modules.run",
            "fp8core/modules/run.py": "from fp8core.modules.calls import base",
            "fp8core/modules/calls/base.py": "",
        },
        "import cycle: fp8core.modules.",
    ),
    "beyond_contract": (
        backends,
        {"backends/cuda/gemm.py": "from fp8core.recipe import LinearPlan"},
        "a backend may import only",
    ),
    "other_backend": (
        backends,
        {"backends/cuda/gemm.py": "import fp8core_backends.reference"},
        "a backend imports no other",
    ),
    "relative": (import_places, {"fp8core/chain/norm.py": "from . import x"}, "relative import"),
    "late": (import_places, {"fp8core/chain/run.py": "def f():\n    import json"}, "run.py:2:"),
    "vague_file": (names, {"fp8core/chain/_utils.py": ""}, "'_utils' says nothing"),
    "vague_folder": (names, {"backends/cuda/common/gemm.py": ""}, "'common' says nothing"),
    "long_signature": (
        signatures,
        {"fp8core/chain/run.py": "class A:\n    def f(self, a, b, c, d, e, g, h): pass"},
        "A.f takes 7 positional arguments",
    ),
    "stale_waiver": (
        signatures,
        {"fp8core/modules/layers/linear.py": "class Linear:\n    def __init__(self, a): pass"},
        "needs no entry in LONG_SIGNATURES",
    ),
    "private_import": (
        private_names,
        {"fp8core/chain/run.py": "from torch._guards import CompileContext"},
        "run.py:1: 'torch._guards.CompileContext' is private to torch",
    ),
    "private_import_renamed": (
        private_names,
        {"fp8core/conformance/calls.py": "from torch.utils import _pytree as pytree"},
        "calls.py:1: 'torch.utils._pytree' is private to torch",
    ),
    "private_attribute": (
        private_names,
        {"backends/cuda/stream.py": "import torch\ntask = torch.nn.Module._call_impl"},
        "stream.py:2: 'torch.nn.Module._call_impl' is private to torch",
    ),
    "private_attribute_of_an_import": (
        private_names,
        {
            "fp8core/chain/run.py": "from torch.autograd import forward_ad as ad\nad._level",
            "fp8core/chain/shape.py": "_level = 1",
        },
        "run.py:2: 'ad._level' is private to torch",
    ),
    "private_attribute_of_an_object": (
        private_names,
        {"fp8core/tensors/values.py": "def f(func):\n    return func._schema"},
        "values.py:2: 'func._schema' is private to torch",
    ),
    "private_attribute_by_text": (
        private_names,
        {"fp8core/modules/models/frozen.py": "getattr(parameter, '_fsdp_flattened', False)"},
        "frozen.py:1: '_fsdp_flattened' is private to torch",
    ),
}


def plant(root: Path, files: dict[str, str]) -> Sources:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Sources.read(root)


@pytest.mark.parametrize("case", PLANTED)
def test_planted_violation_is_reported_once(case: str, tmp_path: Path) -> None:
    rule, files, message = PLANTED[case]
    problems = list(rule(plant(tmp_path, files)))
    assert problems
    assert all(message in problem for problem in problems)


def test_allowed_imports_are_not_reported(tmp_path: Path) -> None:
    sources = plant(
        tmp_path,
        {
            "fp8core/__main__.py": "def main():\n    import fp8core.cli.demo",
            "fp8core/cli/demo/__init__.py": "def show():\n    from rich.table import Table",
            "fp8core/recipe/named.py": "from fp8core.recipe.plan import X\nimport fp8core.formats",
            "fp8core/recipe/plan.py": "import torch",
            "fp8core/modules/layers/linear.py": "from fp8core.modules import base",
            "fp8core/modules/calls/base.py": "from fp8core.chain import run",
            "fp8core/chain/run.py": "",
            "backends/cuda/gemm.py": "from fp8core_backends.cuda import load\n"
            "from fp8core.backend_api import GemmDesc",
            "backends/cuda/load.py": "def f(a, b, c, d, e, g, *, h): pass",
            "backends/cuda/private.py": "import torch\nscaled_mm = torch._scaled_mm",
            "fp8core/torch_ops/private.py": "from torch._guards import CompileContext",
            "fp8core/tensors/weights.py": "import torch\n_aten = torch.ops.aten\n"
            "def _to_copy(x):\n    return x._version, x._to_copy, torch.ops.aten._to_copy",
        },
    )
    assert [problem for rule in RULES for problem in rule(sources)] == []
