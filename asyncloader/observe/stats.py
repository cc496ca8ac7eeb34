"""Where the time of a run over the data went: what was waited for, and what would help.

    stats = loader.stats()
    print(stats.verdict)      # one sentence
    print(stats)              # the figures behind it

A snapshot is taken in 20 us; its quantiles, texts and the verdict are worked out when somebody looks at them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from asyncloader.observe.figures import Figures, Stages
from asyncloader.observe.tally import Timing, show_bytes, show_s
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
        ranks_s: Seconds between these in which other ranks were waited for, with ``equal_steps``.
        waited: How long the consumer waited for each batch after the first.
        ready: How long each batch waited for the consumer, once it was its turn.
        stages: How long each stage took.
        work: Fetch, collate and encode of a batch together.
        workers: The work of each worker, those that have left included.
        worker_cpu_s: CPU seconds of the workers.
        worker_stalled_s: Seconds that workers were ready to run while others had the cores.
        remote_cpu_s: The part of these two that is of workers on other machines.
        received: Bytes of batches from other machines that did not come in one piece, how long at least one was on its
            way, and CPU seconds of the receiving thread meanwhile.
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
        changes: When workers came or went, and how many there were then.
        renewals: Workers whose place another process has taken, by ``max_tasks_per_child`` or ``max_worker_memory``.
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
        plain: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Timing):
                value = value.as_dict()
            elif isinstance(value, Stages):
                value = {name: timing.as_dict() for name, timing in value}
            elif field.name == "workers":
                value = [{**asdict(worker), "busy_share": worker.busy_share} for worker in self.workers]
            elif field.name == "received":
                value = self.received._asdict()
            elif field.name == "changes":
                value = [change._asdict() for change in self.changes]
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
            f"{self.window_used:.1f} batches ahead (window {self.window}), {self.window_ready:.1f} of them ready",
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
        if self.changes:
            told = ", ".join(f"{change.num_workers} after {show_s(change.at_s)}" for change in self.changes[-10:])
            lines.append(f"workers came and went: {told}")
        if known := [worker for worker in self.workers if worker.private_bytes]:
            shown = [f"{worker.worker_id}: {show_bytes(worker.private_bytes)}" for worker in known[:_MOST_SHOWN]]
            shown += ["..."] * (len(known) > _MOST_SHOWN)
            renewed = f"; renewed {self.renewals} times" * bool(self.renewals)
            lines.append(f"memory of each worker's own: {', '.join(shown)}{renewed}")
        elif self.renewals:
            lines.append(f"workers were renewed {self.renewals} times")
        lines += self._of_nodes()
        return "\n".join(lines)

    def _of_nodes(self) -> list[str]:
        """Say what each other machine did."""
        lines = []
        count = len({worker.worker_id for worker in self.workers if worker.node})
        if count < (wanted := self.options.get("wanted_on_nodes") or 0):
            lines.append(
                f"{count} of {wanted} workers on other machines took part: there was no room for the others yet"
            )
        for node in sorted({worker.node for worker in self.workers} - {""}):
            there = [worker for worker in self.workers if worker.node == node]
            busy_s, idle_s = (sum(getattr(worker, name) for worker in there) for name in ("busy_s", "idle_s"))
            share = min(1.0, busy_s / (busy_s + idle_s)) if busy_s + idle_s else 0.0
            batches = sum(worker.batches for worker in there)
            lines.append(f"node {node}: {batches} batches by {len(there)} workers, busy {share:.0%}")
        if (received := self.received).seconds:
            rate, thread = received.nbytes / received.seconds, min(1.0, received.cpu_s / received.seconds)
            lines.append(
                f"from other machines: {received.nbytes / 1e6:.1f} MB at {rate / 1e9:.2g} GB/s, a batch on its way "
                f"{self.receiving_share:.0%} of the time (the thread that receives was busy {thread:.0%} of that)"
            )
        return lines
