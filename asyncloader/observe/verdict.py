"""Say what limits a run and what would help, from its statistics. Arithmetic, no clock.

The model. A batch takes the trainer `train` seconds, a worker `work` seconds, and all cores together `cpu` seconds of
work, so with k workers on c cores a batch comes every

    max(train, work / k, cpu / c)   seconds at best.

Where the workers are busy and the trainer waits, the middle term is the largest: more workers help until another term
is; or, where workers mostly wait themselves, more samples at once in each. Where workers stand idle and the trainer
waits all the same, batches are held up behind a slow one, or on their way. Where the trainer waits while the sampler is
read, or until samples arrive, nothing behind that limits. Where most of the time went by before the first batch nothing
of this was measured well, and starting is all there is to be said of.

No advice goes beyond four times the workers, or 16 times the samples at once, that were measured: with more, something
that was not seen yet will limit. What more samples at once bring is not said: where a few samples are slow, it is far
less than the mean of all promises. Nor is a number of workers for streams, which decide themselves who reads what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from asyncloader.observe.figures import Figures

Limit: TypeAlias = Literal[
    "unknown",
    "starting",
    "training",
    "sampler",
    "source",
    "fetch",
    "collate",
    "transfer",
    "pin",
    "order",
    "overhead",
]

_HARDLY = 0.05  # a trainer that waits a smaller share of its time than this does not wait
_BUSY = 0.8  # workers busy for more than this share of their time are what limits
_TRAINS = 0.8  # a trainer that is busy for more than this share of a batch's time is what limits
_LATE = 0.2  # a first batch that takes a larger share of the time than this is worth a word
_STARTS = 0.5  # starting that takes a larger share of the time than this is what limits
_CROWDED = 0.2  # a worker that wants a core and has none for more than this share of its work has company there
_FULL = 0.85  # cores in use for more than this share of their time are full
_TIMES_WORKERS = 4  # as many as were measured, advice goes no further
_TIMES_CONCURRENCY = 16
_MOST_WORKERS = 64
_MOST_CONCURRENCY = 4096
_LEAST_BATCH_S = 50e-6  # what handing over a batch takes at the least
_SMALL_BATCH_S = 300e-6
_MAX_BUFFERED_BYTES = 64 << 20
_ON_THREADS = " (samples on threads, if the dataset bears that)"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limit of a run, in words and in numbers.

    Attributes:
        limit: "training" (nothing to gain here), "sampler", "source" (a stream, or a feed: samples come no faster),
            "fetch", "collate", "transfer", "pin" (that stage of the batches),
            "order" (workers stood idle behind a slow batch), "overhead" (batches too small), "starting" (most of the
            time went by before the first batch), or "unknown" (too few batches to tell).
        text: The sentence.
        advice: Options of the loader to change, and to what.
        gain: How many times as fast the whole would become by the advice, roughly; 1.0 if there is nothing to gain,
            or if that is not known before it is tried.
    """

    limit: Limit
    text: str
    advice: dict[str, Any] = field(default_factory=dict)
    gain: float = 1.0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Costs:
    """A batch in seconds: what it took, and what it takes each part."""

    batch: float
    train: float
    work: float
    worker_cpu: float  # that it used, or was ready to use while others had the cores
    stalled: float  # the latter
    main_cpu: float
    cores: int
    workers: int
    batches: int
    is_stream: bool

    @property
    def cpu_floor(self) -> float:
        return (self.worker_cpu + self.main_cpu) / self.cores

    def at_best(self, workers: int, *, saved: float = 0.0, saved_here: float = 0.0) -> float:
        """Return the seconds a batch with so many workers, if so much less work was to be done there and here."""
        work = max(0.0, self.work - saved)
        cpu = max(0.0, self.cpu_floor - (saved + saved_here) / self.cores)
        return max(self.train - saved_here, work / workers, cpu, _LEAST_BATCH_S)

    def enough_workers(self) -> int:
        """Return with how many workers something else limits."""
        other = max(self.train, self.cpu_floor, _LEAST_BATCH_S)
        return max(1, min(self.most_workers, math.ceil(self.work / other - 0.05)))

    @property
    def most_workers(self) -> int:
        """Beyond so many workers advice would be a guess: by what was measured, cores, and batches of an epoch."""
        if self.is_crowded or self.is_stream:
            return max(1, self.workers)
        measured = min(max(2, self.workers) * _TIMES_WORKERS, _MOST_WORKERS)
        return max(self.workers, min(self.cores if self.computes else measured, self.batches))

    def gain_of(self, workers: int) -> float:
        """Return how many times as fast so many workers would make it: at most as many times as there are more.

        The first batch of an epoch takes as long as before, which counts where the epoch has few batches.
        """
        later, step_s = self.batches - 1, max(self.train, _LEAST_BATCH_S)
        epoch_s = max(self.work + later * step_s, self.batches * max(self.work / workers, self.cpu_floor))
        gain = (self.work + later * self.batch) / epoch_s
        return min(gain, workers / self.workers) if self.workers else gain

    @property
    def computes(self) -> bool:
        """Whether work is computing, not waiting: then workers beyond the cores have nothing to run on."""
        return self.worker_cpu + (0.0 if self.workers else self.main_cpu) > 0.5 * self.work

    @property
    def is_crowded(self) -> bool:
        """Whether others use the cores as well: nobody knows how much of them further workers would get."""
        return self.computes and self.stalled > _CROWDED * self.work and self.workers < self.cores


