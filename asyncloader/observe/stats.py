"""Where the time of a run over the data went: what was waited for, and what would help.

    stats = loader.stats()
    print(stats.verdict)      # one sentence
    print(stats)              # the figures behind it

A snapshot is taken in 25 to 200 us; its quantiles, texts and the verdict are worked out when somebody looks at them.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from asyncloader.observe.faults import Faults
from asyncloader.observe.figures import Stages, Waiting, Workers
from asyncloader.observe.timing import Timing, show_bytes, show_s
from asyncloader.observe.verdict import Costs, Verdict, judge

_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Figures of a run over the data (an epoch) at one moment.

    Attributes:
        epoch: Which run of the loader, from 0.
        num_workers: Workers that there are now; 0 if the consumer's thread makes the batches itself, 1 if a thread
            beside it does.
        cores: Cores that this process may use.
        batches: Batches that were taken.
        samples: Samples in the batches that were made, as far as they can be counted.
        bytes: Bytes of the batches that were made.
        elapsed_s: From ``iter()`` to the last batch taken.
        first_batch_s: The part of `elapsed_s` until the first batch: starting workers, opening the dataset.
        training_s: Seconds between the first batch and the last in which nobody waited for one: training.
        main_cpu_s: CPU seconds of this process since the first batch, without those of workers that are threads.
        waiting: What waited for what: the consumer for batches and for keys, batches for the consumer.
        stages: How long each stage of the batches took.
        workers: What the workers did, each of them and together.
        faults: What went wrong and was mended, or was raised in place of a batch.
        options: What of the loader's options the verdict builds on.
        story: With ``stats(story=True)``, the last 1,000 events that decided who makes which batch, for a report.
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
    main_cpu_s: float
    waiting: Waiting
    stages: Stages
    workers: Workers
    faults: Faults
    options: dict[str, Any]
    story: tuple[Sequence[Any], ...] = ()

    @property
    def waited_share(self) -> float:
        """Share of the time since the first batch in which the consumer waited; at most 1 with several consumers."""
        waited_s = self.waiting.consumer.total_s
        return waited_s / (waited_s + self.training_s) if waited_s else 0.0

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
        """The limit of the training, and what would help."""
        work, workers, options = self.stages.work, self.workers, self.options
        later, made = max(1, self.batches - 1), max(1, work.count)
        batch_s = max(1e-9, (self.waiting.consumer.total_s + self.training_s) / later)
        # Where a worker fetches several batches at once each of them takes longer than it occupies the worker.
        work_s = min(max(0.0, work.total_s - workers.opening_s) / made, batch_s * (self.num_workers or math.inf))
        elsewhere = max(2, self.num_workers) * 4  # cores that a provider may bring
        costs = Costs(
            batches=self.batches,
            workers=self.num_workers,
            cores=elsewhere if options.get("has_provider") else self.cores,
            batch=batch_s,
            train=self.training_s / later,
            keys=self.waiting.sampler.total_s / later,
            work=work_s,
            worker_cpu=(workers.cpu_s + workers.stalled_s) / made,
            stalled=workers.stalled_s / made,
            main_cpu=self.main_cpu_s / later,
            start=max(0.0, self.first_batch_s - work_s) if self.num_workers else 0.0,
            elapsed=self.elapsed_s,
            nbytes=self.bytes / made,
            busy_share=workers.busy_share,
            stages=self.stages,
            options=options,
        )
        return judge(costs)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dicts, for JSON."""
        derived = {name: getattr(self, name) for name in ("waited_share", "batches_per_s", "samples_per_s", "verdict")}
        found = {**_fields(self), **derived, "busy_share": self.workers.busy_share}
        plain: dict[str, Any] = json.loads(json.dumps(found, default=_plain))
        return plain

    def __str__(self) -> str:
        waiting, stages, workers = self.waiting, self.stages, self.workers
        lines = [
            f"epoch {self.epoch}: {self.batches} batches, {self.samples} samples, "
            f"{f'{self.bytes / 1e6:.1f} MB ' * bool(self.bytes)}in "
            f"{show_s(self.elapsed_s)} ({self.batches_per_s:.1f} batches/s)",
            f"{self.verdict}",
            f"first batch after {show_s(self.first_batch_s)}; workers busy {workers.busy_share:.0%}; "
            f"{waiting.ahead:.1f} batches ahead (window {waiting.window}), {waiting.ready:.1f} of them ready",
            f"{'':20}{'mean':>10}{'p50':>10}{'p99':>10}{'longest':>10}",
        ]
        rows = {
            "waited for a batch": waiting.consumer,
            "  for its keys": waiting.sampler,
            "batches lay ready": waiting.batch,
            **dict(stages),
        }
        lines += [
            f"{name:20}{show_s(t.mean_s):>10}{show_s(t.p50_s):>10}{show_s(t.p99_s):>10}{show_s(t.longest_s):>10}"
            for name, t in rows.items()
            if t.total_s
        ]
        counts = {field.name: getattr(self.faults, field.name) for field in fields(self.faults)}
        if mended := [f"{name} {count}" for name, count in counts.items() if isinstance(count, int) and count]:
            lines.append(", ".join(mended))
        if workers.changes:
            told = ", ".join(f"{count} after {show_s(at_s)}" for at_s, count in [*workers.changes.items()][-10:])
            lines.append(f"workers came and went: {told}")
        if known := [worker for worker in workers.each if worker.private_bytes]:
            shown = [f"{worker.worker_id}: {show_bytes(worker.private_bytes)}" for worker in known[:_MOST_SHOWN]]
            lines.append(f"memory of each worker's own: {', '.join(shown)}{', ...' * (len(known) > _MOST_SHOWN)}")
        if workers.renewals:
            lines.append(f"workers were renewed {workers.renewals} times")
        return "\n".join(lines)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _plain(value: Any) -> Any:
    """Return what JSON is to say of something that it does not know: a record, or a key of the user's."""
    if isinstance(value, Timing):
        return value.as_dict()
    if is_dataclass(value):
        return _fields(value)
    return list(value) if isinstance(value, deque) else repr(value)
