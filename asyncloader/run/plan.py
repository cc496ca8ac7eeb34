"""Reads batches of keys from the sampler, so that an epoch can be resumed in the middle.

How a plan is resumed at batch n: samplers with a state load the last one that was taken, up to n; for others the
generators are set to what they were when the order was drawn (`OrderDraw`). The batches from there to n are drawn and
dropped; no data are read for it.

All of it happens in the consumer's thread: samplers are the user's.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from types import GeneratorType
from typing import Any

from torch.utils.data import BatchSampler

from asyncloader.engine.actions import END, NOTHING, VOID
from asyncloader.engine.hang_report import FIRST_S
from asyncloader.engine.progress import Progress
from asyncloader.epochs import hears, tell
from asyncloader.errors import LoaderClosedError, timed_out
from asyncloader.log import log
from asyncloader.messages.snapshot import Frozen, Pace
from asyncloader.options import Options
from asyncloader.plain import plain, unplain
from asyncloader.protocols import answers_of, is_stateful, probe
from asyncloader.run.random_order import Batches, RandomOrder, indices, skip
from asyncloader.run.rng_snapshot import OrderDraw, RNGSnapshot, draws_once, restores_forgotten
from asyncloader.run.state import LoaderState
from asyncloader.samplers.ordered import ResumableSampler, Run, bare_state, newest_run, whole_state
from asyncloader.weak import while_alive


def samplers_within(index_sampler: Any) -> list[Any]:
    """List an index sampler and the samplers that it is made of, the outermost first."""
    found: list[Any] = []
    todo = [index_sampler]
    while todo:
        sampler = todo.pop(0)
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            todo += [probe(sampler, name) for name in ("batch_sampler", "sampler")]
    return found


_torch_iter = BatchSampler.__iter__


def order_generators(options: Options) -> RNGSnapshot:
    """Return the generators that the order of the loader's epochs is drawn from."""
    reads_stream = options.is_inline and options.is_iterable and not is_stateful(options.dataset)
    return RNGSnapshot(options.generator, samplers_within(options.index_sampler), reads_stream=reads_stream)


