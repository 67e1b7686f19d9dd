"""The documentation builds without a warning and without a network, and holds what it generates."""

from __future__ import annotations

import ast
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fp8core
from fp8core import recipe
from fp8core.backend_api import OPS
from tests.docs.pages import DOCS, PAGES

pytestmark = pytest.mark.slow
ROOT = DOCS.parent
PLOTS = sorted((DOCS / "plots").glob("*.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html"]
    command = [*build, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


class Text(HTMLParser):
    """The words of a page, and the files that its images name."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.words: list[str] = []
        self.images: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attrs).get("src") or "")


def test_every_page_is_in_the_site_and_in_its_contents(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    for page in PAGES:
        built = page.relative_to(DOCS).with_suffix(".html")
        assert (site / built).exists()
        assert built.parent != Path() or f'href="{built}"' in front or built.stem == "index"


def test_support_matrix_holds_every_operation_and_recipe(site: Path) -> None:
    words = set(Text(site / "support.html").words)
    assert {*OPS, *recipe.names(), "reference", "native", "emulated"} <= words


def test_every_plot_is_drawn_and_shown(site: Path) -> None:
    shown = {Path(image).stem for page in site.glob("*.html") for image in Text(page).images}
    assert {plot.stem for plot in PLOTS} <= shown
    for plot in PLOTS:
        (drawn,) = (site / "_images").glob(f"{plot.stem}.svg")
        assert drawn.stat().st_size > 5_000


def test_reference_shows_the_defaults_of_a_recipe(site: Path) -> None:
    words = Text(site / "api" / "recipes.html").words
    assert "amax_history_len=1024" in "".join(words)


def test_reference_documents_every_public_name(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    named = {name: getattr(fp8core, name) for name in fp8core.__all__ if name != "__version__"}
    for name, value in named.items():
        module = getattr(value, "__module__", "")
        # Users import what a wing holds by a name without the wing's.
        short = ".".join(["fp8core", *module.split(".")[2:]])
        homes = {f"fp8core.{name}", f"{module}.{name}", f"{short}.{name}"}
        homes |= {f"fp8core.recipe.{name}"} if getattr(recipe, name, None) is value else set()
        is_there = any(f'id="{home}"' in text for home in homes | {f"module-fp8core.{name}"})
        assert is_there, name


@pytest.mark.parametrize(
    "module", ["lightning", "huggingface", "megatron", "torchtitan", "mindspeed"]
)
def test_reference_documents_every_name_of_a_plug_in(site: Path, module: str) -> None:
    text = (site / "api" / "frameworks.html").read_text(encoding="utf-8")
    path = ROOT / "fp8core" / "integrations" / module
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    lists = [node.value for node in tree.body if ast.unparse(node).startswith("__all__")]
    public = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    names = ast.literal_eval(lists[0]) if lists else [name for name in public if name[0] != "_"]
    assert names
    for name in names:
        assert f'id="fp8core.{module}.{name}"' in text, name
