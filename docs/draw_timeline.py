"""Draw docs/images/timeline.png: the page of a timeline, as chromium or Chrome shows it, with a batch that was clicked.

python docs/draw_timeline.py

It makes the run itself, of about a second: every 160th sample takes 150 ms, the others 2; batches of 8, two workers,
steps of 8 ms. Of five runs it shows the shortest, which the machine disturbed least.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from torch import Tensor
from torch.utils.data import Dataset

from asyncloader import DataLoader, tracing
from asyncloader.observe.trace import to_html

PICTURE = Path(__file__).resolve().parent / "images" / "timeline.png"
BATCH, BATCHES, CLICKED, RUNS = 8, 60, 10, 5
SAMPLE_S, SLOW_S, STEP_S, EVERY, FIRST_SLOW = 0.002, 0.15, 0.008, 160, 80
SIZE = {"width": 920, "height": 250}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]

WHERE = """batch => {
    const track = rows.find(t => t.slices.some(s => s.name === "batch " + batch));
    const slice = track.slices.find(s => s.name === "batch " + batch), {left, top} = canvas.getBoundingClientRect();
    return [left + x((slice.from + slice.to) / 2), top + track.top + ROW / 2];
}"""
"""Where on the page a batch is."""


class Sleeps(Dataset[Tensor]):
    """Some samples are slow."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SLOW_S if index % EVERY == FIRST_SLOW else SAMPLE_S)
        return torch.zeros(8)


def run(path: Path) -> float:
    """Train on all of it, with a timeline; return how many seconds it took."""
    began = time.perf_counter()
    with tracing(path):
        for _ in DataLoader(Sleeps(), BATCH, num_workers=2):
            time.sleep(STEP_S)
    return time.perf_counter() - began


def photograph(page_file: Path) -> None:
    """Open the page, click the batch, and take the picture, with two pixels for each of the page's."""
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        page = browser.new_page(viewport=SIZE, device_scale_factor=2)
        page.goto(page_file.as_uri())
        page.wait_for_function("canvas.clientWidth > 0 && viewer.drawn > 0")
        page.mouse.click(*page.evaluate(WHERE, CLICKED))
        page.mouse.move(0, 0)
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.screenshot(path=PICTURE)
        browser.close()


def main() -> None:
    """Run, and take the picture of the shortest run."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(number), "slow samples.json") for number in range(RUNS)]
        for path in paths:
            path.parent.mkdir()
        photograph(to_html(min(paths, key=run)))


if __name__ == "__main__":
    main()