class Plan:
    """Iterator over the batches of keys of one epoch; VOID where the batch was done with before the run.

    Read by one thread at a time. Keys that were read stay in `keys` until whoever has made something of them sets it to
    NOTHING: an interrupt, which may come after any call, loses none. They get there by an assignment with no call in
    between, so what an iterator has given is never lost on the way: ``for self.keys in feed`` and not ``next``. A
    sampler whose keys arrive as time goes by is asked when they are there (`must_wait`).

    torch's own BatchSampler is taken apart, so that the state of the iterator over the sampler within can be had, and
    what is skipped is not put into batches first.

    States of samplers are taken after the first batch, and then as `Pace` allows. Not after a short one, whose sampler
    has come to its end and may have begun anew: it is drawn again from the state before. States of elastic samplers are
    taken after every batch: after a resume, another number of ranks may draw these samples.

    Args:
        index_sampler: The sampler that torch's loader iterates over: of batches, where there are batches.
        iterator: Its iterator, which torch has made.
        progress: Where is counted what was read; samplers' states are left there.
        pace: When to take these.
        is_batched: Keys name the samples of a batch; otherwise one sample.
        order: Notes the generators when the order is drawn, or has it drawn again.

    Attributes:
        keys: What was read and nobody has taken: the keys of the batch before `Progress.read`, VOID, or END for good.
        arrives: The sampler knows whether it has keys: `ArrivingKeys`.
        are_awaited: The reader has asked for keys that are still to arrive, and was not told yet. The reader sets this
            back when it is.
    """

    def __init__(
        self,
        index_sampler: Any,
        iterator: Iterator[Any],
        progress: Progress,
        pace: Pace,
        *,
        is_batched: bool = True,
        order: OrderDraw | None = None,
    ) -> None:
        self.keys: Any = NOTHING
        self.are_awaited: bool = False
        self._tell_reader: Callable[[], object] = _nobody
        self._index_sampler = index_sampler
        self._is_batched = is_batched
        self._takes_apart = _is_torchs(index_sampler, iterator)
        self._batches: Batches | None = None  # what the sampler is taken apart by
        self._feed = answers_of(iterator)
        self._is_quick = False  # nothing is to be noted when it is read
        self._is_new = False  # what is in `keys` is as the sampler gave it, and not counted
        self._draws_apart = False
        self._is_answer = False  # that is one of those which `Progress.asked` counts
        self._lists_keys = False  # the keys of a batch may be there to be read once
        self._is_noted = True  # the sampler's state is due after a batch, or places of samples are counted
        self._ended_by = ""  # the interrupt that has finished a generator of the sampler's, or of keys
        self._consumer: Callable[[], Any] = _nobody
        self._inner: Any = None if self._takes_apart else iterator  # what may have a state
        self._progress = progress
        self._done = frozenset(progress.now.ahead)
        self._sampler = stateful_sampler(index_sampler)
        iterated = index_sampler.sampler if self._takes_apart else index_sampler
        self._is_exact = self._sampler is iterated  # otherwise its state does not say where in the epoch it is
        self._is_elastic = self._is_exact and is_elastic(iterated)
        self.arrives: bool = probe(iterated, "keys_arrive") is True
        if self.arrives and hasattr(iterator, "follow"):
            progress.follow(iterator)
        self._order = order
        # While it is read, from global generators.
        self._may_draw = not (self.arrives or self._is_elastic or all(map(draws_once, samplers_within(index_sampler))))
        self._is_simple = self.arrives and order is None  # it draws nothing when it is read
        self._is_stateful: bool | None = None  # known when the iterator within is there
        self._sampler_run: Run | None = None  # of a sampler of ours, that of this plan
        self._pace = pace

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        keys = self.read()
        if keys is END:
            raise StopIteration
        self.keys = NOTHING
        return keys

    def read(self) -> Any:
        """Read the keys of the next batch, unless there are some that nobody has taken; return `keys`."""
        if not self._is_quick:
            self._read_noting()
        elif self.keys is NOTHING:
            try:
                for self.keys in self._feed:  # noqa: B020 - an attribute of ours
                    self._progress.read += 1
                    break
                else:
                    self.keys = END
            except BaseException as error:
                self._note_raised(error)
                raise
        return self.keys

    def _read_noting(self) -> None:
        """Read as `read` does, and note what is to be noted, also of keys that an interrupt has kept from that."""
        if self.keys is NOTHING:
            # The sampler may draw, or is to draw its order now. Such answers are counted.
            self._is_answer = not self._is_simple
            with self._drawing():
                self._ask()
                self._count()  # which may take the sampler's state
            self._is_simple = not self._may_draw
            self._is_quick = self._is_simple and not (self._is_noted or self._done or self._lists_keys)
        elif self._is_new:
            self._count()

    def _ask(self) -> None:
        """Ask the sampler for a batch of keys, or its end, which stays: some iterators would begin anew."""
        if self._ended_by:
            raise LoaderClosedError(
                f"{self._ended_by} was raised while the sampler was read, and has ended its iterator: nothing more "
                "comes of it. loader.load_state_dict(loader.state_dict()) goes on after the batches that were given."
            )
        self._is_new = True
        try:
            if self._inner is None:
                self._begin_inner()
            for self.keys in self._feed:  # noqa: B020 - an attribute of ours
                break
            else:
                self.keys = END
        except BaseException as error:
            self._note_raised(error)
            raise

    def _count(self) -> None:
        """Count the batch of keys that was read. May be done again."""
        if self._is_batched and isinstance(self.keys, Iterator):
            self._list_keys()
        keys, progress = self.keys, self._progress
        if self._is_noted and keys is not END:
            count = len(keys) if self._is_batched and hasattr(keys, "__len__") else 1
            self._note_state(is_short=self._batches is not None and count < self._batches.size)
            progress.note_read(count)
            self._is_noted = progress.knows_places or bool(self._is_stateful)
        # From here on nothing is called: neither can a signal's handler run, nor another thread.
        if keys is not END:
            if progress.read in self._done:
                self.keys = VOID
            progress.read += 1
        if self._is_answer:
            progress.asked += 1
        self._is_new = self._is_answer = False

    def _list_keys(self) -> None:
        """List keys that can be read once: they are read again by who counts them, or makes the batch again."""
        self._lists_keys = True
        keys, self.keys, self._ended_by = self.keys, NOTHING, "An exception"  # which would have left a part of them
        listed = [*keys]
        self.keys, self._ended_by = listed, ""

    @property
    def has_loaded_sampler(self) -> bool:
        """Whether a sampler of ours was put to a place, where its next iterator begins, whoever makes that."""
        return isinstance(self._sampler, ResumableSampler) and bool(self._progress.read)

    def draw_apart(self) -> None:
        """Have large permutations be drawn by who reads this, in another thread: see `DrawDue`."""
        self._draws_apart = True
        if type(self._inner) is RandomOrder:
            self._inner.draws_apart = True

    def end_with(self, consumer: object) -> None:
        """Have keys be read ahead for this object alone: see `ArrivingKeys`. Called before they are read."""
        self._consumer = weakref.ref(consumer)
        self._bind()

    def why_no_keys(self, *, in_vain: bool) -> str:
        """Return what the next keys wait for; "" if nobody can tell, or if that has to be in vain and is not."""
        tell = getattr(self._inner, "why_no_keys", None)
        return "" if tell is None else str(tell(in_vain=in_vain))

    def leave(self) -> None:
        """Have no more keys be read ahead. In any thread."""
        if hasattr(self._inner, "leave"):
            self._inner.leave()

    def _begin_inner(self) -> None:
        self._inner = inner = indices(self._index_sampler.sampler)
        if self._draws_apart:
            self.draw_apart()
        self._batches = Batches(inner, self._index_sampler, self._progress)
        self._feed = answers_of(self._batches)
        self._bind()

    def _bind(self) -> None:
        if (consumer := self._consumer()) is not None and self.arrives and hasattr(self._inner, "end_with"):
            self._inner.end_with(consumer)

    def tell(self, reader: Any) -> None:
        """Have `keys_came` of this be called when keys have come, in the thread that brings them."""
        self._tell_reader = while_alive(reader.keys_came, None)

    def must_wait(self) -> bool:
        """Whether the next keys are still to arrive. Then the reader is told of them: perhaps in here already.

        So that the reader waits is noted before the sampler is asked, and looked at again afterwards.
        """
        while self.arrives and not self.are_awaited:
            has_come = self.are_awaited = True
            try:
                has_come = not self._awaits()
            finally:
                if has_come:
                    self.are_awaited = False
            if has_come:
                return False
        return self.are_awaited

    def waits(self, timeout_s: float) -> Iterator[float]:
        """Yield, as long as keys are waited for, until when to wait; tell the log of a wait that may be in vain.

        Args:
            timeout_s: A longer wait is an error; 0 for no limit. Seconds.

        Raises:
            BatchTimeoutError: at the limit. The next call waits for the same keys.
        """
        began, silent_s = monotonic(), FIRST_S
        ends_at, tells_at = began + (timeout_s or math.inf), began + silent_s
        while self.must_wait():
            yield min(ends_at, tells_at)
            if (now := monotonic()) >= ends_at:
                raise timed_out(timeout_s, why=self.why_late())
            if now >= tells_at:
                if why := self.why_no_keys(in_vain=True):
                    silent_s *= 2
                    log.warning("The trainer has waited %.0f s for a batch that has not come: %s.", now - began, why)
                tells_at = now + silent_s

    def why_late(self) -> str:
        """Say that the keys have not arrived, and what they wait for, if that is known."""
        return ": ".join(filter(None, ("its keys have not arrived", self.why_no_keys(in_vain=False))))

    def _awaits(self) -> bool:
        """Whether the next keys are still to arrive: then the reader is told, once, in any thread, when they have."""
        if self.keys is not NOTHING or self._ended_by:
            return False
        try:
            if self._inner is None:
                self._begin_inner()
            arrived = getattr(self._inner, "arrived", None)  # None: it is at its end, and another stands in its place
            count = 1 if self._batches is None else self._batches.num_missing
            return arrived is not None and not arrived(count, self._tell_reader)
        except Exception:  # there is nothing more, as after what `next` raises
            self._end()
            raise

    def _end(self) -> None:
        """Have nothing more come: the iterator is not asked again, as some begin anew."""
        self._inner = self._feed = iter(())

    def _drawing(self) -> AbstractContextManager[None]:
        """Return what the sampler is read inside of."""
        order = self._order
        if order is None:
            return nullcontext()
        if order.is_due:
            return order.first()
        answers = self._progress.asked - self._progress.began[0]
        return order.watched() if self._has_no_state and order.is_watched(answers) else nullcontext()

    @property
    def _has_no_state(self) -> bool:
        """Whether no state says what the sampler draws next."""
        return self._may_draw and self._sampler is None and not is_stateful(self._inner)

    def _note_raised(self, error: BaseException) -> None:
        """Note what the sampler has raised: torch's has nothing more after an exception.

        An interrupt that has gone through a generator has finished it, and the generator's next answer would be the end
        of the epoch. Any other iterator is asked again.
        """
        if isinstance(error, Exception):
            if self._takes_apart:
                self._end()
            return
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
            trace = trace.tb_next
        if trace is not None:
            self._ended_by, self._is_quick = type(error).__name__, False

    def _note_state(self, *, is_short: bool) -> None:
        """Take the sampler's state after a batch, if there is one, and it is due."""
        if self._is_stateful is None:
            self._is_stateful = self._is_exact or is_stateful(self._inner)
        if not self._is_stateful:
            return
        if self._is_elastic:
            self._take_state()
        elif not is_short and self._pace.is_due():
            self._pace.begin()
            self._take_state()
            self._pace.end()

    def resume(self, states: dict[str, Any] | None, batches: int) -> None:
        """Begin in the middle, before anything was read.

        Args:
            states: The states of the sampler, which has loaded its own, and of its iterator.
            batches: How many to leave out from there.
        """
        with self._order.first() if self._order else nullcontext():
            if self._takes_apart:
                self._begin_inner()
                batches *= self._index_sampler.batch_size
            if states is not None and states["iterator"] is not None and is_stateful(self._inner):
                self._inner.load_state_dict(states["iterator"])
            skipped = skip(self._inner, min(batches, 1))  # its order is drawn by then, in most cases
            with self._order.watched() if self._order and self._has_no_state else nullcontext():
                skipped += skip(self._inner, batches - skipped)
        if skipped < batches:
            self._end()

    def _take_state(self) -> None:
        sampler = self._sampler if self._is_exact else None
        self._sampler_run = self._sampler_run or newest_run(sampler)
        inner = self._inner if self._inner is not self._sampler and is_stateful(self._inner) else None
        try:
            state = {
                "sampler": None if sampler is None else bare_state(sampler, self._sampler_run),
                "iterator": None if inner is None else inner.state_dict(),
            }
            self._progress.sampler_states.append((self._progress.read + 1, Frozen(state)))
        except Exception:
            log.warning(
                "The state of the sampler could not be taken: to resume from here, what it has yielded since the last "
                "one is drawn again.",
                exc_info=True,
            )
            self._is_stateful = False


