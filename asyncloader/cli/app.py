"""The commands and their arguments; the modules beside this one carry them out."""

from __future__ import annotations

import json
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from asyncloader.cli import compare, doctor, fingerprints, search
from asyncloader.cli.measure import run
from asyncloader.cli.report import Report
from asyncloader.cli.script import first_loader
from asyncloader.cli.source import Source, find, is_function
from asyncloader.loader import DataLoader
from asyncloader.machine import available_bytes
from asyncloader.observe.tally import show_s
from asyncloader.observe.trace import to_html, tracing

app = typer.Typer(help="See what a data loader does, and make it faster.", no_args_is_help=True, add_completion=False)

_UNKNOWN = {"ignore_unknown_options": True}  # options of a script

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT.py|MODULE:FUNCTION",
        help="Your training script, which is run until some of its steps have been timed; or a function without "
        "arguments that makes your loader, torch's or ours, or a pair of it and the function that takes a step.",
    ),
]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script; options of its after --.")]

_STEPS = 20  # of a script are timed


@contextmanager
def _loaded(command: str, target: str, arguments: list[str] | None, *, steps: int = _STEPS) -> Iterator[Source]:
    """Find the user's loader; what that, or using it, raises is told in one line."""
    # A command may try more workers than there are cores on purpose, so torch need not warn.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    try:
        if Path(target).suffix == ".py":
            with _of_script(Path(target), arguments or [], steps) as source:
                yield source
        elif arguments:
            raise typer.BadParameter(f"arguments are for a script, not for a function: {' '.join(arguments)}")
        else:
            yield _found(target)
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        typer.echo(f"asyncloader {command}: {_in_one_line(error)}", err=True)
        raise typer.Exit(1) from None


def _found(name: str) -> Source:
    try:
        return find(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _of_script(path: Path, arguments: list[str], steps: int) -> Iterator[Source]:
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {str(path)!r}")
    with first_loader(path, arguments, steps=steps) as found:
        if found is None:
            raise typer.BadParameter(f"{path} ended without reading from a loader; name a function of it: {path}:make")
        if found.step_s is None:
            yield Source(found.loader, None)
        else:
            step_s = found.step_s
            typer.echo(f"steps of {show_s(step_s).strip()}, as {path} takes, in place of its own", err=True)
            yield Source(found.loader, lambda batch: time.sleep(step_s))


def _in_one_line(error: Exception) -> str:
    """Write down what was raised, where in the user's code, and what its notes say."""
    ours = str(Path(__file__).parents[1])
    places = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
    users = [each for each in places if "-packages" not in each.filename and each.filename.endswith(".py")]
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught "):  # torch's words, with a traceback behind them that ends in what was raised
        lines = [line for line in lines if line.startswith(f"{type(error).__name__}: ")][-1:] or lines
        lines = [lines[0].removeprefix(f"{type(error).__name__}: ")]
    where = f" ({Path(users[-1].filename).name}, line {users[-1].lineno})" if users else ""
    notes = " ".join(note.splitlines()[0] for note in getattr(error, "__notes__", ()) if note)
    return f"{type(error).__name__}: {lines[0]}{where}{' ' + notes if notes else ''}"


@app.command(context_settings=_UNKNOWN)
def bench(
    target: Target,
    arguments: Arguments = None,
    seconds: Annotated[float, typer.Option(help="Of each run.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    as_json: Json = False,
) -> None:
    """Run your loader under torch's DataLoader and under asyncloader's, in turns, and compare."""
    report = Report(as_json)
    with _loaded("bench", target, arguments) as source:
        compare.bench(source, report, seconds=seconds, rounds=rounds)
    report.end()


@app.command(context_settings=_UNKNOWN)
def tune(
    target: Target,
    arguments: Arguments = None,
    seconds: Annotated[float, typer.Option(help="Of each run.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each; more of them find smaller differences.")] = 3,
    max_workers: Annotated[int | None, typer.Option(min=0, help="By default twice the cores.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="By default half of what is free.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw time per batch against workers (PNG, SVG).")] = None,
    as_json: Json = False,
) -> None:
    """Find num_workers, concurrency and prefetch_factor by trying, and print the line to paste."""
    report = Report(as_json)
    with _loaded("tune", target, arguments) as source:
        search.tune(
            source,
            report,
            max_workers=search.default_max_workers() if max_workers is None else max_workers,
            memory_bytes=available_bytes() / 2 if memory_gb is None else memory_gb * 1e9,
            seconds=seconds,
            picture=picture,
            rounds=rounds,
        )
    report.end()


@app.command(context_settings=_UNKNOWN)
def trace(
    target: Annotated[
        str, typer.Argument(metavar="FILE.json|SCRIPT.py|MODULE:FUNCTION", help="A timeline, or your loader.")
    ],
    arguments: Arguments = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the timeline of your loader goes.")] = Path(
        "run.json"
    ),
    batches: Annotated[int, typer.Option(min=1, help="How many batches of your loader to take.")] = 200,
    as_json: Json = False,
) -> None:
    """Make a page of a timeline, which any browser shows; of a loader, run it and write the timeline first."""
    report = Report(as_json)
    if is_function(target) or Path(target).suffix == ".py":
        with _loaded("trace", target, arguments) as source, tracing(output):
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


@app.command(name="compare")
def compare_runs(
    one: Annotated[Path, typer.Argument(metavar="ONE", help="The timeline of a run (trace=), or a state.")],
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="That of another run.")],
    as_json: Json = False,
) -> None:
    """Name the first batch in which two runs differ, made with fingerprint=True. Exit with 1 if they differ."""
    report = Report(as_json)
    try:
        are_alike = fingerprints.compare(fingerprints.Sides(one, other), report)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    report.end()
    raise typer.Exit(0 if are_alike else 1)


@app.command(name="doctor", context_settings=_UNKNOWN)
def examine(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT.py|MODULE:FUNCTION]",
            help="Look also for what workers will copy of a dataset: of the first loader that a script reads from (it "
            "is run until then), or of the loader that a function makes.",
        ),
    ] = None,
    arguments: Arguments = None,
    as_json: Json = False,
) -> None:
    """Look at this machine: start method, cores, memory, limits. Exit with 1 if something is wrong."""
    report = Report(as_json)
    if target is None:
        is_well = doctor.examine(report, None)
    else:
        with _loaded("doctor", target, arguments, steps=0) as source:
            is_well = doctor.examine(report, source.loader)
    report.end()
    raise typer.Exit(0 if is_well else 1)
