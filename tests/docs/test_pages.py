"""The code in README and documentation runs as written, and the commands they show exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.dispatch import plugins
from fp8core.dispatch.settings import VARIABLES
from fp8core.names import NOT_OFFERED
from tests import device
from tests.docs import pages
from tests.docs.pages import DOCS, PAGES, README, ROOT

# A misspelt language would take a block out of the tests.
LANGUAGES = {"", "python", "sh", "text", "toml", "ini"}
EXAMPLES = [block.code for block in pages.blocks(README) if block.runs]
RUNNING = [page for page in PAGES if pages.script(page).strip()]
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")
# What the pages about frameworks import; their scripts run with the warnings of the framework.
FRAMEWORKS = {
    "docs/frameworks/accelerate.md": "accelerate",
    "docs/frameworks/lightning.md": "lightning",
    "docs/frameworks/peft.md": "peft",
    "docs/frameworks/torchtitan.md": "torchtitan.models.common",
    "docs/frameworks/transformers.md": "transformers",
}
WITHOUT_FRAMEWORK = {"docs/frameworks/transformer-engine.md"}
"""Pages beside them whose scripts import fp8core alone."""
WARNED_OF = {"docs/export.md"} if torch.__version__.startswith("2.11") else set()
"""Pages in which torch's own functions warn: ``torch.export.load`` of a buffer that it reads."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def marks(page: Path) -> list[pytest.MarkDecorator]:
    """Of the pages about frameworks one runs always."""
    return [pytest.mark.slow] if name(page) in FRAMEWORKS and page.stem != "transformers" else []


def run(code: str, folder: Path, filename: str, *options: str) -> None:
    (folder / filename).write_text(code, encoding="utf-8")
    device.run_program(folder / filename, options=options, folder=folder)


def test_readme_has_python_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_readme_example_runs_in_a_process_of_its_own(code: str, tmp_path: Path) -> None:
    run(code, tmp_path, "readme.py", "-W", "error")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks(page), id=name(page)) for page in RUNNING]
)
def test_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    if name(page) in FRAMEWORKS:
        framework = FRAMEWORKS[name(page)]
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    options = () if name(page) in {*FRAMEWORKS, *WARNED_OF} else ("-W", "error")
    run(pages.script(page), tmp_path, f"{page.stem}.md.py", *options)


def test_every_script_of_a_framework_names_what_it_imports() -> None:
    running = {name(page) for page in RUNNING if page.parent.name == "frameworks"}
    assert running == {*FRAMEWORKS, *WITHOUT_FRAMEWORK}


