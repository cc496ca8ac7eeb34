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
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from asyncloader.observe.figures import Stages
from asyncloader.options import Options

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
_STARTS = 0.5  # starting that takes a larger share of the time than this is what limits
_CROWDED = 0.2  # a worker that wants a core and has none for more than this share of its work has company there
_FULL = 0.85  # cores in use for more than this share of their time are full
_GAINS = 1.1  # what makes it no more than so many times as fast is not worth advice
_TIMES_WORKERS = 4  # as many as were measured, advice goes no further
_TIMES_CONCURRENCY = 16
_MOST_WORKERS = 64
_MOST_CONCURRENCY = 4096
_LEAST_BATCH_S = 50e-6  # what handing over a batch takes at the least
_SMALL_BATCH_S = 300e-6
_MAX_BUFFERED_BYTES = 64 << 20


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
class Costs:
    """What a run has taken: in seconds, and a batch unless it is said otherwise.

    Attributes:
        batch: From one batch to the next.
        train: The part of it in which the consumer did not wait.
        keys: The part in which keys were waited for.
        work: What a batch takes a worker.
        worker_cpu: What it used of a core, or was ready to use while others had the cores.
        stalled: The latter.
        main_cpu: What this process used.
        start: Before the first batch, all told.
        elapsed: All told.
        nbytes: The size of a batch.
        busy_share: Share of their time in which workers worked.
        stages: What each stage took.
        options: What `facts_of` tells of the loader.
    """

    batches: int
    workers: int
    cores: int
    batch: float
    train: float
    keys: float
    work: float
    worker_cpu: float
    stalled: float
    main_cpu: float
    start: float
    elapsed: float
    nbytes: float
    busy_share: float
    stages: Stages
    options: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        """Whether the dataset decides which worker reads what."""
        return bool(self.options.get("is_iterable"))

    @property
    def wait(self) -> float:
        """What the consumer waits for a batch."""
        return self.batch - self.train

    @property
    def cpu_floor(self) -> float:
        """What a batch takes all cores together."""
        return (self.worker_cpu + self.main_cpu) / self.cores

    @property
    def computes(self) -> bool:
        """Whether work is computing, not waiting: then workers beyond the cores have nothing to run on."""
        return self.worker_cpu + (0.0 if self.workers else self.main_cpu) > 0.5 * self.work

    @property
    def is_crowded(self) -> bool:
        """Whether others use the cores as well: nobody knows how much of them further workers would get."""
        return self.computes and self.stalled > _CROWDED * self.work

    @property
    def enough_workers(self) -> int:
        """With so many workers something else limits.

        Beyond some number advice would be a guess: by what was measured, cores, and batches of an epoch.
        """
        if self.is_stream or (self.is_crowded and self.workers < self.cores):
            return max(1, self.workers)
        measured = min(max(2, self.workers) * _TIMES_WORKERS, _MOST_WORKERS)
        most = max(self.workers, min(self.cores if self.computes else measured, self.batches))
        other = max(self.train, self.cpu_floor, _LEAST_BATCH_S)
        return max(1, min(most, math.ceil(self.work / other - 0.05)))

    def gain_of(self, workers: int) -> float:
        """Return how many times as fast so many workers would make it, if none has to wait.

        The first batch of an epoch takes as long as before, which counts where the epoch has few batches.
        """
        later, step = self.batches - 1, max(self.train, _LEAST_BATCH_S)
        epoch = max(self.work + later * step, self.batches * max(self.work / workers, self.cpu_floor))
        return (self.work + later * self.batch) / epoch


def facts_of(options: Options, *, keys_arrive: bool) -> dict[str, Any]:
    """Return what of a loader's options the verdict builds on.

    Args:
        options: The options.
        keys_arrive: Keys of samples become known as time goes by: they come from a stream, or a feed.
    """
    return {
        "is_iterable": options.is_iterable,
        "keys_arrive": keys_arrive,
        "scheduling": options.scheduling,
        "max_buffered_bytes": options.max_buffered_bytes,
        "persistent_workers": options.persistent_workers,
        "concurrency": options.samples_at_once,
        "in_process": options.is_in_process,
        "has_provider": options.provider is not None,
        "auto": options.is_auto,
    }