def _nobody() -> None:
    """Stand for a consumer that is not known."""


def _is_torchs(index_sampler: Any, iterator: Any) -> bool:
    """Whether it is torch's BatchSampler, with the iterator that this makes."""
    is_its_own = type(index_sampler) is BatchSampler and isinstance(iterator, GeneratorType)
    return is_its_own and iterator.gi_code is _torch_iter.__code__


def stateful_sampler(index_sampler: Any) -> Any:
    """Return the outermost sampler that provides a state, which covers those within; None if none does."""
    return next(filter(is_stateful, samplers_within(index_sampler)), None)


def keys_arrive(index_sampler: Any) -> bool:
    """Whether the keys that a loader reads become known as time goes by: see `ArrivingKeys`."""
    read = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    return probe(read, "keys_arrive") is True


def is_elastic(sampler: Any) -> bool:
    """Whether a sampler's states are small, and say for any number of ranks what comes next: it has `state_after`."""
    return callable(probe(sampler, "state_after"))


def keeps_place(index_sampler: Any) -> bool:
    """Whether a sampler has one state for all of its iterators, which does not say where the next one begins."""
    return may_be_looked_at(index_sampler) and probe(stateful_sampler(index_sampler), "keys_arrive") is not True


def may_be_looked_at(index_sampler: Any) -> bool:
    """Whether the user may take a sampler's state beside the loader, and count on how far it is ahead of batches.

    So some libraries save it: ``loader.sampler.state_dict()``, less torch's window. Not where the sampler says, as
    `ElasticSampler` does, what its state was after any number of samples.
    """
    sampler = stateful_sampler(index_sampler)
    return sampler is not None and not is_elastic(sampler)


