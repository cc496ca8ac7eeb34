"""What the fork server imports beforehand is there in its workers, and their garbage collectors leave it alone."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.nursery import Program

PROGRAM = """
    import gc, multiprocessing, sys

    if __name__ == "__mp_main__":  # a worker imports this before anything of ours is run in it
        print("asyncloader.worker.serve" in sys.modules, gc.get_freeze_count() > 10_000, flush=True)

    if __name__ == "__main__":
        from asyncloader import DataLoader

        multiprocessing.set_forkserver_preload(["asyncloader.preload"])
        print(len(list(DataLoader(range(8), 4, num_workers=1, multiprocessing_context="forkserver"))))
"""


def test_workers_find_it_done(run: Callable[..., Program]) -> None:
    """Torch and our own modules are imported, and frozen, before the worker's main module is."""
    done = run(PROGRAM)
    assert done.returncode == 0, done.explain("")
    assert done.out.splitlines() == ["True True", "2"]
