"""Draw docs/images/timeline.png: the page of a timeline, as chromium or Chrome shows it, with a batch that was clicked.

python docs/draw_timeline.py

It makes the run itself, of about a second: every 160th sample takes 150 ms, the others 2; batches of 8, two workers,
steps of 8 ms. Of five runs it shows the shortest, which the machine disturbed least. It puts white labels onto
what took long: the page's own are faint when a batch was clicked, and the path of that batch runs through its label.
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

LABEL = """clicked => {
    const {left, top} = canvas.getBoundingClientRect();
    for (const t of rows) for (const s of t.slices) {
        const isClicked = s.name === "batch " + clicked;
        if (s.to - s.from < 7e4 || s.name === "train" || s.batch === clicked && !isClicked) continue;
        const label = document.createElement("span");
        label.textContent = s.name + (isClicked ? ", clicked" : "");
        label.style = `position: fixed; left: ${left + x(s.from) + 5}px; top: ${top + t.top + s.row * ROW + 1}px;
                       font: 11px/13px system-ui, sans-serif; padding: 0 3px; background: #fff; color: #1b1f24`;
        document.body.append(label);
    }
}"""
"""Put labels onto what took more than 70 ms; what belongs to the batch that was clicked can be read as it is."""

LEAVE_OUT_THE_END = """() => {
    const wanted = (last - first) / (width() / 110), power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= wanted);
    const tick = first + Math.floor((last - first) / step) * step;
    if (x(last) - x(tick) < 50) look(first, tick - 1);
}"""
"""Let the view end before the last tick, if the page would cut its label."""


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
        page.evaluate(LEAVE_OUT_THE_END)
        page.mouse.click(*page.evaluate(WHERE, CLICKED))
        page.mouse.move(0, 0)
        page.evaluate(LABEL, CLICKED)
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
