"""All kinds of states of the installed torchdata, loaded by ours: ``python -m tests.stateful.matrix [DATASET ...]``.

Of another version (0.8.0, 0.9.0 and 0.10.1 were tried), which needs no installation:

    pip install --no-deps --target FOLDER torchdata==0.8.0
    PYTHONPATH=FOLDER python -m tests.stateful.matrix stream "its own iterator"

For each program torchdata's loader gives two epochs without an interruption, with a state at each batch. Each of these
states is then loaded into a loader of ours that is made alike, and what that gives is compared with what came after it.
A cell is "equal"; "as torchdata", where its own loader, resumed, gives something else than without an interruption, and
ours the same as that; "refused", by an error of ours that names what differs; or "wrong".
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader as Theirs

from asyncloader import DataLoader
from asyncloader.errors import StateMismatchError
from asyncloader.stateful import StatefulDataLoader
from tests.stateful.programs import EVERYTHING, make, plain

MOMENTS = ("before", "middle", "last batch", "after")


def is_old() -> bool:
    """Whether the installed torchdata is one of those whose orders are not those of 0.11."""
    return int(version("torchdata").split(".")[1]) < 11


def states(program: Any) -> dict[str, tuple[Any, list[Any], list[Any]]]:
    """Return states of torchdata's loader by their moments, with the rest of the epoch and the next one."""
    loader = make(Theirs, program)
    taken = [copy.deepcopy(loader.state_dict())]
    first = []
    for batch in loader:
        first += plain([batch])
        taken.append(copy.deepcopy(loader.state_dict()))
    after = copy.deepcopy(loader.state_dict())
    second, third = plain(loader), plain(loader)
    middle, end = len(first) // 2, len(first)
    at = {"before": 0, "middle": middle, "before the last": end - 1, "last batch": end}
    found = {moment: (taken[batches], first[batches:], second) for moment, batches in at.items()}
    return {**found, "after": (after, second, third)}


def outcome(program: Any, state: Any, expected: Any, loader_class: Any, num_workers: int | None = None) -> str:
    """Load a state into ours; say what came of it."""
    loader = make(loader_class, program, num_workers)
    try:
        loader.load_state_dict(copy.deepcopy(state))
        torch.manual_seed(99)  # the trainer's own: nothing of the order comes from there
        rest = plain(loader)
        then = plain(loader)
    except StateMismatchError as error:
        return f"refused: {error.field}"
    if [rest, then] == list(expected):
        return "equal"
    theirs = make(Theirs, program)
    theirs.load_state_dict(copy.deepcopy(state))
    resumed = [plain(theirs), plain(theirs)]
    if [rest, then] == resumed:
        return "as torchdata: it goes on in another way than without an interruption"
    is_right_now = rest in (expected[0], resumed[0]) or state["_iterator_finished"]
    if is_old() and program[1].startswith("shuffled") and is_right_now:
        return "order of 0.11: in later epochs"
    return f"wrong: {rest}, {then} and not {expected}"


def cells(programs: Any = EVERYTHING) -> Iterator[tuple[Any, str, str, str]]:
    """Go through all cells: program, moment, into what, and the outcome."""
    for program in programs:
        for moment, (state, *expected) in states(program).items():
            # What is read is the same: our plain loader goes through the simplest programs.
            for loader_class in (StatefulDataLoader, DataLoader)[: 2 if program[3:] == (1, False) else 1]:
                yield program, moment, loader_class.__name__, outcome(program, state, expected, loader_class)


def is_right(program: Any, found: str, name: str) -> bool:
    """Whether an outcome is what it has to be: equal, but for what is named here."""
    _, sampler, num_workers, _, persistent = program
    if sampler.startswith("shuffled") and name == "DataLoader":
        return found == "refused: sampler"  # whose order is torch's
    several = sampler == "no batches" and num_workers > 1
    if found == "refused: workers":
        return several and persistent
    # What begins anew after its end, which a state does not tell.
    # Until 0.10 the generator of a state was often noted before the base seed was drawn from it, and the order after.
    may_be_theirs = sampler.startswith("own, with a state") or several or (is_old() and sampler.endswith("generator"))
    return found.startswith(("equal", "order of 0.11")) or (may_be_theirs and found.startswith("as torchdata"))


def wrong(programs: Any = EVERYTHING) -> list[Any]:
    """List the cells whose outcomes are not what they have to be."""
    return [cell for cell in cells(programs) if not is_right(cell[0], cell[3], cell[2])]


def main() -> None:
    """Print each cell that is not equal, and how many there are of each."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    only = sys.argv[1:]
    print(f"torchdata {version('torchdata')}")
    for program, moment, name, found in cells([p for p in EVERYTHING if not only or p[0] in only]):
        counts[found.split(",")[0].split(": ")[0]] += 1
        if found != "equal":
            print(*program, "|", moment, "|", name, "|", found[:200], flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