def judge(costs: Costs) -> Verdict:
    """Say what limited a run and what would help."""
    if costs.batches <= max(4, 2 * costs.workers) or not costs.stages.work.count:
        return Verdict("unknown", f"{costs.batches} batches are too few to judge by")
    verdict = _starting(costs) if costs.start > _STARTS * costs.elapsed else _judge(costs)
    if "num_workers" in verdict.advice and costs.options.get("auto"):
        return Verdict(verdict.limit, f'{verdict.text} (num_workers="auto" looks after that)')
    return verdict


def _starting(costs: Costs) -> Verdict:
    """Starting workers, and opening the dataset there, takes longer than the epoch itself."""
    text = (
        f"{costs.start / costs.elapsed:.0%} of the time passed before the first batch, while workers started and "
        "opened the dataset"
    )
    if costs.options.get("persistent_workers"):
        return Verdict("starting", f"{text}; later epochs have them already")
    # Batches that were made while others started came at once: a later epoch takes as long as they all take to make.
    work = costs.work * costs.batches / costs.workers
    later = max(costs.elapsed - costs.start, costs.train * (costs.batches - 1), work)
    text += ": persistent_workers=True spares later epochs that"
    return Verdict("starting", text, {"persistent_workers": True}, costs.elapsed / later)


def _judge(costs: Costs) -> Verdict:
    waited = costs.wait / costs.batch
    if waited < _HARDLY:
        return _training(costs)
    told = f"training waited {waited:.0%} of its time"
    if costs.keys > max(_SMALL_BATCH_S, 0.5 * costs.wait):
        if costs.options.get("keys_arrive"):
            return Verdict("source", f"{told}, for samples to arrive: the place that they come from is what limits")
        return Verdict("sampler", f"{told}, while this thread read the sampler: a cheaper sampler would help")
    if not costs.workers:
        return _work(costs, f"{told}, and makes its batches itself")
    stages, told = costs.stages, f"{told}; workers were busy {costs.busy_share:.0%} of theirs"
    if stages.pin.mean_s > _FULL * costs.batch:
        text = (
            f"{told}, but the pin thread all the time: smaller batches (bytes in place of floats, say), or no pinning"
        )
        return Verdict("pin", text, {"pin_memory": False}, costs.gain_of(costs.workers))
    packing = stages.encode.mean_s + stages.decode.mean_s
    if packing > max(_SMALL_BATCH_S, stages.fetch.mean_s + stages.collate.mean_s):
        text = f"{told}, but {packing:.2g} s a batch go into packing and unpacking it: tensors or arrays in place of "
        return Verdict("transfer", f"{text}Python objects would travel through shared memory")
    if costs.busy_share > _BUSY:
        return _work(costs, told)
    if max(costs.work, costs.batch) < _SMALL_BATCH_S:
        text = f"{told}; passing on such small batches takes longer than making them: a larger batch_size would help"
        return Verdict("overhead", text)
    return _order(costs, told)


def _training(costs: Costs) -> Verdict:
    told = f"training waited {costs.wait / costs.batch:.0%} of its time"
    needed = costs.workers and max(1, math.ceil(costs.work / costs.batch * 1.1))
    if needed < costs.workers:
        text = f"{told}: {costs.workers - needed} of {costs.workers} workers are idle"
        return Verdict("training", text, {"num_workers": needed})
    return Verdict("training", f"{told}: the loader keeps up, faster training steps are what would help")


