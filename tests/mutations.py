"""Plausible defects, put into the library one at a time: the quick tests have to find each.

    python -m tests.mutations                # each of them, with the tests that are near: minutes
    python -m tests.mutations 3 17           # these; `--slow` runs tests that are slow as well

A defect is a text of a module and what stands there instead. It is made in a copy of the tree, and the first test that
fails has found it. Docs/testing.md has the table. Whoever moves tests to the slow ones runs this before and after.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 200
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", ".*_cache", ".hypothesis")


class Mutation(NamedTuple):
    """A defect.

    Attributes:
        what: What is wrong, for the table.
        path: The module in the package.
        old: Text that is there once.
        new: What takes its place.
        tests: Files that are likely to find it.
    """

    what: str
    path: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "what parked batches weigh does not count",
        "engine/run_ahead.py",
        "        parked_bytes = sum(parked) + BATCH_OVERHEAD_BYTES * len(parked)\n",
        "        parked_bytes = 0\n",
        "engine/test_scheduler.py",
    ),
    Mutation(
        "at the end of a stream, only its last ticket is void",
        "engine/scheduler.py",
        "        for ticket in self._forget(worker):\n",
        "        for ticket in self._forget(worker)[-1:]:\n",
        "engine/test_scheduler.py",
    ),
    Mutation(
        "the last ticket of a dead worker is blamed, not the first",
        "engine/scheduler.py",
        "[tickets.pop(0)], cause",
        "[tickets.pop()], cause",
        "engine/test_scheduler.py",
    ),
    Mutation(
        "the last batch in flight is taken for the awaited one",
        "engine/scheduler.py",
        "return min(in_flight, key",
        "return max(in_flight, key",
        "engine/test_scheduler.py engine/test_timeouts.py",
    ),
    Mutation(
        "a worker that is away is not taken in again",
        "engine/engine.py",
        "                self.workforce.coming.add(worker)\n            self._settle_soon()\n",
        "                pass\n            self._settle_soon()\n",
        "engine/test_engine.py",
    ),
    Mutation(
        "a worker that rests gets its next process although it has one by then",
        "engine/engine.py",
        "not self._is_at_work or self._is_there(worker) or not",
        "not self._is_at_work or not",
        "engine/test_engine.py",
    ),
    Mutation(
        "a worker that has grown is sent more tickets",
        "engine/engine.py",
        '                self._tell_scheduler("leaving", worker)\n',
        "                pass\n",
        "engine/test_engine.py test_renewal.py",
    ),
    Mutation(
        "a worker that has left has no process in the next run",
        "engine/engine.py",
        "                self._start(worker, 0.0)\n",
        "                pass\n",
        "engine/test_engine.py",
    ),
    Mutation(
        "a consumer sleeps beside an item that was put between its look and its waiter",
        "engine/handoff.py",
        "return changed() or lock.acquire",
        "return lock.acquire",
        "engine/test_handoff.py",
    ),
    Mutation(
        "a state forgets one of several batches that were given out of order",
        "engine/progress.py",
        "            while position in ahead:\n",
        "            if position in ahead:\n",
        "test_resume_states.py test_resume.py test_iterators.py",
    ),
    Mutation(
        "batches that were given out of order come again after a resume",
        "run/plan.py",
        "if progress.read in self._done:",
        "if progress.read in ():",
        "test_resume_states.py test_resume.py run/test_plan.py",
    ),
    Mutation(
        "a batch that a worker keeps is written over",
        "transport/heap.py",
        "            if ref is not None and ref() is not None:\n",
        "            if False:\n",
        "transport/test_slab.py",
    ),
    Mutation(
        "every tensor of a slab is read at the slab's beginning",
        "transport/heap.py",
        "return region, offset",
        "return region, 0",
        "transport/test_slab.py",
    ),
    Mutation(
        "slabs that were taken still count as free",
        "transport/free_list.py",
        "        self.nbytes -= capacity\n",
        "",
        "transport/test_free_list.py",
    ),
    Mutation(
        "a worker writes into slabs that batches of the worker before are still in",
        "transport/worker_heap.py",
        "        sent = tuple(self._sent.values())  #",
        "        sent = ()  #",
        "transport/test_worker_heap.py transport/test_slab.py",
    ),
    Mutation(
        "numpy draws the same in all workers",
        "seeding/seeder.py",
        "_generate_state(base_seed, worker_id)",
        "_generate_state(base_seed, 0)",
        "conformance/test_random_streams.py",
    ),
    Mutation(
        "the state after a resume counts from the beginning",
        "samplers/ordered.py",
        "int(run.start + items * self.num_replicas)",
        "int(items * self.num_replicas)",
        "samplers/test_elastic.py",
    ),
    Mutation(
        "set_epoch of the same epoch drops a state",
        "samplers/ordered.py",
        "        if number != self.epoch:\n",
        "        if number >= 0:\n",
        "samplers test_resume.py",
    ),
    Mutation(
        "a mixture's state forgets that weights have changed",
        "samplers/mixture.py",
        "[list(stage) for stage in self.weights]}",
        "[list(stage) for stage in self.weights[:1]]}",
        "samplers/test_mixture.py",
    ),
    Mutation(
        "the second number of a pair that random.gauss draws is lost in a state",
        "seeding/generators.py",
        "_unpacked(words, np.uint32).tolist()), gauss",
        "_unpacked(words, np.uint32).tolist()), None",
        "seeding/test_generators.py run/test_rng_snapshot.py test_resume_generators.py",
    ),
    Mutation(
        "generators that were put back count as restored",
        "run/rng_snapshot.py",
        "        _times_restored.clear()\n",
        "",
        "run/test_rng_snapshot.py",
    ),
    Mutation(
        "without workers, a batch is lost if its making is interrupted",
        "run/inline_iterator.py",
        "            if maker.host.ends(raised):\n",
        "            if maker.host.ends(raised):\n                plan.keys = NOTHING\n",
        "run/test_inline_iterator.py faults/test_interrupts_everywhere.py",
    ),
    Mutation(
        "an overlapping sample forgets its place in the epoch",
        "worker/overlap.py",
        "            keys, job.first = keys\n",
        "            keys, _ = keys\n",
        "worker/test_overlap_loop.py seeding/test_samples.py",
    ),
    Mutation(
        "if fewer workers are wanted, the first ones leave instead of the last",
        "engine/workforce.py",
        "sorted(self.wanted)[num_workers:]",
        "sorted(self.wanted, reverse=True)[num_workers:]",
        "engine/test_workforce.py",
    ),
    Mutation(
        "the measurement of new workers begins before they have made a batch",
        "engine/controller.py",
        "self._begins_at = None, made + self.num_workers",
        "self._begins_at = None, 0",
        "engine/test_controller.py",
    ),
    Mutation(
        "the slabs of a worker that has ended are not taken back",
        "backends/processes/pool.py",
        "            heap.reclaim()\n        super()",
        "            pass\n        super()",
        "backends/processes/test_pool.py",
    ),
    Mutation(
        "the part of a frame that a socket has taken is sent again",
        "backends/processes/channel.py",
        "                    unsent[0] = unsent[0][sent:]\n",
        "                    pass\n",
        "backends/processes/test_channel.py",
    ),
    Mutation(
        "a frame whose body fits into the buffer, but not together with its header, never arrives",
        "messages/frames.py",
        "if length > _READ_BYTES - _HEADER_BYTES:",
        "if length > _READ_BYTES:",
        "messages/test_frames.py",
    ),
    Mutation(
        "a worker hears nothing while it reads over what was made before",
        "worker/stream.py",
        "                    await asyncio.sleep(0)  # the line is read meanwhile\n",
        "",
        "worker/test_stream.py",
    ),
    Mutation(
        "a stream that a resume put into its middle, and that nobody read, begins there in the next epoch",
        "worker/batch_maker.py",
        "            self._leave(keeper)\n",
        "",
        "worker/test_batch_maker.py test_resume_iterable.py",
    ),
    Mutation(
        "a batch that has to be pickled twice has its tensors in slabs twice",
        "transport/codec.py",
        "        if self._reducers.find_shared():\n            self._forget_places()\n",
        "        if self._reducers.find_shared():\n",
        "transport/test_codec.py",
    ),
    Mutation(
        "ranks take one more step if each has exactly one chunk",
        "wrap/step_iterator.py",
        "return min(most, size), most <= size",
        "return min(most, size), most < size",
        "wrap/test_equal_steps.py",
    ),
    Mutation(
        "a state with batches given out of order is accepted with other ranks",
        "run/fits.py",
        'free |= set() if state.ahead else {"division"}',
        'free |= {"division"}',
        "run/test_checkpoint.py samplers/test_with_loaders.py test_resume_states.py",
    ),
    Mutation(
        "a forked process inherits the turn of a thread that does not exist there",
        "seeding/turns.py",
        "os.register_at_fork(after_in_child=_renew)\n",
        "",
        "seeding/test_turns.py",
    ),
    Mutation(
        "blocks are packed with a token more than they hold",
        "samplers/packing.py",
        "best_fit(sizes[largest_first].tolist(), self.block_size)",
        "best_fit(sizes[largest_first].tolist(), self.block_size + 1)",
        "samplers/test_packing.py",
    ),
    Mutation(
        "a cache returns samples of a damaged file",
        "datasets/cached.py",
        "if _check_of(content) != data[:_CHECK_BYTES]:",
        "if False:",
        "datasets/test_cached.py",
    ),
    Mutation(
        "quantiles are those of the first thousand batches",
        "observe/timing.py",
        "[-_RECENT:]",
        "[:_RECENT]",
        "observe/test_stats.py",
    ),
    Mutation(
        "a cache fills the disk",
        "datasets/cached.py",
        "if disk.free < _LEFT_FREE * disk.total:",
        "if False:",
        "datasets/test_cached.py",
    ),
    Mutation(
        "the count of `sample_seed` blocks goes on from one sample to the next",
        "seeding/sample_context.py",
        "count = count if of == self.position else 0",
        "count = count",
        "seeding/test_turns.py seeding/test_samples.py",
    ),
    Mutation(
        "the seed of a sample by its place in the epoch depends on the batch as well",
        "seeding/sample_context.py",
        "min(self.position, 0)",
        "self.position",
        "seeding/test_samples.py seeding/test_turns.py",
    ),
    Mutation(
        "overlapping batches of a worker count as if each occupied the worker alone",
        "observe/stats.py",
        ", batch_s * (self.num_workers or math.inf))",
        ", math.inf)",
        "observe",
    ),
    Mutation(
        "the advice names more workers than an epoch has batches",
        "observe/verdict.py",
        "min(self.cores if self.computes else measured, self.batches)",
        "self.cores if self.computes else measured",
        "observe",
    ),
    Mutation(
        "after loading a state with other weights, the length of the epoch is the old one",
        "samplers/windows.py",
        "of_what = self.epoch, self.sampler.epoch, self.sampler._reading, self.sampler._version",
        "of_what = self.epoch, self.sampler.epoch",
        "samplers/test_windows.py samplers/test_packing.py samplers/test_mixture.py",
    ),
    Mutation(
        "weights set twice at one position are both kept",
        "samplers/shares.py",
        "            if last.start == start:\n                del self.stages[-1]\n",
        "",
        "samplers/test_mixture.py",
    ),
    Mutation(
        "padding is computed from the shortest sample of a batch",
        "samplers/length_batches.py",
        "(padded[by_length][np.cumsum(sizes) - sizes] * sizes)",
        "(padded[by_length][np.cumsum(sizes) - 1] * sizes)",
        "samplers/test_length_batches.py",
    ),
    Mutation(
        "of two cgroups, only the first one's quota counts",
        "machine.py",
        "return max(1, min([bound, *map(math.ceil, quotas)]))",
        "return max(1, min([bound, *map(math.ceil, quotas[:1])]))",
        "test_machine.py",
    ),
    Mutation(
        "a checksum covers only the beginning of a long row",
        "identity.py",
        "range(0, len(array), _PIECE)",
        "range(0, min(len(array), _PIECE), _PIECE)",
        "test_identity.py",
    ),
    Mutation(
        "assert_resumable does not compare the epoch after",
        "testing/__init__.py",
        '            _compare(f"The state {when}: the epoch after", after, second)\n',
        "            after = second\n",
        "test_resume.py",
    ),
    Mutation(
        "a source that begins again has the same order as before",
        "samplers/shuffle.py",
        "numbers = named[:, None] * length + np.arange(length)",
        "numbers = 0 * named[:, None] + np.arange(length)",
        "samplers/test_mixture.py samplers/test_orders.py",
    ),
    Mutation(
        "host memory is let go of while copies read it",
        "wrap/device.py",
        "                self._underway[mark] = memory\n",
        "                self._underway[mark] = ()\n",
        "wrap/test_device_iterator.py",
    ),
    Mutation(
        "memory on a device is used again before the step that reads it",
        "wrap/device.py",
        "            self.note_use(data)\n",
        "            pass\n",
        "wrap/test_device_iterator.py",
    ),
    Mutation(
        "a program's stream does not wait for the copy of its batch",
        "wrap/device.py",
        "        self.wait(mark)\n        for data in",
        "        for data in",
        "wrap/test_device_iterator.py",
    ),
    Mutation(
        "a program that is ahead of its device fills that with batches",
        "wrap/device_iterator.py",
        "                if not self._in_async_for:\n                    step.synchronize()\n",
        "                if not self._in_async_for:\n                    pass\n",
        "wrap/test_device_iterator.py",
    ),
    Mutation(
        "an interrupt while a wrapper works on a batch loses it",
        "wrap/wrapper.py",
        "            if not self._taken:\n                self._taken.append(await self._take())\n",
        "            self._taken[:] = [await self._take()]\n",
        "wrap/test_wrapper.py",
    ),
    Mutation(
        "what a transform on a device draws is the same for each batch",
        "wrap/device_iterator.py",
        'Seeder(seeds)(state["position"] + len(state["ahead"]), ON_DEVICE)',
        "Seeder(seeds)(0, ON_DEVICE)",
        "wrap/test_to_device.py",
    ),
    Mutation(
        "the order of a shuffled StatefulDataLoader is drawn at the first index, and not before",
        "stateful/samplers.py",
        "        first = draw()  # now, and not at the first index\n",
        "        first: Iterator[int] = iter(())\n",
        "stateful/test_torchdata_states.py",
    ),
    Mutation(
        "a run that goes on from a state of torchdata begins with the worker that has just given a batch",
        "stateful/torchdata_state.py",
        '(snapshot["_last_yielded_worker_id"] + 1) % number',
        'snapshot["_last_yielded_worker_id"]',
        "stateful/test_torchdata_states.py",
    ),
    Mutation(
        "what torchdata had given since its snapshot is given again",
        "loader.py",
        "        if wait_for_start and state is not None and state.left_out:\n",
        "        if wait_for_start and state is not None and state.left_out < 0:\n",
        "stateful/test_torchdata_states.py",
    ),
    Mutation(
        "a generator in the state of an iterator that is at its end does not go on in the next epoch",
        "messages/snapshot.py",
        "                iter(dataset).load_state_dict(past)\n",
        "                iter(dataset)\n",
        "stateful/test_continued_states.py",
    ),
    Mutation(
        "a resumed run counts batches since a snapshot anew",
        "messages/snapshot.py",
        'self._is_first = not self._snapshot or "draws" in self._snapshot',
        "self._is_first = True",
        "stateful/test_continued_states.py",
    ),
)


def found_by(mutation: Mutation, tree: Path, *, slow: bool) -> str:
    """Put a defect into the tree; return the test that finds it, "" if none does."""
    module = tree / "asyncloader" / mutation.path
    text = module.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.path} has {text.count(mutation.old)} times {mutation.old!r}"
    module.write_text(text.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(("-m", "") if slow else ())]
    command += [f"tests/{name}" for name in mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"they hang: {mutation.tests}"
    finally:
        module.write_text(text)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    hung = re.search(r"File \".*/(tests/\S*test_\w+\.py)\", line \d+ in (test_\w+)", done.stderr)
    if hung and not failed:
        return f"{hung[1]}::{hung[2]} hangs"
    return failed[1] if failed else f"exit code {done.returncode}: {done.stderr[-500:]}"


def main() -> None:
    """Try the mutations, and tell who finds them."""
    chosen = [int(argument) for argument in sys.argv[1:] if argument.isdigit()] or range(1, len(MUTATIONS) + 1)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        for number in chosen:
            began, mutation = time.monotonic(), MUTATIONS[number - 1]
            found = found_by(mutation, tree, slow="--slow" in sys.argv)
            missed += not found
            print(f"{number:2} {mutation.what}: {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
