"""The commands and their arguments; the modules beside this one carry them out."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from asyncloader.cli import bench as benchmark
from asyncloader.cli import doctor
from asyncloader.cli.measure import run
from asyncloader.cli.report import Report
from asyncloader.cli.script import first_loader
from asyncloader.cli.selftest import selftest
from asyncloader.cli.source import Source, find
from asyncloader.loader import DataLoader
from asyncloader.observe.timing import show_s

app: typer.Typer = typer.Typer(
    help="See what a data loader does, and make it faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_UNKNOWN = {"ignore_unknown_options": True}  # options of a script


def _positive(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"should be a number above 0, but is {value:g}")
    return value


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
_OURS = str(Path(__file__).parents[1])


@contextlib.contextmanager
def _loaded(target: str, arguments: list[str] | None) -> Iterator[Source]:
    """Find the user's loader. What the user's code raises is shown as that: with the traceback of the user's frames."""
    # A command may try more workers than there are cores on purpose, so torch need not warn.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    try:
        if Path(target).suffix == ".py":
            with _of_script(Path(target), arguments or []) as source:
                yield source
        elif arguments:
            raise typer.BadParameter(f"arguments are for a script, not for a function: {' '.join(arguments)}")
        else:
            yield find(target)
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OURS)]
        users = [each for each in frames if Path(each.filename).name != "contextlib.py"]
        if not users and isinstance(error, OSError):  # of the output
            raise
        words = traceback.TracebackException.from_exception(error)  # its cause is the traceback of a worker
        words.stack, words.__context__ = traceback.StackSummary.from_list(users), None
        typer.echo("".join(words.format()), err=True, nl=False)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _of_script(path: Path, arguments: list[str]) -> Iterator[Source]:
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {str(path)!r}")
    with first_loader(path, arguments, steps=_STEPS) as (loader, step_s):
        if loader is None:
            raise typer.BadParameter(f"{path} ended without reading from a loader; name a function of it: {path}:make")
        if step_s is None:
            yield Source(loader, None)
        else:
            typer.echo(f"steps of {show_s(step_s).strip()}, as {path} takes, in place of its own", err=True)
            yield Source(loader, lambda batch: time.sleep(step_s))


@app.command(context_settings=_UNKNOWN)
def bench(
    target: Target,
    arguments: Arguments = None,
    seconds: Annotated[float, typer.Option(callback=_positive, help="Of each run.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each; more find smaller differences.")] = 3,
    as_json: Json = False,
) -> None:
    """Run your loader under torch's DataLoader and asyncloader's, and with other workers, in turns; name the best."""
    report = Report(as_json)
    with _loaded(target, arguments) as source:
        benchmark.bench(source, report, seconds=seconds, rounds=rounds)
    report.end()


@app.command(context_settings=_UNKNOWN)
def trace(
    target: Target,
    arguments: Arguments = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the timeline goes.")] = Path("run.json"),
    batches: Annotated[int, typer.Option(min=1, help="How many batches to take.")] = 200,
    as_json: Json = False,
) -> None:
    """Run your loader, and write a timeline that https://ui.perfetto.dev opens."""
    report = Report(as_json)
    try:
        output.open("ab").close()  # before the script is run
    except OSError as error:
        raise typer.BadParameter(f"the timeline cannot be written: {error}") from error
    with _loaded(target, arguments) as source, contextlib.closing(source.make(DataLoader, trace=output)) as loader:
        seen = run(loader, source.step, seconds=0, batches=batches)
    assert seen.stats is not None
    report.say("trace", f"timeline: {output} (for https://ui.perfetto.dev)", str(output))
    report.say("verdict", str(seen.stats.verdict), asdict(seen.stats.verdict))
    report.end()


@app.command(name="doctor")
def examine(
    is_selftest: Annotated[
        bool, typer.Option("--selftest", help="Have loaders show their promises here: 20 s.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Look at this machine: start method, cores, memory, limits. Exit with 1 if something is wrong."""
    if is_selftest:
        raise typer.Exit(0 if selftest(as_json) else 1)
    report = Report(as_json)
    is_well = doctor.examine(report)
    report.end()
    raise typer.Exit(0 if is_well else 1)


def main() -> None:
    """Run a command. Output that cannot be written, to a full disk for example, is told in one line."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        typer.echo(f"asyncloader: the output cannot be written: {error.strerror}", err=True)
        sys.exit(1)
