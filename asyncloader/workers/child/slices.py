"""Make batches in slices: of one worker's share the samples, of all samples the batch.

    Slice ── fetch ──> Written: into its rows of the batch
                   └─> Samples: its good samples, and where bad ones were          another worker, of all slices:
    Together ── open ──> the samples of all slices ── without bad ones ── collate ──> Batch
             └─ or, where most are written already: into their rows of the batch ──> Written

What samples draw depends on their places in the epoch, so a slice is the same whoever makes it, and a batch of slices
is what one worker would make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

from asyncloader.seeding import sample_context
from asyncloader.seeding.sample_context import COLLATION, Placed
from asyncloader.transport.rows import RowsOf
from asyncloader.workers.child.batch_maker import BatchMaker, Work
from asyncloader.workers.child.fetch import MapFetcher, replaced
from asyncloader.workers.child.transport import WorkerTransport
from asyncloader.workers.protocol.messages import Slice, Together, WorkerSpec
from asyncloader.workers.protocol.outcome import Batch, Outcome, Samples, Stuck, Written


class SliceMaker(BatchMaker):
    """Makes batches, and slices of batches. As `BatchMaker` otherwise.

    Args:
        worker_id: From 0.
        spec: What to work with.
        transport: To the parent.
        run: Runs a coroutine to its end.
    """

    def __init__(
        self,
        worker_id: int,
        spec: WorkerSpec,
        transport: WorkerTransport,
        run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
    ) -> None:
        super().__init__(worker_id, spec, transport, run)
        self._transport = transport

    def make(self, seq: int, keys: Any, waited_s: float = 0.0) -> Outcome:
        """Make a batch, the samples of a slice, or a batch of the samples of its slices."""
        if type(keys) not in (Slice, Together):
            return super().make(seq, keys, waited_s)
        if (refused := self.refused(seq, keys)) is not None:
            return refused
        work = Work(seq, waited_s)
        outside = sample_context.current.set(sample_context.here())
        try:
            return self._samples(work, keys) if type(keys) is Slice else self._together(work, keys)
        except BaseException as error:
            if self._host.ends(error):
                raise
            return self.failed(work, error)
        finally:
            sample_context.current.reset(outside)

    def _samples(self, work: Work, part: Slice) -> Outcome:
        fetch = self._fetch
        assert isinstance(fetch, MapFetcher)
        here, keys = self._placed(self._epoch.key, work.seq, part.keys)
        sample_context.current.set(here)
        samples = fetch.good(keys)
        work.fetched = perf_counter()
        if type(samples) is not list or len(samples) + len(fetch.bad) != len(keys):
            return Stuck(self._record(work))  # a batch already, or samples of which nobody can say which is which
        work.count = len(samples)
        bad = [sample._replace(position=part.begin + sample.position) for sample in fetch.bad]
        if part.rows is not None and not bad:
            texts = self._transport.write_rows(part.rows, samples, part.begin)
            if texts is not None:
                return Written(self._record(work), texts)
        layout = self._transport.layout_of(samples, self.spec.collate_fn)
        return Samples(self._record(work), list(samples), 0, bad, layout)

    def _together(self, work: Work, whole: Together) -> Outcome:
        here, _ = self._placed(self._epoch.key, work.seq, Placed((), whole.first))
        sample_context.current.set(here)
        try:
            if whole.rows is not None and (texts := self._write_rest(whole)) is not None:
                return Written(self._record(work), texts)
            slices = self._transport.open_samples(whole.slices, self.spec.collate_fn)
        except Exception:
            return Stuck(self._record(work))
        samples = [sample for members in slices for sample in members]
        del slices  # what they lie in is somebody else's when the batch has been sent
        if whole.bad and self.spec.on_error == "replace":
            bad = frozenset(whole.bad)
            samples = replaced(samples, [place for place in range(whole.size) if place not in bad], whole.size)
        work.fetched = perf_counter()
        here.position = COLLATION
        data = self._host.collate(self.spec.collate_fn, samples)
        return Batch(self._record(work), data)

    def _write_rest(self, whole: Together) -> list[Any] | None:
        """Write the samples that have come into the batch; return the texts of each slice, None if that cannot be."""
        texts: list[Any] = []
        begin = 0
        for part in whole.slices:
            if isinstance(part, RowsOf):
                begin = part.end
                continue
            (samples,) = self._transport.open_samples([part], self.spec.collate_fn)
            if (words := self._transport.write_rows(whole.rows, samples, begin)) is None:
                return None
            texts.append(words)
            begin += len(samples)
        return texts
