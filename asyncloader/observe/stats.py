"""Where the time of a run over the data went: what was waited for, and what would help.

    stats = loader.stats()
    print(stats.verdict)      # one sentence
    print(stats)              # the figures behind it

A snapshot is taken in 20 us; its quantiles, texts and the verdict are worked out when somebody looks at them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from asyncloader.observe.figures import Figures
from asyncloader.observe.timing import Timing, show_bytes, show_s
from asyncloader.observe.verdict import Verdict, judge

_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LoaderStats(Figures):
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
        main_cpu_s: CPU seconds of this process since the first batch, those of workers that are threads included.
        waiting: What waited for what: the consumer for batches and for keys, batches for the consumer.
        stages: How long each stage of the batches took.
        workers: What the workers did, each of them and together.
        faults: What went wrong and was mended, or was raised in place of a batch.
        options: Options of the loader that the verdict builds on.
    """

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
        return judge(self)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dicts, for JSON."""
        derived = {name: getattr(self, name) for name in ("waited_share", "batches_per_s", "samples_per_s")}
        derived["busy_share"] = self.workers.busy_share
        return {**_plain(self), **derived, "verdict": _plain(self.verdict)}

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
            told = ", ".join(f"{change.num_workers} after {show_s(change.at_s)}" for change in workers.changes[-10:])
            lines.append(f"workers came and went: {told}")
        if known := [worker for worker in workers.each if worker.private_bytes]:
            shown = [f"{worker.worker_id}: {show_bytes(worker.private_bytes)}" for worker in known[:_MOST_SHOWN]]
            lines.append(f"memory of each worker's own: {', '.join(shown)}{', ...' * (len(known) > _MOST_SHOWN)}")
        if workers.renewals:
            lines.append(f"workers were renewed {workers.renewals} times")
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Timing):
        return value.as_dict()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | deque):
        return list(map(_plain, value))
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
