"""``asyncloader compare``: the first batch in which two runs differ, by the fingerprints in their timelines."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncloader.cli.report import Report
from asyncloader.observe.trace import Batch, fingerprints_of

_WHERE = ("epoch", "position", "ahead", "finished")
"""What of a state says how far it is."""


class Sides(NamedTuple):
    """The two runs, by the names of their files."""

    one: Path
    other: Path


def compare(files: Sides, report: Report) -> bool:
    """Say whether two timelines, or two states, are of the same batches; and if not, which is the first that differs.

    Raises:
        ValueError: if that cannot be said of these files.
        OSError: if they cannot be read.
    """
    are_states = [_is_state(path) for path in files]
    if all(are_states):
        return _compare_states(files, report)
    if any(are_states):
        timeline, other = (files.one, files.other) if are_states[1] else (files.other, files.one)
        raise ValueError(f"{timeline} looks like a timeline, and {other} does not: give two timelines, or two states")
    return _compare_timelines(files, report)


def _is_state(path: Path) -> bool:
    """Whether a file is none of a timeline, which is a list in JSON."""
    with path.open("rb") as file:
        return not file.read(100).lstrip().startswith(b"[")


# ------------------------------------------------------------------------------------------------------- timelines


def _compare_timelines(files: Sides, report: Report) -> bool:
    one, other = (_read_timeline(path) for path in files)
    both = sorted(one.keys() & other.keys())
    differing = [batch for batch in both if one[batch] != other[batch]]
    shows_loader = any(batch.loader for batch in one.keys() | other.keys())
    if not both:
        begins = [_words(min(side), shows_loader=shows_loader) for side in (one, other)]
        raise ValueError(f"no batch is in both: {files.one} begins with {begins[0]}, {files.other} with {begins[1]}")
    for path, lacking in zip(files, (other.keys() - one.keys(), one.keys() - other.keys()), strict=True):
        if lacking:
            _say_lacking(path, lacking, report, shows_loader=shows_loader)
    if not differing:
        report.say("alike", f"the {len(both)} batches that both have are alike", len(both))
        return len(one) == len(both) == len(other)
    first = differing[0]
    found = {str(path): list(side[first]) for path, side in zip(files, (one, other), strict=True)}
    place = _words(first, shows_loader=shows_loader)
    report.say(
        "differs",
        f"{place} is the first that differs, of {len(differing)} among the {len(both)} that both have:\n"
        + "".join(f"  {' and '.join(prints)}  {path}\n" for path, prints in found.items())
        + f"loader.batch_keys({first.epoch}, {first.number}) tells its samples, "
        f"loader.batch({first.epoch}, {first.number}) makes it again.",
        {**first._asdict(), "fingerprints": found, "differing": len(differing), "both": len(both)},
    )
    return False


def _read_timeline(path: Path) -> dict[Batch, tuple[str, ...]]:
    found = fingerprints_of(path)
    if not found:
        raise ValueError(f"{path} has no fingerprints of batches: give the loader fingerprint=True beside trace=")
    return found


def _say_lacking(path: Path, lacking: Collection[Batch], report: Report, *, shows_loader: bool) -> None:
    first, more = min(lacking), len(lacking) - 1
    report.say(
        f"lacks {path}",
        f"{path} lacks {_words(first, shows_loader=shows_loader)}" + f" and {more} more of the other" * (more > 0),
        {**first._asdict(), "lacking": len(lacking)},
    )


def _words(batch: Batch, *, shows_loader: bool) -> str:
    return f"batch {batch.number} of epoch {batch.epoch}" + f" of loader {batch.loader}" * shows_loader


# ---------------------------------------------------------------------------------------------------------- states


def _compare_states(files: Sides, report: Report) -> bool:
    states = [_read_state(path) for path in files]
    places = [_place(state) for state in states]
    if places[0] != places[1]:
        raise ValueError(f"the states are of different places: {places[0]} and {places[1]}")
    is_same = bool(states[0]["fingerprint"] == states[1]["fingerprint"])
    found = {str(path): state["fingerprint"] for path, state in zip(files, states, strict=True)}
    words = (
        "alike" if is_same else "not alike: the timelines of the runs (trace=) can say which is the first that differs"
    )
    report.say("states", f"the batches before these states are {words}", {"alike": is_same, "fingerprints": found})
    return is_same


def _place(state: dict[str, Any]) -> dict[str, Any]:
    """Return how far a state is. Batches that are done with count alike, whichever of the two lists has them."""
    position, ahead = state["position"], set(state["ahead"])
    while position in ahead:
        position += 1
    there = {"position": position, "ahead": sorted(number for number in ahead if number > position)}
    return {name: state[name] for name in _WHERE} | there


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True)
        if not isinstance(state, dict) or not {*_WHERE, "fingerprint"} <= state.keys():
            raise ValueError("something is missing")
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is neither a timeline (trace=) nor a state that a loader has saved: {error}"
        ) from error
    if state["fingerprint"] is None:
        raise ValueError(f"{path} has no fingerprint of the batches before it: give the loader fingerprint=True")
    return state