def judge(stats: Figures) -> Verdict:
    """Say what limited this run and what would help."""
    count = stats.batches - 1
    if count < max(4, 2 * stats.num_workers) or not stats.stages.work.count:
        return Verdict("unknown", f"{stats.batches} batches are too few to judge by")
    costs = _costs(stats, count)
    start_s = max(0.0, stats.first_batch_s - costs.work) if stats.num_workers else 0.0
    if start_s > _STARTS * stats.elapsed_s:
        return _starting(stats, costs, start_s)
    verdict = _judge(stats, costs)
    if "num_workers" in verdict.advice and stats.options.get("auto"):
        advice = {name: value for name, value in verdict.advice.items() if name != "num_workers"}
        text = verdict.text + ' (num_workers="auto" looks after that)'
        verdict = replace(verdict, text=text, advice=advice)
    if start_s > _LATE * stats.elapsed_s and not stats.options.get("persistent_workers"):
        late = f"{stats.first_batch_s / stats.elapsed_s:.0%} of the time passed before the first batch"
        verdict = replace(verdict, text=f"{verdict.text}; {late}: persistent_workers=True spares later epochs that")
    return verdict


def _costs(stats: Figures, count: int) -> _Costs:
    """Return the costs of each of so many batches after the first."""
    work, workers = stats.stages.work, stats.workers
    batch_s = (stats.waiting.consumer.total_s + stats.training_s) / count
    in_process = bool(stats.options.get("in_process"))
    return _Costs(
        batch=batch_s,
        train=stats.training_s / count,
        # Where a worker fetches several batches at once each of them takes longer than it occupies the worker.
        work=min(max(0.0, work.total_s - workers.opening_s) / work.count, batch_s * (stats.num_workers or math.inf)),
        worker_cpu=(workers.cpu_s + workers.stalled_s) / work.count,
        stalled=workers.stalled_s / work.count,
        main_cpu=max(0.0, stats.main_cpu_s - workers.cpu_s * in_process) / count,
        cores=max(2, stats.num_workers) * _TIMES_WORKERS if stats.options.get("has_provider") else stats.cores,
        workers=stats.num_workers,
        batches=stats.batches,
        is_stream=bool(stats.options.get("is_iterable")),
    )


def _starting(stats: Figures, costs: _Costs, start_s: float) -> Verdict:
    """Starting workers, and opening the dataset there, takes longer than the epoch itself."""
    text = (
        f"{start_s / stats.elapsed_s:.0%} of the time passed before the first batch, while workers started and opened "
        "the dataset"
    )
    if stats.options.get("persistent_workers"):
        return Verdict("starting", f"{text}; later epochs have them already")
    # Batches that were made while others started came at once: a later epoch takes as long as they all take to make.
    later_s = max(stats.elapsed_s - start_s, stats.training_s, costs.work * stats.batches / stats.num_workers)
    text += ": persistent_workers=True spares later epochs that"
    return Verdict("starting", text, {"persistent_workers": True}, stats.elapsed_s / later_s)


