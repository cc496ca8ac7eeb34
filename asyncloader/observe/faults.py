"""What went wrong in one run over the data and was mended, so that nothing is mended in silence.

The session writes down what happened to workers, on the loop thread; a consumer, under its lock, the bad samples of the
batches that it takes. So the bad samples are counted in the order of the batches, and which batch is the first to
exceed ``max_errors`` depends on the data alone.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

from asyncloader.errors import describe_keys
from asyncloader.workers.protocol.failure import BadSample

if TYPE_CHECKING:
    from asyncloader.iteration.progress import Progress
    from asyncloader.loader import DataLoader

log = logging.getLogger("asyncloader")

_MOST_KEPT = 1000
_LEAST_EXPECTED = 1000


class LeftOut(NamedTuple):
    """A batch that an option left out: its indices as the sampler gave them, and why."""

    keys: Any
    reason: str


class Faults:
    """The mended faults of one run.

    Args:
        max_errors: How many bad samples there may be: a count, a share of the samples between 0 and 1, or None.
        num_samples: Samples of the run, if that is known; a share is taken of it. Else it is taken of the samples
            planned so far, or of 1000 where they are fewer.
        bad_before: Bad samples of the epoch before this run, which goes on with it from a state.
        planned_before: Samples that the sampler had named before it, if they are not among ``num_samples``.

    Attributes:
        retries: Batches that were run again because their worker died or hung over them.
        replacements: Processes that were started in place of others.
        timeouts: Batches whose worker was killed because they did not come in time.
        bad_count: Samples that raised and were left out or replaced.
        bad_samples: The last thousand of them.
        left_out: The last thousand of the batches that were left out.
    """

    def __init__(
        self,
        max_errors: int | float | None = None,
        num_samples: int | None = None,
        bad_before: int = 0,
        planned_before: int = 0,
    ) -> None:
        self.retries = 0
        self.replacements = 0
        self.timeouts = 0
        self.bad_count = 0
        self.bad_samples: deque[BadSample] = deque(maxlen=_MOST_KEPT)
        self.left_out: deque[LeftOut] = deque(maxlen=_MOST_KEPT)
        self._max_errors = max_errors
        self._num_samples = num_samples
        self._bad_before = bad_before
        self._planned_before = planned_before

    @property
    def bad_in_epoch(self) -> int:
        """Bad samples of the epoch so far, in this run and before it."""
        return self._bad_before + self.bad_count

    def leave_out(self, keys: Any, reason: str) -> None:
        """Note a batch that is left out."""
        self.left_out.append(LeftOut(keys, reason))

    def count_bad(self, bad: list[BadSample], planned_samples: int) -> Exception | None:
        """Count bad samples; return the error to raise if there are too many by now.

        Args:
            bad: Those of one batch.
            planned_samples: How many the sampler has named in this run.
        """
        if not self.bad_count:
            log.warning(
                "The sample with the index %s raised %s, and the batch is made without it, as on_error says. Further "
                "ones are only counted: see stats() of the loader.\n%s",
                describe_keys(bad[0].key),
                bad[0].error.type_name,
                bad[0].error.text,
            )
        self.bad_count += len(bad)
        self.bad_samples.extend(bad)
        if self.bad_in_epoch <= self._allowed(planned_samples):
            return None
        error = bad[0].error.rebuild([bad[0].key])
        error.add_note(
            f"{self.bad_in_epoch} samples have raised in this epoch, more than max_errors={self._max_errors}."
        )
        return error

    def rewind(self, bad_in_epoch: int) -> None:
        """Forget the last bad samples: their batch was interrupted, and is counted again."""
        self.bad_count = bad_in_epoch - self._bad_before
        while len(self.bad_samples) > self.bad_count:
            self.bad_samples.pop()

    def _allowed(self, planned_samples: int) -> float:
        limit = self._max_errors
        if limit is None:
            return float("inf")
        if isinstance(limit, int):
            return limit
        return limit * (self._num_samples or max(self._planned_before + planned_samples, _LEAST_EXPECTED))


def make_faults(loader: DataLoader[Any], progress: Progress) -> Faults:
    """Make the record of what goes wrong in a run of the loader, which begins or goes on here."""
    limit = loader.max_errors
    num_samples = _num_samples(loader) if isinstance(limit, float) else None
    return Faults(limit, num_samples, progress.bad_count, progress.position * (loader.batch_size or 1))


def _num_samples(loader: DataLoader[Any]) -> int | None:
    """Return how many samples a run has, if that can be known."""
    source: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or (loader.batch_sampler is not None and loader.batch_size is None):
        source = loader.dataset  # the sampler is not what names the samples
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
