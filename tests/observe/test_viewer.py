"""The page that shows a timeline, in a real browser: chromium or Chrome, without a network."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, tracing
from asyncloader.observe.trace import to_html
from tests.loads import Load

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

LONGEST = """(() => {
    const track = rows.at(-1), long = slice => slice.batch === undefined ? 0 : slice.to - slice.from;
    const slice = track.slices.reduce((one, other) => long(other) > long(one) ? other : one);
    const {left, top} = canvas.getBoundingClientRect();
    return [left + x((slice.from + slice.to) / 2), top + track.top + (slice.row + .5) * ROW, slice.batch];
})()"""
"""Where on the page the last worker's longest batch is, and its number."""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of two epochs with 40 batches each, some of which are slow; its names try to be HTML."""
    path = tmp_path_factory.mktemp("viewer") / "<img src=x onerror=alert(1)>.json"
    with tracing(path):
        loader = DataLoader(Load(320, 0.001, slow_every=80, slow_s=0.05), 8, num_workers=2, persistent_workers=True)
        for _ in range(2):
            for _ in loader:
                time.sleep(0.003)
        loader.close()
    events = json.loads(path.read_text())
    events += [{**events[-1], "ph": "i", "name": "<!--<script>"}, {**events[-1], "ph": "i", "name": "</script>"}]
    path.write_text(json.dumps(events))
    return to_html(path)


@pytest.fixture(scope="module")
def seen(page_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a browser shows of the page: as it opens, zoomed in, with a batch that was clicked, and all again."""
    if (chromium := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip("neither chromium nor Chrome is installed: `make test-browser` installs Debian's")
    async_api = pytest.importorskip("playwright.async_api")

    async def look() -> dict[str, Any]:
        seen: dict[str, Any] = {"problems": []}
        async with async_api.async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            page = await browser.new_page(viewport={"width": 1200, "height": 420})
            for event in ("pageerror", "request"):
                page.on(event, lambda what, event=event: seen["problems"].append((event, str(what))))
            await page.goto(page_file.as_uri())
            await page.wait_for_function("canvas.clientWidth > 0 && viewer.drawn > 0")  # a busy machine shows it later
            left, top, longest = await page.evaluate(LONGEST)
            state = "({...viewer, from: viewer.view.from, to: viewer.view.to})"
            frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"

            async def note(name: str) -> None:
                await page.evaluate(frame)
                seen[name] = {**await page.evaluate(state), "picture": await page.screenshot()}

            await note("opened")
            await page.mouse.move(left, top)
            for _ in range(8):
                await page.mouse.wheel(0, -300)
            await note("zoomed")
            await page.mouse.move(left, top + 2)
            seen["longest"], seen["tip"] = longest, await page.inner_text("#tip")
            await page.mouse.down()
            await page.mouse.up()
            await note("clicked")
            await page.keyboard.press("ArrowRight")
            await note("moved")
            await page.click("#all")
            await note("all")
            await browser.close()
        return seen

    return asyncio.run(look())


def test_every_track_is_drawn(seen: dict[str, Any], page_file: Path) -> None:
    """Every track is there, the slices are drawn in their colours, nothing fails and nothing is asked of a network."""
    opened = seen["opened"]
    assert opened["tracks"] == ["consumer", "channel", "worker 0", "worker 1"]
    assert opened["count"] > 600
    assert opened["drawn"] > 80  # at least one for each batch, however long the run took
    assert seen["problems"] == [("request", f"<Request url={page_file.as_uri()!r} method='GET'>")]


def test_it_zooms_and_moves(seen: dict[str, Any]) -> None:
    """The wheel zooms around the pointer, a key moves, a button shows all again; each changes the picture."""
    opened, zoomed, moved, everything = (seen[name] for name in ("opened", "zoomed", "moved", "all"))
    assert zoomed["to"] - zoomed["from"] < 0.1 * (opened["to"] - opened["from"])
    assert 0 < zoomed["drawn"] < opened["drawn"]
    assert moved["from"] > zoomed["from"]
    assert (everything["from"], everything["to"]) == (opened["from"], opened["to"])
    assert len({view["picture"] for view in (opened, zoomed, moved)}) == 3


def test_a_batch_can_be_followed(seen: dict[str, Any]) -> None:
    """Under the pointer stands what it is; a click marks the batch on all tracks, and draws its arrow."""
    batch = seen["clicked"]["chosen"]
    assert batch == seen["longest"]
    assert f"batch {batch}" in seen["tip"]
    assert seen["clicked"]["picture"] != seen["zoomed"]["picture"]