def load_samplers(index_sampler: Any, states: dict[str, Any] | None, epochs: Sequence[int | None]) -> None:
    """Load the state of a sampler, before it is iterated over; set epochs as they had been set."""
    tell(samplers_within(index_sampler), epochs)
    sampler = stateful_sampler(index_sampler)
    if sampler is not None and states is not None and states["sampler"] is not None:
        sampler.load_state_dict(states["sampler"])


def load_early(options: Options, state: LoaderState) -> None:
    """Show the samplers a state when the loader is given it; they load it when the run begins.

    Keys of a sampler that has `preload` may come before it is iterated over. Samplers that have `set_epoch` load a
    state of the time between two runs now as well, so that an epoch that is set from then on differs from what they
    have been told. Generators stay where they are.
    """
    states = unplain(state.samplers)
    if states is None:
        return
    if callable(preload := probe(stateful_sampler(options.index_sampler), "preload")):
        preload(states["sampler"])
    if state.is_between_runs and any(map(hears, samplers_within(options.index_sampler))):
        rng = order_generators(options)
        before = rng.capture()
        load_samplers(options.index_sampler, states, ())
        with restores_forgotten():  # a loader that was given its state before has not to draw after this
            rng.restore(before)


def own_state(index_sampler: Any) -> Frozen | None:
    """Return the state of a sampler that is not being iterated over; None if it has none."""
    sampler = stateful_sampler(index_sampler)
    if sampler is None:
        return None
    try:
        return Frozen({"sampler": bare_state(sampler), "iterator": None})
    except Exception:
        log.warning("The state of the sampler could not be taken: it is not in states of the loader.", exc_info=True)
        return None


def since_preload(index_sampler: Any, states: Any) -> Any:
    """Return states that were written down and preloaded, with keys that have arrived since then."""
    sampler = stateful_sampler(index_sampler)
    has_more = probe(sampler, "keys_arrive") is True and callable(probe(sampler, "preload"))
    return written(index_sampler, own_state(index_sampler)) if has_more and states is not None else states


def written(index_sampler: Any, states: Frozen | None) -> Any:
    """Write states of a sampler and its iterator down, with what was changed in the sampler since they were taken."""
    if states is None:
        return None
    sampler = stateful_sampler(index_sampler)
    if not is_elastic(sampler) or (thawed := states.thaw())["sampler"] is None:
        return states.plain()
    return plain({**thawed, "sampler": whole_state(sampler, thawed["sampler"])})
