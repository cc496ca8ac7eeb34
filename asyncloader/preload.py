"""For the fork server, which starts workers by ``multiprocessing_context="forkserver"``: what it may import beforehand.

    multiprocessing.set_forkserver_preload(["asyncloader.preload"])    before anything is started by it

    fork server: torch and what workers need, imported once; the garbage collector frozen ── fork ──> worker, ...

A worker then does not import torch by itself, and its garbage collector does not look through what was imported, which
would write to every page of it, and so copy it: 14 MB of private memory when it begins in place of 49. Name it last,
after modules of your own. Not for the trainer's process: what is there when the collector is frozen is never collected.
"""

import gc

import asyncloader.worker.serve as serve

__all__ = ["serve"]

gc.collect()
gc.freeze()