def _judge(stats: Figures, costs: _Costs) -> Verdict:
    if stats.waited_share < _HARDLY:
        return _training(stats, costs)
    told = f"training waited {stats.waited_share:.0%} of its time"
    sampler, waited = stats.waiting.sampler, stats.waiting.consumer
    if sampler.mean_s > _SMALL_BATCH_S and sampler.total_s > 0.5 * waited.total_s:
        return _sampler(stats, f"{told}, {sampler.total_s / waited.total_s:.0%} of that")
    if not stats.num_workers:
        return _inline(stats, costs, told)
    busy_share = stats.workers.busy_share
    told += f"; workers were busy {busy_share:.0%} of theirs"
    if stats.stages.pin.mean_s > _FULL * costs.batch:
        return _pin(stats, costs, told)
    packing = stats.stages.encode.mean_s + stats.stages.decode.mean_s
    if packing > max(_SMALL_BATCH_S, stats.stages.fetch.mean_s + stats.stages.collate.mean_s):
        return _transfer(stats, costs, told)
    if busy_share > _BUSY:
        return _workers(stats, costs, told)
    if costs.work < _SMALL_BATCH_S and costs.batch < _SMALL_BATCH_S:
        text = f"{told}; passing on such small batches takes longer than making them: a larger batch_size would help"
        return Verdict("overhead", text)
    return _order(stats, costs, told)


def _sampler(stats: Figures, told: str) -> Verdict:
    """The keys of batches are what is waited for; workers have nothing to do meanwhile."""
    if stats.options.get("keys_arrive"):
        return Verdict("source", f"{told} until samples arrived: the place that they come from is what limits")
    return Verdict("sampler", f"{told} while this thread read the sampler: a cheaper sampler would help")


def _training(stats: Figures, costs: _Costs) -> Verdict:
    told = "training never waited" if stats.waited_share < 0.01 else f"training waited {stats.waited_share:.0%}"
    needed = costs.workers and max(1, math.ceil(costs.work / costs.batch * 1.1))
    if needed < costs.workers:
        idle = costs.workers - needed
        verb = "is" if idle == 1 else "are"
        text = f"{told}: {idle} of {costs.workers} workers {verb} idle"
        return Verdict("training", text, {"num_workers": needed})
    return Verdict("training", f"{told}: the loader keeps up, faster training steps are what would help")


def _inline(stats: Figures, costs: _Costs, told: str) -> Verdict:
    enough = costs.enough_workers()
    gain = costs.gain_of(enough)
    stage, share = _stage(stats)
    told += f", and makes its batches itself ({stage} is {share:.0%} of that)"
    if enough > 1 and _can_overlap(stats, costs):
        concurrency = _at_once(stats, costs, max(costs.train, costs.cpu_floor))
        text = f"{told}, mostly waiting; num_workers=1 with concurrency={concurrency}{_ON_THREADS} would help"
        return Verdict(stage, text, {"num_workers": 1, "concurrency": concurrency})
    if costs.work < _SMALL_BATCH_S:
        return Verdict(stage, f"{told}; workers would not help: to hand over such small batches takes as long")
    if gain < 1.1:
        why = "" if costs.is_stream else f": {_cores_full(costs)}"
        return Verdict(stage, f"{told}; workers would not help{why}")
    return Verdict(stage, f"{told}; num_workers={enough} would make it {_times(gain)}", {"num_workers": enough}, gain)


def _stage(stats: Figures) -> tuple[Limit, float]:
    """Return which stage of the work takes longest, and its share of the work."""
    fetch_s, collate_s = stats.stages.fetch.total_s, stats.stages.collate.total_s
    share = max(fetch_s, collate_s) / max(stats.stages.work.total_s, 1e-9)
    if collate_s > fetch_s:
        return "collate", share
    return ("source" if stats.options.get("is_iterable") else "fetch"), share


def _workers(stats: Figures, costs: _Costs, told: str) -> Verdict:
    """The workers limit: more of them, or less work."""
    stage, share = _stage(stats)
    told += f", {stage} is {share:.0%} of that"
    enough = costs.enough_workers()
    gain = costs.gain_of(enough)
    if enough > costs.workers and gain >= 1.1:
        if _can_overlap(stats, costs):
            return _concurrency(stats, costs, told)
        text = f"{told}: num_workers={enough} would make it {_times(gain)}"
        return Verdict(stage, text, {"num_workers": enough}, gain)
    if costs.computes and (costs.workers >= costs.cores or costs.is_crowded or costs.cpu_floor > _FULL * costs.batch):
        return Verdict(stage, f"{told}: {_cores_full(costs)}, so more workers would not help, a cheaper {stage} would")
    return Verdict(stage, f"{told}: the workers just keep up; a cheaper {stage} would help")


