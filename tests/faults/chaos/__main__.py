"""Plays runs and prints how many of each kind there were: ``python -m tests.faults.chaos --help``."""

from __future__ import annotations

import argparse
import collections
import logging
import multiprocessing
import sys
import time
import warnings

from tests.faults.chaos import PROPERTIES, seed_of_the_clock
from tests.faults.chaos.disturbed import PLACES
from tests.faults.chaos.soak import play, play_apart, seeds, settle


def quieten() -> None:
    """Expect what faults cause: warnings in the log, more workers than processors."""
    for name in ("asyncloader", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Disturb runs over data, and hold each against an undisturbed one.")
    parser.add_argument("--runs", type=int, default=1000, help="how many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for how long at most")
    parser.add_argument("--seed", type=int, help="of the first run; otherwise from the clock")
    parser.add_argument("--property", choices=list(PROPERTIES), help="of all runs; otherwise drawn for each")
    parser.add_argument("--place", choices=sorted(set(PLACES)), help="of all workers; otherwise drawn for each run")
    parser.add_argument(
        "--go-on", action="store_true", help="play each run in a process of its own, and go on after one that is wrong"
    )
    return parser.parse_args()


def main() -> int:
    """Play runs and print how many of each kind there were."""
    args = arguments()
    quieten()
    multiprocessing.set_forkserver_preload(["numpy", "torch", "torch.utils.data", "tests.faults.chaos"])
    first = seed_of_the_clock() if args.seed is None else args.seed
    print(f"first seed {first}", file=sys.stderr)
    histogram: collections.Counter[str] = collections.Counter()
    wrong: list[int] = []
    count = 0
    if not args.go_on:
        settle()
    begun = time.monotonic()
    for count, seed in enumerate(seeds(first, args.runs, args.seconds), 1):
        happened = (play_apart if args.go_on else play)(seed, args.place, args.property)
        if happened is None:
            wrong.append(seed)
        histogram.update(happened or ["wrong"])
        if count % 100 == 0:
            print(f"{count} runs, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    verdict = "none wrong, none hung, nothing left behind" if not wrong else f"{len(wrong)} wrong: {wrong}"
    print(f"{count} runs from seed {first}; {verdict}")
    for what, number in histogram.most_common():
        print(f"{number:6d}  {what}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
