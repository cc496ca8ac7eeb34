"""chains: shards that are mixed, shuffled and packed (`asyncloader.streams`).

Documents whose lengths are log-normal (median 400, sigma 1.2, at most 8,192) into blocks of 8,192 tokens, by a window
of 1,000: how many a second in one process, and how full blocks are; the same under two budgets, of tokens and images.
Where Grain is installed, its packer beside that, with 64 open blocks and with 1,000.
JSON lines with two workers, beside the same documents by number. The states of two chains over 1,000 shards.

Targets: 60,000 documents a second, 0.985 full, 0.95 of the tighter budget; 0.9 of the rate by number; 1 ms and 64 KiB.
"""

from __future__ import annotations

import importlib.util
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.streams import Mix, Pack, ShardedStream, Shuffle, Stream
from asyncloader.streams.reading import json_lines
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds

TOKENS, IMAGES = 8192, 16


def documents(count: int) -> list[dict[str, int]]:
    """Return how many tokens and images documents have: longer ones more of both."""
    draw = random.Random(0)
    lengths = [min(TOKENS, int(draw.lognormvariate(6, 1.2)) + 1) for _ in range(count)]
    return [{"tokens": n, "images": min(IMAGES, int(draw.expovariate(0.5) + n / 2000))} for n in lengths]


def from_number(shard: Sequence[Any], start: int) -> Sequence[Any]:
    """Read a shard that lies in memory."""
    return shard[start:]


def sharded(samples: Sequence[Any]) -> Stream[Any]:
    """Return a stream over ten shards in memory."""
    return ShardedStream([samples[first::10] for first in range(10)], from_number)


def itself(sample: Any) -> Any:
    """Return what was given."""
    return sample


class ByNumber(Dataset[Any]):
    """JSON lines by number: where each begins is known."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._lines = [line for path in paths for line in path.read_bytes().splitlines()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Any:
        return json.loads(self._lines[index])


def epoch(loader: Any) -> Run:
    """Run through an epoch; from its first batch on, documents a second."""
    cpu, iterator = cpu_seconds(), iter(loader)
    next(iterator)
    began, count = time.perf_counter(), 0
    for batch in iterator:
        count += len(batch)
    return Run(count / (time.perf_counter() - began), {"cpu s": cpu_seconds() - cpu})


def grains(lengths: Sequence[int], open_blocks: int) -> tuple[float, float]:
    """Return how many documents Grain packs in a second of CPU, and how full its blocks are."""
    grain = importlib.import_module("grain")
    packer = importlib.import_module("grain.experimental").BestFitPackIterDataset
    source = grain.MapDataset.source([{"tokens": np.zeros(length, np.int32)} for length in lengths])
    stream = source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    began = time.process_time()
    count = sum(1 for _ in packer(stream, length_struct={"tokens": TOKENS}, num_packing_bins=open_blocks))
    return len(lengths) / (time.process_time() - began), sum(lengths) / (count * TOKENS)


def measure(bench: Bench) -> None:
    found = documents(20_000 if bench.quick else 100_000)
    began = time.process_time()
    blocks = [*Pack(sharded([each["tokens"] for each in found]), {"tokens": TOKENS}, itself)]
    bench.check("documents packed in a second of CPU", len(found) / (time.process_time() - began), Target(">=", 60_000))
    fill = sum(map(sum, blocks)) / (len(blocks) * TOKENS)
    bench.check("share of blocks that are tokens", fill, Target(">=", 0.985))
    for open_blocks in (64, 1000) if importlib.util.find_spec("grain") else ():
        rate, fill = grains([each["tokens"] for each in found[:20_000]], open_blocks)
        bench.note(f"Grain, {open_blocks} open blocks", **{"documents in a second of CPU": rate, "full": fill})
    budgets = {"tokens": TOKENS, "images": IMAGES}
    began = time.process_time()
    both = [*Pack(sharded(found), budgets, itself)]
    bench.note("under two budgets", **{"documents in a second of CPU": len(found) / (time.process_time() - began)})
    fills = [sum(each[name] for each in found) / (len(both) * most) for name, most in budgets.items()]
    bench.check("share of the tighter of two budgets", max(fills), Target(">=", 0.95))

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.jsonl" for number in range(10)]
        for number, path in enumerate(paths):
            path.write_text("".join(f"{json.dumps({**each, 'text': 'x' * 500})}\n" for each in found[number::10]))
        options: dict[str, Any] = {"num_workers": 2, "collate_fn": itself}
        sides: dict[str, Callable[[], Run]] = {
            "torch": partial(epoch, DataLoader(ByNumber(paths), 32, **options)),
            "ours": partial(epoch, DataLoader(ShardedStream(paths, json_lines), 32, **options)),
        }
        title = "JSON lines, batches of 32 (torch: ours by number)"
        rounds = 3 if bench.quick else 7
        bench.compare(title, "documents/s", sides, rounds=rounds, targets={"ours": Target(">=", 0.9)})

    shards = ShardedStream([[each["tokens"] for each in found[first::1000]] for first in range(1000)], from_number)
    measure_state(bench, Shuffle(shards, 1000), "Shuffle", len(found) // 2)
    chain = Pack(Shuffle(Mix([shards, shards], [0.7, 0.3]), 1000), {"tokens": TOKENS}, itself)
    measure_state(bench, chain, "Mix, Shuffle and Pack", len(blocks) // 2)


def measure_state(bench: Bench, stream: Stream[Any], name: str, count: int) -> None:
    """Check the state of a stream over 1,000 shards that has given so many samples: how long it takes, its size."""
    samples = iter(stream)
    for _ in range(count):
        next(samples)
    began, times = time.process_time(), 20
    for _ in range(times):
        state = stream.state_dict()
    taken_ms = (time.process_time() - began) / times * 1e3
    bench.check(f"ms of CPU for a state of 1,000 shards, {name}", taken_ms, Target("<=", 1))
    bench.check(f"KiB of it as JSON, {name}", len(json.dumps(state)) / 1024, Target("<=", 64))


if __name__ == "__main__":
    main(__doc__ or "", measure)
