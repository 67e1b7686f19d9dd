"""What the public modules show of themselves, and what they say of a name that they lack."""

from __future__ import annotations

import importlib.util
import pydoc
import sys
from pathlib import Path

import pytest

import fp8core
from fp8core.names import MOVED, SHORT
from tests import forked

MODULES = (
    "fp8core.backend_api",
    "fp8core.formats",
    "fp8core.functional",
    "fp8core.monitoring",
    "fp8core.ops",
    "fp8core.tensors.parameter",
    "fp8core.quantizers",
    "fp8core.recipe",
)


def test_dir_shows_the_public_names_alone() -> None:
    modules = {name: importlib.import_module(name) for name in MODULES}
    assert {name: dir(module) for name, module in modules.items()} == {
        name: sorted(module.__all__) for name, module in modules.items()
    }
    lacking = [
        (name, own)
        for name, module in modules.items()
        for own in dir(module)
        if not hasattr(module, own)
    ]
    assert lacking == []


def test_dir_of_the_package_shows_its_names_and_its_modules() -> None:
    modules = {"backend_api", "hookspecs", "monitoring", "plan", "quantizers"}
    assert modules <= {*dir(fp8core)}
    assert {*fp8core.__all__} <= {*dir(fp8core)}
    for name in {*dir(fp8core)} - {*fp8core.__all__}:
        assert getattr(fp8core, name).__name__ == f"fp8core.{SHORT.get(name, name)}"
    assert not {"sys", "NoReturn", "TYPE_CHECKING", "annotations"} & {*dir(fp8core)}


MISSPELT = {
    "fp8core": {
        "Lineer": "Linear",
        "linear": "Linear",
        "recipes": "recipe",
        "quantize": "quantize_",
    },
    "fp8core.recipe": {
        "MXFP8Scaling": "MXFP8BlockScaling",
        "Float8Scaling": "Float8BlockScaling",
        "current": "Float8CurrentScaling",
    },
}


@pytest.mark.parametrize("module", MISSPELT)
def test_a_misspelt_name_gets_the_nearest(module: str) -> None:
    for name, near in MISSPELT[module].items():
        said = f"^module '{module}' has no attribute '{name}'. Did you mean '{near}'\\?$"
        with pytest.raises(AttributeError, match=said):
            getattr(importlib.import_module(module), name)


def test_a_name_of_the_recipes_gets_its_path() -> None:
    for name, path in {
        "PerLayer": "recipe.PerLayer",
        "MXFP8BlockScaling": "recipe.MXFP8BlockScaling",
        "Float8CurentScaling": "recipe.Float8CurrentScaling",
    }.items():
        with pytest.raises(AttributeError, match=f"Did you mean '{path}'"):
            getattr(fp8core, name)


def test_the_nearest_is_said_once_where_nobody_catches_it() -> None:
    ran = forked.run([sys.executable, "-c", "import fp8core as te; te.Lineer"])
    assert ran.stderr.count("Did you mean") == 1
    assert "Linear" in ran.stderr


def test_a_name_like_no_other_gets_none() -> None:
    with pytest.raises(AttributeError, match=r"^module 'fp8core' has no attribute 'zzzzz'$"):
        _ = fp8core.zzzzz  # type: ignore[attr-defined]


def test_hasattr_and_import_behave_as_in_any_module() -> None:
    assert not hasattr(fp8core, "Lineer")
    assert not hasattr(fp8core.recipe, "__wrapped__")
    with pytest.raises(ImportError):
        from fp8core import Lineer  # noqa: F401


FRAMEWORKS = {"huggingface", "lightning", "megatron", "torchtitan"}  # what is not installed here


