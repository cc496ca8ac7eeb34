"""Where the time of a run over the data went: what was waited for, and what would help.

    stats = loader.stats()
    print(stats.verdict)      # one sentence
    print(stats)              # the figures behind it

A snapshot is taken in 20 us; its quantiles, texts and the verdict are worked out when somebody looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from asyncloader.observe.tally import Timing, show_s
from asyncloader.observe.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What one worker did.

    Attributes:
        worker_id: From 0.
        batches: Batches that it made.
        busy_s: Seconds that it worked.
        idle_s: Seconds that it waited for something to do, its first ticket left aside.
    """

    worker_id: int
    batches: int
    busy_s: float
    idle_s: float

    @property
    def busy_share(self) -> float:
        """Share of its time that it worked; where it fetches several batches at once, at most 1."""
        total = self.busy_s + self.idle_s
        return min(1.0, self.busy_s / total) if total else 0.0


@dataclass(frozen=True, slots=True)
class Stages:
    """How long each stage of a batch took.

    Attributes:
        queue: In the worker's queue, behind other batches.
        fetch: In the dataset's ``__getitem__`` or iterator.
        collate: In ``collate_fn``.
        encode: Making it ready to be sent: nothing for tensors and arrays in shared memory, pickling for the rest.
        transfer: From the worker to this process, reading included.
        decode: The part of `transfer` that this process spent on reading.
        pin: Copying into page-locked memory, on a side thread.
        order: Waiting for an earlier batch, once it was there.
    """

    queue: Timing
    fetch: Timing
    collate: Timing
    encode: Timing
    transfer: Timing
    decode: Timing
    pin: Timing
    order: Timing

    def __iter__(self) -> Iterator[tuple[str, Timing]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """One run over the data (an epoch), as it is at one moment.

    Attributes:
        epoch: Which run of the loader, from 0.
        num_workers: Workers; 0 if the consumer's thread makes the batches itself, 1 if a thread beside it does.
        cores: Cores that this process may use.
        batches: Batches that were taken.
        samples: Samples in the batches that were made, as far as they can be counted.
        bytes: Bytes of the batches that were made.
        elapsed_s: From ``iter()`` to the last batch taken.
        first_batch_s: Of it, until the first batch: starting workers, opening the dataset.
        training_s: Seconds between the first batch and the last in which nobody waited for one: training.
        waited: How long the consumer waited for each batch after the first.
        ready: How long each batch waited for the consumer, once it was its turn.
        stages: How long each stage took.
        work: Fetch, collate and encode of a batch together.
        workers: What each worker did.
        worker_cpu_s: CPU seconds of the workers.
        worker_stalled_s: Seconds that workers were ready to run while others had the cores.
        main_cpu_s: CPU seconds of this process since the first batch, those of workers that are threads included.
        window: Batches that are being made or waiting at a time: ``prefetch_factor * num_workers``.
        window_used: Batches that were being made or waiting when the consumer came, on average; more than `window`
            where workers ran ahead.
        window_ready: Batches that lay ready when the consumer came, on average.
        errors: Exceptions that were handed over in place of a batch.
        retries: Batches that were run again.
        replacements: Workers that were started in place of others.
        timeouts: Batches whose worker was killed because they did not come in time.
        bad_count: Samples that raised and were left out or replaced.
        bad_samples: Keys of the last thousand of them.
        left_out: Keys of the last thousand batches that were left out.
        options: What of the loader's options the verdict builds on.
    """

    epoch: int
    num_workers: int
    cores: int
    batches: int
    samples: int
    bytes: int
    elapsed_s: float
    first_batch_s: float
    training_s: float
    waited: Timing
    ready: Timing
    stages: Stages
    work: Timing
    workers: tuple[WorkerStats, ...]
    worker_cpu_s: float
    worker_stalled_s: float
    main_cpu_s: float
    window: int
    window_used: float
    window_ready: float
    errors: int
    retries: int
    replacements: int
    timeouts: int
    bad_count: int
    bad_samples: tuple[Any, ...]
    left_out: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def busy_share(self) -> float:
        """Share of the workers' time in which they worked."""
        busy_s, idle_s = (sum(getattr(worker, name) for worker in self.workers) for name in ("busy_s", "idle_s"))
        return min(1.0, busy_s / (busy_s + idle_s)) if busy_s + idle_s else 0.0

    @property
    def waited_share(self) -> float:
        """Share of the time since the first batch in which the consumer waited; at most 1 with several consumers."""
        total = self.waited.total_s + self.training_s
        return self.waited.total_s / total if total else 0.0

    @property
    def batches_per_s(self) -> float:
        """Batches a second, the time until the first one included."""
        return self.batches / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second, the time until the first one included."""
        return self.samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def verdict(self) -> Verdict:
        """What limited the training, and what would help."""
        return judge(self)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dicts, for JSON."""
        plain: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Timing):
                value = value.as_dict()
            elif isinstance(value, Stages):
                value = {name: timing.as_dict() for name, timing in value}
            elif field.name == "workers":
                value = [
                    {name: getattr(worker, name) for name in ("worker_id", "batches", "busy_s", "idle_s", "busy_share")}
                    for worker in self.workers
                ]
            elif isinstance(value, tuple):
                value = [repr(key) for key in value]
            plain[field.name] = value
        for name in ("busy_share", "waited_share", "batches_per_s", "samples_per_s"):
            plain[name] = getattr(self, name)
        return {**plain, "verdict": self.verdict.as_dict()}

    def __str__(self) -> str:
        lines = [
            f"epoch {self.epoch}: {self.batches} batches, {self.samples} samples, "
            f"{f'{self.bytes / 1e6:.1f} MB ' * bool(self.bytes)}in "
            f"{show_s(self.elapsed_s)} ({self.batches_per_s:.1f} batches/s)",
            f"{self.verdict}",
            f"first batch after {show_s(self.first_batch_s)}; workers busy {self.busy_share:.0%}; "
            f"window {self.window_used:.1f} of {self.window}, {self.window_ready:.1f} ready",
            f"{'':10}{'mean':>10}{'p50':>10}{'p99':>10}{'longest':>10}",
        ]
        rows = [("waited", self.waited), ("ready", self.ready), *self.stages]
        lines += [
            f"{name:10}{show_s(t.mean_s):>10}{show_s(t.p50_s):>10}{show_s(t.p99_s):>10}{show_s(t.longest_s):>10}"
            for name, t in rows
            if t.total_s
        ]
        names = ("errors", "retries", "replacements", "timeouts", "bad_count")
        if mended := [f"{name} {getattr(self, name)}" for name in names if getattr(self, name)]:
            lines.append(", ".join(mended))
        return "\n".join(lines)
