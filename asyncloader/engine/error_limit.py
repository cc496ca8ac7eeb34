"""How many samples may raise before it is too much: ``max_errors``."""

from __future__ import annotations

from collections.abc import Sequence

from asyncloader.engine.progress import Progress
from asyncloader.errors import describe_keys
from asyncloader.log import log
from asyncloader.messages.failure import BadSample
from asyncloader.observe.faults import Faults
from asyncloader.options import Options

_LEAST_EXPECTED = 1000


class ErrorLimit:
    """Counts the bad samples of one run, in the order of its batches.

    So which batch is the first to exceed the limit depends on the data alone. Called by consumers, under their lock.

    A share is taken of the samples of a run, if their number is known; otherwise of those that the batches planned so
    far have, as far as that is known, or of 1000 where they are fewer.

    Args:
        options: With the limit.
        progress: Where the run begins, and how many samples of the epoch had raised before.
        faults: The faults of the run.
    """

    def __init__(self, options: Options, progress: Progress, faults: Faults) -> None:
        is_replaced = options.on_error == "replace" and options.auto_collation
        self._instead = "a good one of its batch takes its place" if is_replaced else "the batch is made without it"
        self._limit = options.max_errors
        self._num_samples = options.num_samples() if isinstance(self._limit, float) else None
        self._samples_in_batch = options.samples_in_batch
        self._bad_before = progress.now.bad_count
        self._progress = progress
        self.faults = faults

    def count(self, bad: Sequence[BadSample], before: int) -> BaseException | None:
        """Count bad samples; return the error to raise if there are too many by now.

        Args:
            bad: The samples of one batch. A batch that was interrupted on its way comes here once more.
            before: How many samples of the epoch had raised before them.
        """
        faults, first, count = self.faults, bad[0], before + len(bad)
        if not faults.bad_count:
            log.warning(
                "The sample with the index %s raised %s, and %s, as on_error says. Further ones are only counted: see "
                "stats() of the loader.\n%s",
                describe_keys(first.key),
                first.error.type_name,
                self._instead,
                first.error.text,
            )
        if count - self._bad_before > faults.bad_count:
            faults.note_bad(count - self._bad_before, [sample.key for sample in bad])
        if count <= self._allowed():
            return None
        error = first.error.rebuild([first.key])
        error.add_note(f"{count} samples have raised in this epoch, more than max_errors={self._limit}.")
        return error

    def _allowed(self) -> float:
        limit = self._limit
        if limit is None:
            return float("inf")
        if isinstance(limit, int):
            return limit
        return limit * (self._num_samples or max(self._progress.read * self._samples_in_batch, _LEAST_EXPECTED))
