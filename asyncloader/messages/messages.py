"""Messages on the channel: frames of a fixed header and a body.

    header: length of the body (u64), kind (u8)
    body:   pickled (small, control), or an outcome (see :mod:`asyncloader.messages.outcome`)

    parent -> worker   TICKETS  returned, [(ticket, pickled keys)...] a batch each to do, and slabs to use again; see
                                                              :mod:`asyncloader.messages.tickets`
                       EPOCH    EpochSpec                     a new run over the data; earlier tickets are forgotten
                       WHERE    ticket                        tell at which awaits the samples of this ticket are
                       END      nothing                       finish: clean up and leave
                       CONFIRM  number of the run             answer to ENDING
    worker -> parent   UP       nothing                       the generators are free; what follows is the user's code
                       READY    nothing                       the dataset is open, `worker_init_fn` has run
                       BATCH, FAILURE, REFUSED, LEFT_OUT,
                       EXHAUSTED                              what has become of a ticket
                       ENDING   number of the run             the iterable dataset has ended; what follows from that
                                                              is told when this worker has lived on to a CONFIRM
                       IDLE     nothing                       it has waited for long; answered by TICKETS without
                                                              tickets, but with slabs to be given back
                       AWAITS   text                          answer to WHERE

Nothing here is taken from strangers: a channel is an anonymous socketpair between a process and the one that made it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from asyncloader.epochs import EpochNotice
from asyncloader.messages.modes import Modes
from asyncloader.messages.snapshot import WorkerStart
from asyncloader.observe.record import Record as Record
from asyncloader.options import OnError

HEADER = struct.Struct("<QB7x")
MAX_FRAME_BYTES = 1 << 40


class Kind:
    """The kinds of frames: plain numbers, for members of an enum take five times as long to compare."""

    TICKETS = 1
    EPOCH = 3
    END = 4
    WHERE = 5
    CONFIRM = 6
    UP = 15
    READY = 16
    BATCH = 17
    FAILURE = 18
    EXHAUSTED = 19
    LEFT_OUT = 22
    AWAITS = 23
    IDLE = 24
    ENDING = 25
    REFUSED = 27


KINDS = frozenset(kind for kind in vars(Kind).values() if type(kind) is int)


class EpochSpec(NamedTuple):
    """The description of a run over the data, for a worker.

    Attributes:
        number: Counts the runs of a pool; frames of an earlier run are dropped by it.
        key: Base seed, runs that had it before, and rank: with a sequence number they give the seeds of a batch.
        shared_seed: For IterDataPipe.
        notice: The epochs that `set_epoch` has told the dataset.
        starts: Where each worker begins, for datasets that workers have a place in; None for others. Before a worker
            is replaced the session writes down where the next one begins.
        num_workers: How many workers there are, for one that comes later than the first; 0 for as many as those.
        epoch: How many runs the loader had before.
        generators: The keys of generators that the dataset holds, by their paths.
    """

    number: int
    key: tuple[int, int, int]
    shared_seed: int | None = None
    starts: dict[int, WorkerStart] | None = None
    notice: EpochNotice = EpochNotice()
    num_workers: int = 0
    epoch: int = 0
    generators: dict[str, tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker's view of the options: the part that it needs, under the same names.

    Inherited under fork, pickled once for all workers otherwise.

    Attributes:
        seeds_each_batch: Seed the global generators for each batch.
        seeds_each_sample: Seed them for each sample, which are made one after the other.
        knows_places: Random numbers depend on the sample, so the samples of a batch are asked for one by one.
        seeds_overlapping: Coroutines have draws of their own, by step.
        shares_generators: Samples that are fetched at once share generators, although the loader seeds: so draws are
            warned of.
        samples_at_once: How many samples one worker fetches at once.
        snapshot_every: Batches from one snapshot of the dataset's state to the next at least; 0 for none.
        keeps_dataset: The worker, and its dataset, are there for the next run too.
        is_async: The dataset is async; otherwise its samples are fetched on threads where there are several at once.
        modes: The modes of the iterating thread; None where the worker is not to have them.
        importing: The modules that the iterating thread is in the middle of importing.
        max_worker_memory: Tell of growth early, since the worker is to be renewed before it has much more than this.
    """

    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Any
    drop_last: bool
    worker_init_fn: Any
    num_workers: int
    base_seed: int
    seeds_each_batch: bool
    seeds_each_sample: bool = False
    knows_places: bool = False
    seeds_overlapping: bool = False
    shares_generators: bool = False
    on_error: OnError = "raise"
    samples_at_once: int = 1
    is_async: bool = False
    snapshot_every: int = 1
    keeps_dataset: bool = False
    modes: Modes | None = None
    importing: frozenset[str] = frozenset()
    max_worker_memory: int | None = None

    @property
    def overlaps(self) -> bool:
        """Whether samples are fetched on a loop, several at once."""
        return self.is_async or self.samples_at_once > 1

    @property
    def tolerates(self) -> bool:
        """Whether a sample that raises does not cost its batch."""
        return self.on_error != "raise"

    def with_dataset(self, dataset: Any) -> WorkerSpec:
        """Return the same with another dataset."""
        return replace(self, dataset=dataset)