def _work(costs: Costs, told: str) -> Verdict:
    """Making batches is what limits: more workers, more samples at once, or less work."""
    stages, workers, enough = costs.stages, costs.workers, costs.enough_workers
    stage: Limit = "source" if costs.is_stream else "fetch"
    stage_s = stages.fetch.total_s
    if stages.collate.total_s > stage_s:
        stage, stage_s = "collate", stages.collate.total_s
    told += f", {stage} is {stage_s / max(stages.work.total_s, 1e-9):.0%} of that"
    if not workers and costs.work < _SMALL_BATCH_S:
        return Verdict(stage, f"{told}: workers would not help, as to hand over such small batches takes as long")
    gain = costs.gain_of(enough)
    if enough > workers and gain >= _GAINS:
        if enough > 1 and stage == "fetch" and not costs.computes:
            return _overlap(costs, told)
        gain = min(gain, enough / workers) if workers else gain  # where workers are added, at most so many times
        text = f"{told}: num_workers={enough} would make it {gain:.1f} times as fast"
        return Verdict(stage, text, {"num_workers": enough}, gain)
    if costs.computes and (workers >= costs.cores or costs.is_crowded or costs.cpu_floor > _FULL * costs.batch):
        return Verdict(stage, f"{told}: {_cores_full(costs)}, so more workers would not help, a cheaper {stage} would")
    return Verdict(stage, f"{told}: a cheaper {stage} is what would help")


def _overlap(costs: Costs, told: str) -> Verdict:
    """Samples are asked for one by one, or a few at once, and mostly waited for: more samples at once."""
    workers, now = costs.workers, costs.options.get("concurrency", 1)
    alone = max(costs.worker_cpu, costs.stages.collate.mean_s) / max(1, workers)  # which is not overlapped
    enough = math.ceil(now * costs.work / max(1, workers) / max(costs.train, costs.cpu_floor, alone, _LEAST_BATCH_S))
    at_once = min(_TIMES_CONCURRENCY * now, _MOST_CONCURRENCY, enough)
    if at_once < _GAINS * now:
        return Verdict("fetch", f"{told}: more workers would help, a higher concurrency hardly")
    threads = " (samples on threads, if the dataset bears that)" * (now == 1)
    one = "" if workers else "num_workers=1 with "
    text = f"{told}: they mostly wait, {one}concurrency={at_once}{threads} would help"
    return Verdict("fetch", text, {"concurrency": at_once} if workers else {"num_workers": 1, "concurrency": at_once})


def _order(costs: Costs, told: str) -> Verdict:
    """Workers stood idle although the trainer waited."""
    gain = costs.gain_of(costs.workers)
    if gain < _GAINS:  # a hiccup or two, no more
        return _training(costs) if costs.train > _TRAINS * costs.batch else _work(costs, told)
    slow = costs.stages.work.longest_s / costs.work
    told += f": they stood idle behind slow batches (the slowest took {slow:.0f} times the mean)"
    if costs.is_stream:
        return Verdict("order", f"{told}; shards of equal cost would help", {}, gain)
    ahead = int(2 * (costs.nbytes + 4096) * slow * costs.workers)
    advice: dict[str, Any] = {}
    if ahead > costs.options.get("max_buffered_bytes", 0):
        advice["max_buffered_bytes"] = max(_MAX_BUFFERED_BYTES, ahead)
    if costs.options.get("scheduling") == "static":
        advice["scheduling"] = "dynamic"
    if not advice:
        return Verdict("order", f"{told}; a few slow samples decide, make those cheaper", {}, gain)
    said = " and ".join(f"{name}={value!r}" for name, value in advice.items())
    return Verdict("order", f"{told}; {said} could make it {gain:.1f} times as fast", advice, gain)


def _cores_full(costs: Costs) -> str:
    full = "the core is full" if costs.cores == 1 else f"all {costs.cores} cores are full"
    here = costs.main_cpu / costs.batch
    if here > 0.5 and costs.main_cpu > costs.worker_cpu / 2:
        return f"{full} ({here:.1f} of them by this process itself)"
    return full + " (others use them as well)" * (costs.is_crowded and costs.workers <= costs.cores)