@pytest.mark.parametrize("page", [README, *PAGES], ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in pages.blocks(page):
        language = (block.info.split() or [""])[0]
        is_directive = language.startswith("{")
        assert is_directive or language in LANGUAGES, f"{name(page)}:{block.line}: {block.info}"


def test_lines_of_the_script_are_those_of_the_page() -> None:
    page = DOCS / "quickstart.md"
    written, run = page.read_text("utf-8").splitlines(), pages.script(page).splitlines()
    assert [line for line, own in zip(written, run, strict=False) if own] == list(filter(None, run))


def test_block_that_is_not_to_run_does_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python no-run\n1 / 0\n```\n\n```python\nx = 1\n```\n")
    assert pages.script(page).strip() == "x = 1"


@pytest.mark.parametrize("page", [README, *PAGES], ids=name)
def test_commands_of_a_page_are_understood(page: Path) -> None:
    parser = importlib.import_module("fp8core.__main__").make_parser()
    for line in pages.commands(page):
        for part in line.split("&&"):
            program, *arguments = shlex.split(part)
            if program == "fp8core":
                parser.parse_args(arguments)


@pytest.mark.parametrize("page", [README, *PAGES], ids=name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(pages.prose(page)):
        found = (page.parent / target) if target else page
        assert found.exists(), f"{name(page)} links to {target}"
        is_named = not anchor or anchor in pages.anchors(found)
        assert is_named, f"{name(page)} links to {target}#{anchor}"


def test_anchors_are_those_of_the_headings_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` and c_d, (e)\n\n```sh\n# no heading\n```\n### Third: `x=1`?\n")
    assert pages.anchors(page) == {"a-b-and-c_d-e", "third-x1"}


def table_rows(page: str) -> list[tuple[str, str]]:
    """The first two cells of each row of a page's tables."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^\| (.+?) \| (.+?) \|", text, flags=re.MULTILINE)


def test_names_that_stay_the_same_exist_and_the_others_do_not() -> None:
    rows = table_rows("migrating-from-transformer-engine.md")
    name = re.compile(r"`(?:ops\.)?([A-Za-z_0-9]+)(?:\([^`]*\))?`")
    same = {own for first, second in rows if "the same" in second for own in name.findall(first)}
    refused = {
        own
        for first, second in rows
        if second.startswith("not offered")
        for own in name.findall(first)
    }
    assert {"Linear", "autocast", "checkpoint", "NVFP4BlockScaling", "MXFP8Tensor"} <= same
    offered = {*vars(fp8core), *dir(fp8core), *vars(recipe)}  # some are loaded when asked for
    assert same - offered == set()
    assert refused & offered == set()
    assert refused - set(NOT_OFFERED) == set()


def test_unknown_name_is_the_usual_attribute_error() -> None:
    text = "module 'fp8core' has no attribute 'Lienar'. Did you mean 'Linear'?"
    with pytest.raises(AttributeError, match=f"^{re.escape(text)}$") as e:
        fp8core.Lienar  # noqa: B018  the access is what is tested
    assert (e.value.name, e.value.obj) == ("Lienar", None)  # else Python adds a nearest name too


@pytest.mark.parametrize("marker", ["demo-command", "test-command"])
def test_readme_marks_each_command_once(marker: str) -> None:
    text = README.read_text(encoding="utf-8")
    assert len(re.findall(rf"<!-- {marker} -->\n```sh\n[^\n]+\n```", text)) == 1


def test_environment_page_lists_every_variable_with_its_meaning() -> None:
    page = (DOCS / "environment.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(FP8CORE_\w+)` \| (.+) \|$", page, flags=re.MULTILINE))
    assert {name: meaning for name, meaning in rows.items() if name in VARIABLES} == VARIABLES
    declared = {name for spec in plugins.load().backends.values() for name in spec.environment}
    assert rows.keys() - VARIABLES.keys() == declared


SLOW = pytest.mark.slow


def printed(example: str, *arguments: str, folder: Path) -> str:
    """What an example prints, run as its page says."""
    return device.run_program(DOCS / "examples" / example, *arguments, folder=folder)


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        pytest.param("mxfp8", 93.0, marks=SLOW),
        pytest.param("delayed", 93.0, marks=SLOW),
        ("nvfp4", 90.0),
    ],
)
def test_classifier_learns_the_digits(name: str, floor: float, tmp_path: Path) -> None:
    settings = ("--recipe", name, "--epochs", "6", "--hidden", "64")
    out = printed("classifier.py", *settings, folder=tmp_path)
    accuracies = dict(re.findall(r"^(\w+): ([\d.]+)% of", out, flags=re.MULTILINE))
    assert set(accuracies) == {"float32", name}
    assert float(accuracies["float32"]) > 93.0
    assert float(accuracies[name]) > floor


@pytest.mark.parametrize("name", ["mxfp8", pytest.param("delayed", marks=SLOW)])
def test_llama_is_converted_and_learns(name: str, tmp_path: Path) -> None:
    settings = ("--recipe", name, "--steps", "20", "--hidden", "32", "--rows", "4")
    out = printed("llama.py", *settings, folder=tmp_path)
    assert "14 of 15 linear layers converted" in out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", out, flags=re.MULTILINE)]
    assert losses[0] > 5.0  # ln 256 = 5.5: random weights
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("name", [pytest.param("mxfp8", marks=SLOW), "delayed"])
def test_decoder_generates_tokens(name: str, tmp_path: Path) -> None:
    rows = json.loads(printed("decoder.py", "--recipe", name, folder=tmp_path))
    assert [len(row) for row in rows] == [16, 16]
    assert all(0 <= token < 256 for row in rows for token in row)


@pytest.mark.parametrize("name", ["rowwise", pytest.param("block", marks=SLOW)])
def test_a_step_on_the_device_generates_the_tokens_of_eager_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_AUTOTUNE", "0")  # nothing is timed in a capture
    graphed, eager = map(json.loads, printed("generation.py", name, folder=tmp_path).splitlines())
    assert graphed == eager
    assert [len(row) for row in eager] == [24, 24]
    assert len({*eager[0][8:], *eager[1][8:]}) > 4


def printed_by_two(example: str, *arguments: str, folder: Path) -> str:
    """What an example prints, run on two processes as its page says."""
    path = str(DOCS / "examples" / example)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", path]
    return device.run(*command, *arguments, folder=folder, num_devices=2)


@SLOW
def test_layer_over_two_ranks_learns_and_says_what_it_sends(tmp_path: Path) -> None:
    out = printed_by_two("sequence_parallel.py", "--recipe", "mxfp8", folder=tmp_path)
    rows = re.findall(r"^step (\d+): (\d+) bytes sent, loss ([\d.]+)$", out, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [10, 20, 30, 40]
    assert len({sent for _, sent, _ in rows}) == 1
    assert float(rows[-1][2]) < 0.85 * float(rows[0][2])


@SLOW
def test_sharded_gpt_learns_and_is_saved(tmp_path: Path) -> None:
    settings = ["--steps", "6", "--hidden", "64", "--checkpoint", "saved"]
    settings += ["--device", device.DEVICE_TYPE]
    out = printed_by_two("sharded.py", *settings, folder=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", out, re.MULTILINE)]
    assert losses[0] > 5.0
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "saved" / ".metadata").exists()


TINY_DECODER = (
    *("--layers", "2", "--hidden", "64", "--ffn", "128", "--heads", "2", "--context", "32"),
    *("--batch", "8", "--steps", "20", "--evaluate", "10", "--rate", "5e-3"),
    *("--text", str(Path(json.__file__).parent), "--device", device.DEVICE_TYPE),
)


def results(folder: Path) -> list[dict[str, Any]]:
    """The lines that train_decoder.py left."""
    return [json.loads(line) for line in (folder / "train_decoder.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["current", pytest.param("bf16", marks=SLOW)])
def test_a_decoder_learns_and_leaves_a_line(name: str, tmp_path: Path) -> None:
    out = printed("train_decoder.py", *TINY_DECODER, "--recipe", name, folder=tmp_path)
    (line,) = results(tmp_path)
    assert (line["recipe"], line["ranks"], line["steps"]) == (name, 1, 20)
    assert list(line["held_out_loss"]) == ["10", "20"]
    assert line["held_out_loss"]["20"] < line["held_out_loss"]["10"] < 4.0  # ln 256 = 5.5 at first
    assert line["host_ms"] > 0
    assert line["tokens_per_s"] == pytest.approx(8 * 32 * 1e3 / line["ms"], rel=0.01)
    assert f"held-out loss {line['held_out_loss']['20']:.4f}" in out


@SLOW
@pytest.mark.parametrize("name", ["bf16", "delayed", "block"])
def test_a_decoder_of_two_ranks_trains_as_that_of_one(name: str, tmp_path: Path) -> None:
    arguments = (*TINY_DECODER, "--recipe", name)
    printed("train_decoder.py", *arguments, folder=tmp_path)
    printed_by_two("train_decoder.py", *arguments, folder=tmp_path)
    alone, sharded = results(tmp_path)
    assert (alone["ranks"], sharded["ranks"]) == (1, 2)
    losses = [line["held_out_loss"]["20"] for line in (alone, sharded)]
    # Gradients are summed in another order, and an amax is that of a rank's rows in backward.
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


LINES = {"generation": 41, "train_decoder": 210}
"""The lines that an example has less of; of others 80, each of which shows one thing."""


@pytest.mark.parametrize("example", sorted((DOCS / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < LINES.get(example.stem, 80)
