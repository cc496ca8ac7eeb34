"""The commands and their arguments. What they do is in the modules beside this one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch.utils.data
import typer

from asyncloader.cli import compare, doctor, search
from asyncloader.cli.measure import run
from asyncloader.cli.report import Report
from asyncloader.cli.script import first_loader
from asyncloader.cli.source import Source, find, is_function
from asyncloader.loader import DataLoader
from asyncloader.machine import available_bytes
from asyncloader.observe.trace import to_html, tracing

app = typer.Typer(help="See what a data loader does, and make it faster.", no_args_is_help=True, add_completion=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function without arguments that makes your loader, torch's or ours; or a pair of it and the function "
        "that takes a step with a batch.",
    ),
]


def _found(name: str) -> Source:
    # What a command tries out is its own affair: 4 workers on 2 cores, say.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    try:
        return find(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _loader_of(target: str, arguments: list[str]) -> torch.utils.data.DataLoader[Any]:
    path = Path(target)
    if path.suffix != ".py":
        return _found(target).loader
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {target!r}")
    loader = first_loader(path, arguments)
    if loader is None:
        raise typer.BadParameter(f"{target} ended without reading from a loader; name a function of it: {target}:make")
    return loader


@app.command()
def bench(
    target: Target,
    seconds: Annotated[float, typer.Option(help="Of each run.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    as_json: Json = False,
) -> None:
    """Run your loader under torch's DataLoader and under asyncloader's, in turns, and compare."""
    report = Report(as_json)
    compare.bench(_found(target), report, seconds=seconds, rounds=rounds)
    report.end()


@app.command()
def tune(
    target: Target,
    seconds: Annotated[float, typer.Option(help="Of each run.")] = 2.0,
    max_workers: Annotated[int | None, typer.Option(min=0, help="By default twice the cores.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="By default half of what is free.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw time per batch against workers (PNG, SVG).")] = None,
    as_json: Json = False,
) -> None:
    """Find num_workers, concurrency and prefetch_factor by trying, and print the line to paste."""
    report = Report(as_json)
    search.tune(
        _found(target),
        report,
        max_workers=search.default_max_workers() if max_workers is None else max_workers,
        memory_bytes=available_bytes() / 2 if memory_gb is None else memory_gb * 1e9,
        seconds=seconds,
        picture=picture,
    )
    report.end()


@app.command()
def trace(
    target: Annotated[str, typer.Argument(metavar="FILE.json|MODULE:FUNCTION", help="A timeline, or your loader.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the timeline of your loader goes.")] = Path(
        "run.json"
    ),
    batches: Annotated[int, typer.Option(min=1, help="How many batches of your loader to take.")] = 200,
    as_json: Json = False,
) -> None:
    """Make a page of a timeline, which any browser shows; of a loader, run it and write the timeline first."""
    report = Report(as_json)
    if is_function(target):
        source = _found(target)
        with tracing(output):
            seen = run(source.make(DataLoader, trace=None), source.step, seconds=0, batches=batches)
        assert seen.stats is not None
        report.say("trace", f"timeline: {output} (for https://ui.perfetto.dev)", str(output))
        report.say("verdict", str(seen.stats.verdict), seen.stats.verdict.as_dict())
        target = str(output)
    try:
        page = to_html(target)
    except (OSError, json.JSONDecodeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    report.say("page", f"page: {page}", str(page))
    report.end()


@app.command(name="doctor")
def examine(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT.py|MODULE:FUNCTION]",
            help="Look also for what workers will copy of a dataset: of the first loader that a script reads from (it "
            "is run until then), or of the loader that a function makes.",
        ),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    as_json: Json = False,
) -> None:
    """Look at this machine: start method, cores, memory, limits. Exit with 1 if something is wrong."""
    report = Report(as_json)
    is_well = doctor.examine(report, None if target is None else _loader_of(target, arguments or []))
    report.end()
    raise typer.Exit(0 if is_well else 1)
