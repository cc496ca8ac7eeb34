"""The state of a loader: one frozen record, made on demand, and loaded by `asyncloader.run.run_start.begin`.

    Checkpointer.state() ──> LoaderState ── as_dict ──> plain values: the user saves them
                                   <─ from_dict ── whatever the user loads

As a dictionary a state has plain values, and is a new one at each call: strings, numbers, lists of them. States of the
user's objects are in it as JSON text if that says all there is, else as they are; so the keys of two states are the
same whatever was saved, which torch.distributed.checkpoint needs.

Two kinds of states: one in the middle of a run, from which that run is resumed, and one between two runs (before the
first, or after the end of one), where ``base_seed`` is None unless persistent workers keep theirs.

A state between two runs also contains the counts of epochs that samplers and datasets keep. Samplers load their last
state of the run that was over and are drawn to its end, so they do by themselves what they do then. Datasets that
outlast a run, without workers or in persistent ones, provide their state after its end; others begin each run as the
trainer's process has them.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any

from asyncloader.errors import StateMismatchError
from asyncloader.messages.snapshot import WorkerStart, from_plain
from asyncloader.options import Options
from asyncloader.seeding.own_generators import Key

VERSION = 6
ALL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """Where a loader is.

    Attributes:
        epoch: Runs of the loader before this one.
        begun: Runs that the loader had begun, if others were begun beside this one.
        position: Batches of the run that are done with.
        ahead: The numbers of further batches that are done with.
        sample: Samples of the epoch before that position; -1 if the run has not counted them.
        bad_count: Samples of the run that have raised, and were left out or replaced.
        finished: It is a state after the end of a run.
        base_seed: Of this run, or None if the next one draws its own.
        reruns: Runs that had this base seed before.
        shared_seed: Of data pipes.
        generators: The keys of generators that the dataset holds, by their paths (JSON).
        at_iter: The random generators when the samplers were iterated over (JSON).
        at_next: The same when these were first read, "" if no others; or as they are now, if that was not yet.
        is_drawn: The samplers have been read.
        check: Tells what the global generators are now, -1 if nobody can say.
        set_epochs: What `set_epoch` of samplers had been called with, from the outermost on.
        dataset_epochs: What that of datasets had been called with.
        next_epochs: Which epochs begin next, of samplers first, as if `set_epoch` were called once this is loaded. None
            for those that say it themselves; [] for none.
        samplers: The last state of samplers that was taken.
        drawn: How many batches their present iterator has given since.
        passes: How many answers each iterator that is dropped by now has given since.
        workers: Where each worker is in a dataset that it has a place or a state in.
        next_worker: Whose turn it is.
        has_past: They had made epochs before this one.
        left_out: How many batches after all that the run reads and drops, or ALL, after which the next run begins: see
            `asyncloader.stateful.torchdata_state`.
        fits: What of the loader must be the same: see `asyncloader.run.fits`.
        others: What libraries have put into the dictionary, as Accelerate does: it stays there.
    """

    epoch: int
    begun: int = 0
    position: int = 0
    ahead: list[int] = field(default_factory=list)
    sample: int = 0
    bad_count: int = 0
    finished: bool = False
    base_seed: int | None = None
    reruns: int = 0
    shared_seed: int | None = None
    generators: str = "{}"
    at_iter: str = ""
    at_next: str = ""
    is_drawn: bool = False
    check: list[int] = field(default_factory=list)
    set_epochs: list[int | None] = field(default_factory=list)
    dataset_epochs: list[int | None] = field(default_factory=list)
    next_epochs: list[int | None] = field(default_factory=list)
    samplers: Any = None
    drawn: int = 0
    passes: list[int] = field(default_factory=list)
    workers: Any = None
    next_worker: int | None = None
    has_past: bool = False
    left_out: int = 0
    fits: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, plain: Any) -> LoaderState:
        """Read what `as_dict` has written; nothing of it is kept.

        Raises:
            StateMismatchError: if that is no state of this version, or not all of one.
        """
        version = plain.get("version") if isinstance(plain, dict) else type(plain).__name__
        if version != VERSION:
            raise StateMismatchError("version", version, VERSION, "It is not a state of this version of asyncloader.")
        if missing := set(_NAMES) - plain.keys():
            advice = f"It is not all that a loader had given: without {', '.join(sorted(missing))}."
            raise StateMismatchError("keys", sorted(plain), sorted(_NAMES), advice)
        others = copy.deepcopy({name: value for name, value in plain.items() if name != "version"})
        ours = {name: others.pop(name) for name in _NAMES}
        return cls(**ours, others=others)

    def as_dict(self) -> dict[str, Any]:
        """Write it down as plain values, which are the caller's if no other record has them."""
        return {"version": VERSION, **{name: getattr(self, name) for name in _NAMES}, **self.others}

    @property
    def is_between_runs(self) -> bool:
        """Whether it is of the time before a run or after it, and not in its middle."""
        return self.finished or self.base_seed is None

    @property
    def keeps_seed(self) -> bool:
        """Whether the run that begins from it has its base seed, and draws none."""
        return self.base_seed is not None

    @property
    def starts(self) -> dict[int, WorkerStart] | None:
        """Where each worker begins."""
        return None if self.workers is None else from_plain(self.workers)

    @property
    def generator_keys(self) -> dict[str, Key]:
        """The keys of generators that the dataset holds."""
        return {path: (check, first) for path, (check, first) in json.loads(self.generators).items()}


def read_state(state: Any, options: Options) -> LoaderState:
    """Read a state of ours, or of torchdata's; what reads those is imported where there is one.

    Raises:
        StateMismatchError: if it is neither, or if nobody can know how the loader would go on from it.
    """
    if not isinstance(state, dict) or "version" in state or not state.keys() & _OF_TORCHDATA:
        return LoaderState.from_dict(state)
    # By its name: that room is above this one, and no other state needs it.
    return import_module("asyncloader.stateful.torchdata_state").converted(state, options)  # type: ignore[no-any-return]


_OF_TORCHDATA = {"_snapshot", "_num_yielded", "root"}
"""Keys of its states, of which each has one."""
_NAMES = tuple(each.name for each in fields(LoaderState) if each.name != "others")