def _concurrency(stats: Figures, costs: _Costs, told: str) -> Verdict:
    """The workers await as many samples as they may, and have time left: more samples at once."""
    least_s = max(costs.worker_cpu, stats.stages.collate.mean_s) / costs.workers  # which is not overlapped
    concurrency = _at_once(stats, costs, max(costs.train, costs.cpu_floor, least_s))
    now = stats.options.get("concurrency", 1)
    if concurrency < 1.1 * now:
        return Verdict("fetch", f"{told}: more workers would help, a higher concurrency hardly")
    threads = _ON_THREADS * (now == 1)
    text = f"{told}: they mostly wait, concurrency={concurrency}{threads} would help"
    return Verdict("fetch", text, {"concurrency": concurrency})


def _can_overlap(stats: Figures, costs: _Costs) -> bool:
    """Whether more samples at once would help: they are asked for one by one, and mostly waited for."""
    return _stage(stats)[0] == "fetch" and not costs.computes


def _at_once(stats: Figures, costs: _Costs, other_s: float) -> int:
    """Return how many samples at once are enough until something else takes a batch's time."""
    now: int = stats.options.get("concurrency", 1)
    per_place = costs.work / max(1, costs.workers)
    return min(_TIMES_CONCURRENCY * now, _MOST_CONCURRENCY, math.ceil(now * per_place / max(other_s, _LEAST_BATCH_S)))


def _transfer(stats: Figures, costs: _Costs, told: str) -> Verdict:
    """Batches are pickled there and read here: Python objects, or tensors that could not go through shared memory."""
    encode, decode = stats.stages.encode.mean_s, stats.stages.decode.mean_s
    gain = costs.batch / costs.at_best(costs.workers, saved=encode, saved_here=min(decode, costs.train))
    text = (
        f"{told}, but {encode + decode:.2g} s a batch go into packing and unpacking it ({stats.bytes / 1e6:.0f} MB in "
        f"all): tensors or arrays in place of Python objects would travel through shared memory and make it "
        f"{_times(gain)}"
    )
    return Verdict("transfer", text, {}, gain)


def _pin(stats: Figures, costs: _Costs, told: str) -> Verdict:
    gain = costs.batch / costs.at_best(costs.workers)
    text = (
        f"{told}, but the pin thread was busy {min(1.0, stats.stages.pin.mean_s / costs.batch):.0%}: without "
        f"pin_memory, or with smaller batches (bytes in place of floats, say), it could be {_times(gain)}"
    )
    return Verdict("pin", text, {"pin_memory": False}, gain)


def _order(stats: Figures, costs: _Costs, told: str) -> Verdict:
    """Workers stood idle although the trainer waited."""
    options = stats.options
    gain = costs.batch / costs.at_best(costs.workers)
    if gain < 1.1:  # a hiccup or two, no more
        return _training(stats, costs) if costs.train > _TRAINS * costs.batch else _workers(stats, costs, told)
    slow = stats.stages.work.longest_s / costs.work
    told += f": they stood idle behind slow batches (the slowest took {slow:.0f} times the mean)"
    if costs.is_stream:
        return Verdict("order", f"{told}; shards of equal cost would help", {}, gain)
    batch_bytes = stats.bytes / stats.stages.work.count + 4096
    ahead = int(2 * batch_bytes * slow * costs.workers)
    advice: dict[str, Any] = {}
    if ahead > options.get("max_buffered_bytes", 0):
        advice["max_buffered_bytes"] = max(_MAX_BUFFERED_BYTES, ahead)
    if options.get("scheduling") == "static":
        advice["scheduling"] = "dynamic"
    if not advice:
        return Verdict("order", f"{told}; a few slow samples decide, make those cheaper", {}, gain)
    said = " and ".join(f"{name}={value!r}" for name, value in advice.items())
    return Verdict("order", f"{told}; {said} could make it {_times(gain)}", advice, gain)


def _cores_full(costs: _Costs) -> str:
    full = "the core is full" if costs.cores == 1 else f"all {costs.cores} cores are full"
    here = costs.main_cpu / costs.batch
    if here > 0.5 and costs.main_cpu > costs.worker_cpu / 2:
        return f"{full} ({here:.1f} of them by this process itself)"
    others = costs.stalled > _CROWDED * costs.work and costs.workers <= costs.cores
    return full + " (others use them as well)" * others


def _times(gain: float) -> str:
    return f"{gain:.1f} times as fast"
