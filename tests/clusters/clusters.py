"""A cluster of Ray on this machine: several raylets, each a node to Ray. For the tests here and for benchmarks."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def make_cluster(**head: Any) -> Iterator[Any]:
    """Have a cluster whose head, where the trainer is, has no room for workers; be connected to it.

    Args:
        head: More options of the head.
    """
    # Not pytest's folder: Ray's sockets lie deep in it, and their names are bounded.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, mock.patch.dict(os.environ):
        os.environ |= {
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_worker_niceness": "0",  # 15 by default: beside busy tests of others an actor then starts in minutes
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        os.environ.pop("RAY_ADDRESS", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
            from ray.cluster_utils import Cluster

            options = {"num_cpus": 0, "include_dashboard": False, **head}
            made = Cluster(initialize_head=True, head_node_args=options)
            ray.init(made.address, log_to_driver=False, logging_level="ERROR")
            try:
                yield made
            finally:
                ray.shutdown()
                made.shutdown()