@pytest.mark.parametrize("statement", ["import fp8core.{}", "from fp8core import {}", "fp8core.{}"])
def test_a_short_name_is_the_module_itself(statement: str) -> None:
    names = sorted(set(SHORT) - FRAMEWORKS)
    lines = [
        "import fp8core, importlib",
        *(statement.format(name) for name in names),
        *(
            f"assert fp8core.{name} is importlib.import_module('fp8core.{SHORT[name]}'), {name!r}"
            for name in names
        ),
        *(f"assert fp8core.{name}.__spec__.name == 'fp8core.{SHORT[name]}'" for name in names),
        "from fp8core.training.optimizers.fused_adam import FusedAdam",
        "assert FusedAdam is fp8core.training.optimizers.FusedAdam",
    ]
    done = forked.run([sys.executable, "-c", "\n".join(lines)])
    assert done.returncode == 0, done.stderr


def test_what_few_programs_need_is_loaded_when_it_is_named() -> None:
    lines = [
        "import sys, fp8core",
        "assert 'fp8core.distributed' not in sys.modules",
        "assert 'fp8core.inspection.tuning' not in sys.modules",
        "assert callable(fp8core.distributed.gather_quantized)",
        "assert fp8core.distributed is sys.modules['fp8core.distributed']",
        "assert fp8core.tune is sys.modules['fp8core.inspection.tuning'].tune",
    ]
    done = forked.run([sys.executable, "-c", "\n".join(lines)])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("old", MOVED)
def test_a_name_that_moved_says_where(old: str) -> None:
    for name in (f"fp8core.{old}", f"fp8core.{old}.inside"):
        with pytest.raises(ModuleNotFoundError, match=rf"import fp8core\.{MOVED[old]}"):
            importlib.import_module(name)
        importlib.import_module(f"fp8core.{MOVED[old]}")


@pytest.mark.parametrize("old", [old for old in MOVED if "." not in old])
def test_an_attribute_that_moved_says_where(old: str) -> None:
    said = rf"^fp8core\.{old} has moved: import fp8core\.{MOVED[old]}\.$"
    with pytest.raises(AttributeError, match=said):
        getattr(fp8core, old)


@pytest.mark.parametrize(
    ("statement", "package", "line"),
    [
        ("import fp8core.lightning", "lightning", "pip install lightning"),
        ("from fp8core import lightning", "lightning", "pip install lightning"),
        ("fp8core.megatron", "megatron", "pip install megatron-core"),
        ("fp8core.torchtitan", "torchtitan", "pip install torchtitan"),
        ("fp8core.huggingface.Fp8CoreConfig", "transformers", "pip install transformers"),
        ("fp8core.huggingface.Fp8CoreConfig", "safetensors", "pip install safetensors"),
    ],
)
def test_a_framework_that_is_missing_names_the_line_that_installs_it(
    statement: str, package: str, line: str
) -> None:
    hidden = (
        "import fp8core, importlib.util\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name == {package!r} else find(name)\n"
    )
    done = forked.run([sys.executable, "-c", hidden + statement])
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: fp8core.integrations.")
    assert last.endswith(f"needs {package}, which is not installed: {line}")


def test_a_program_s_own_package_of_such_a_name_is_imported(tmp_path: Path) -> None:
    (tmp_path / "integrations").mkdir()
    (tmp_path / "integrations" / "torchtitan.py").write_text("here = True\n", encoding="utf-8")
    program = "import fp8core; import integrations.torchtitan as own; assert own.here"
    done = forked.run([sys.executable, "-c", program], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_short_name_has_the_parts_of_its_module_alone() -> None:
    assert pydoc.locate("fp8core.optimizers.FusedAdam") is fp8core.optimizers.FusedAdam
    assert importlib.util.find_spec("fp8core.optimizers.fused") is not None
    assert importlib.util.find_spec("fp8core.optimizers.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"'fp8core\.optimizers\.nothing'") as raised:
        importlib.import_module("fp8core.optimizers.nothing")
    assert raised.value.name == "fp8core.optimizers.nothing"


def test_every_place_exists() -> None:
    for place in (*SHORT.values(), *MOVED.values()):
        path = Path(fp8core.__file__).parent / place.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), place
