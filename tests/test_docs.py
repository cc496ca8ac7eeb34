"""The pages for users: what they link to is there, and the code they show runs."""

import ast
import errno
import importlib
import json
import mmap
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncloader.loader import OPTIONS
from tests.conformance.__main__ import PAGE, page
from tests.conformance.comparison import CASES
from tests.conformance.differences import DIFFERENCES
from tests.support.nursery import Program

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[1]
AT_THE_TOP = [
    ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "SKILL.md", "llms.txt")
]
PAGES = [*AT_THE_TOP, *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("index.md", "moving.md")),
    *sorted((ROOT / "docs" / "guides").glob("[!i]*.md")),
]
INSIDE = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```([\w{}-]*) ?[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> list[str]:
    return [code for language, code in FENCED.findall(page.read_text()) if language == "python"]


def anchors(page: Path) -> set[str]:
    """Return what can follow the # in a link to a page: its headings, in the spelling of markdown's renderers."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Links and pictures of a page name files of the repository, and headings in them."""
    dead = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_on_pages_are_there(page: Path) -> None:
    """Names in `asyncloader`, and files of the repository, that stand as code in the text; two pages have old ones."""
    if page.name in ("CHANGELOG.md", "size.md"):
        return
    spans = re.findall(r"`([^`\n]+)`", FENCED.sub("", page.read_text()))
    names = {name for span in spans for name in re.findall(r"\basyncloader(?:\.[A-Za-z]\w*)+", span)}
    files = {span for span in spans if re.fullmatch(r"\w[\w-]*/[\w/-]+\.(py|json)", span)}
    assert not [name for name in names if not exists(name)]
    assert not [file for file in files if not ((ROOT / file).exists() or (ROOT / "asyncloader" / file).exists())]


def sources() -> set[str]:
    """Return all words in the package's modules."""
    return {word for path in (ROOT / "asyncloader").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("page", INSIDE, ids=lambda page: page.name)
def test_attributes_that_decisions_name_are_there(page: Path) -> None:
    """`Class.attribute`, of ours or of what we use, is in the package's code."""
    spans, words = re.findall(r"`([A-Z]\w+\.\w+)(?:\(\w*\))?`", page.read_text()), sources()
    assert not [span for span in spans if not set(span.split(".")) <= words]


def syntax_error(code: str) -> str:
    """Return what is wrong with the code, as a text; nothing if it can be parsed."""
    try:
        compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        return f"{error}: {error.text}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_pages_is_python(page: Path) -> None:
    """Every block of Python on a page can be parsed; `await` may stand at its top level, as in a notebook."""
    assert [error for code in python_blocks(page) if (error := syntax_error(code))] == []


FEW_CORES = "import warnings\nwarnings.filterwarnings('ignore', 'This DataLoader will create')\n"
TORCHDATA = "warnings.filterwarnings('ignore', \"'set_vital' is deprecated\")\n"  # it says so of itself
STARTED_BY = "import multiprocessing\nmultiprocessing.set_start_method({!r}, force=True)\n"
A_NOTEBOOK = STARTED_BY.format(None) + "del __file__\n"
"""Workers are started in the platform's way; those that are not forked cannot import cells: classes come by value."""


@pytest.mark.timeout(450)  # some pages train for ten seconds, several times as long beside other work
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_a_page_runs(run: Callable[..., Program], page: Path) -> None:
    """The blocks of Python on a page are cells of a notebook: one after the other they run without a warning."""
    done = run(A_NOTEBOOK + FEW_CORES + TORCHDATA + "\n".join(python_blocks(page)), timeout_s=400, TQDM_DISABLE="1")
    assert (done.returncode, done.err) == (0, "")


@pytest.mark.timeout(450)
def test_the_first_example_is_a_script(run: Callable[..., Program], start_method: str) -> None:
    """Copied into a file, the README's example runs with each way of starting workers."""
    done = run(STARTED_BY.format(start_method) + FEW_CORES + python_blocks(ROOT / "README.md")[0], timeout_s=400)
    assert (done.returncode, done.err) == (0, "")


def printed() -> Iterator[str]:
    """Return what is printed somewhere: texts of our sources and of torch's, pieces of one text put together."""
    loader_of_torch = Path(torch.utils.data.__file__).parent
    for path in (*ROOT.glob("asyncloader/**/*.py"), *loader_of_torch.rglob("*.py"), Path(torch.cuda.__file__)):
        yield re.sub(r'"\s+[frb]*"', "", path.read_text()).replace('\\"', '"')
    yield os.strerror(errno.ENOSPC)


def test_errors_of_the_troubleshooting_page_are_printed() -> None:
    """Each text in a heading is that of an error or a warning, of this version; those of torch's C++ too."""
    headings = re.findall(r"^### (`.+)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    pieces = {piece.strip() for text in headings for piece in re.split("[`…]", text)} - {""}
    everything = "\n".join(printed())
    missing = sorted(piece for piece in pieces if piece not in everything)
    (library,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as compiled:
        assert [piece for piece in missing if compiled.find(piece.encode()) < 0] == []


def test_the_page_of_comparisons_is_that_of_the_tests() -> None:
    """What docs/conformance.md lists is what the tests compare; `python -m tests.conformance --write` makes it so."""
    assert PAGE.read_text() == page()


def test_numbers_of_what_was_compared_are_those_of_the_page() -> None:
    """README and docs/testing.md say how many behaviours are the same as torch's, and how many are not."""
    assert PAGE.read_text() == page()  # imports all modules of cases
    counts = [len(CASES), len(DIFFERENCES)]
    words = {15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen"}
    readme, testing = (ROOT / "README.md").read_text(), (ROOT / "docs" / "testing.md").read_text()
    assert f"{counts[0]} behaviours" in readme
    assert f"{words[counts[1]]} are [different on purpose]" in readme
    assert f"with `for` and `async for` | {counts[0]} |" in testing
    assert f"tested on both | {counts[1]} |" in testing


def test_the_page_of_options_has_every_one_with_its_default() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page.count("\n| `") == len(OPTIONS)
    for name, option in OPTIONS.items():
        default = "64 MiB" if name == "max_buffered_bytes" else option.default
        shown = f'"{default}"' if isinstance(default, str) and default != "64 MiB" else str(default)
        assert f"| `{name}={shown}` |" in page


def test_the_page_of_others_benchmarks_is_made_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures on docs/outsiders.md are those of docs/results; `make bench-outsiders` makes it so."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    draw = importlib.import_module("draw_outsiders")
    reports = [json.loads(path.read_text()) for path in sorted((ROOT / "docs" / "results").glob("outsiders*.json"))]
    shown = (ROOT / "docs" / "outsiders.md").read_text().partition(draw.BEGIN)[2].partition(draw.END)[0]
    assert shown == draw.page(reports)


@pytest.mark.slow
def test_the_page_of_benchmarks_has_every_script() -> None:
    scripts = {path.stem for path in (ROOT / "tests/benchmarks").glob("*.py") if "main(__doc__" in path.read_text()}
    table = (ROOT / "docs/benchmarks.md").read_text().partition("| | |\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == scripts


@pytest.mark.slow  # `make docs` has just built it where it runs the others
@pytest.mark.timeout(450)
def test_the_documentation_builds(tmp_path: Path) -> None:
    """Sphinx makes HTML of all pages and docstrings without a warning; every page is in the table of contents."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", ROOT / "docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "guides" / "workers.html").exists()
