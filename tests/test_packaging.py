"""What is published: wheel and source distribution are built, checked, and installed into an environment without us."""

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.support.programs import run_python

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow

USE = """
import sys, importlib.metadata, pathlib
import torch
import asyncloader, asyncloader.cli, asyncloader.datasets, asyncloader.samplers, asyncloader.testing

home = pathlib.Path(sys.prefix)
assert home in pathlib.Path(asyncloader.__file__).parents, asyncloader.__file__
loader = asyncloader.DataLoader(torch.arange(40.0), batch_size=4, num_workers=2, trace=str(home / "run.json"))
assert torch.equal(torch.cat(list(loader)), torch.arange(40.0))
print(importlib.metadata.version("asyncloader"))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both as a release does: the source distribution of this folder, the wheel of that distribution."""
    out = tmp_path_factory.mktemp("dist")
    run_tool("build", "--outdir", out, ROOT)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": source}


def run_tool(module: str, *arguments: str | Path) -> str:
    """Run a tool of this environment in a process of its own; what it prints is shown where it fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metadata(wheel: Path) -> Message:
    """Return what the wheel says about itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def test_the_index_would_take_them(built: dict[str, Path]) -> None:
    """The README can be shown as the project's page, and the metadata are in order."""
    assert run_tool("twine", "check", "--strict", *built.values()).count("PASSED") == 2


def test_the_wheel_has_the_package_and_no_more(built: dict[str, Path]) -> None:
    """All modules, the marker that it has types, the page of timelines, the licence; nothing of the tests."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    package = ROOT / "asyncloader"
    ours = {path for path in package.rglob("*") if path.suffix in (".py", ".html", ".typed")}
    assert names == {str(path.relative_to(ROOT)) for path in ours}


def test_the_source_distribution_can_be_worked_with(built: dict[str, Path]) -> None:
    """It has the tests, the documentation, and what makes both."""
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "Makefile", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= names
    assert {"tests/conftest.py", "docs/index.md", "examples/train_digits.py", "asyncloader/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_the_version_is_told_alike_everywhere(built: dict[str, Path]) -> None:
    """In the metadata, in the citation, and at the head of the changelog."""
    version = metadata(built["wheel"])["Version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "CHANGELOG.md").read_text().split("## ")[1].split()[0] == version


def test_actions_are_pinned_by_hash() -> None:
    """What builds and publishes a release cannot be exchanged behind a tag; the tag stands beside the hash."""
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    assert not [each for each in actions if not re.match(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)]


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_is_used_where_it_is_installed(built: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """In a fresh environment, which has the dependencies of this one, a loader with workers gives its batches."""
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    (site,) = (tmp_path / "lib").glob("python*/site-packages")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", built[kind]]
    done = subprocess.run(install, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(packages))  # looked at after what is installed here
    done = run_python("-E", "-c", USE, python=python)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, metadata(built["wheel"])["Version"], "")
    command = [tmp_path / "bin" / "asyncloader", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    done = run_python("-E", "-m", "asyncloader", "doctor", "--selftest", python=python)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
