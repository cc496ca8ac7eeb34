"""The scheduler in a cluster that is played: exactly once and in order, and never faster than what it is made of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.benchmarks.cluster_model import Cluster, Costs, Play, Work, bounds

COSTS = Costs(loop_s=50e-6, take_s=20e-6, receive_bytes_s=2e9)
GBIT = 1e9 / 8


@pytest.mark.parametrize(
    ("limit", "work", "cluster"),
    [
        ("workers", Work(1_000_000, 0.1), Cluster(64, 100 * GBIT)),
        ("network", Work(1_000_000, 0.01), Cluster(64, 1 * GBIT)),
        ("thread", Work(1_000, 0.001), Cluster(64, 100 * GBIT)),
        ("thread", Work(20_000_000, 0.05), Cluster(64, 400 * GBIT)),
        ("training", Work(1_000_000, 0.1, step_s=0.005), Cluster(64, 100 * GBIT)),
    ],
)
def test_one_thing_is_the_bound_and_it_is_nearly_reached(limit: str, work: Work, cluster: Cluster) -> None:
    """And it is the one that can do least by itself."""
    played = Play(COSTS, work, cluster, 64 * 30).run()
    possible = bounds(COSTS, work, cluster)
    assert min(possible, key=lambda name: possible[name]) == limit == played.limit
    assert 0.95 <= played.batches_s / possible[limit] <= 1.02


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_what_waits_for_the_training_is_the_window(factor: int) -> None:
    """No more, and as much: that is what a trainer's memory has to have room for."""
    work = Work(1_000_000, 0.01, step_s=0.01)
    played = Play(COSTS, work, Cluster(32, 400 * GBIT), 1000, prefetch=factor, max_buffered_bytes=0).run()
    assert played.peak_bytes == (32 * factor + 1) * work.nbytes  # and the one that is trained with


def test_without_nodes_that_end_nothing_is_made_again() -> None:
    assert Play(COSTS, Work(1000, 0.01, sigma=1.5), Cluster(8, GBIT), 400).run().again == 0


CLUSTERS = st.builds(
    Cluster,
    num_workers=st.integers(1, 12),
    link_bytes_s=st.sampled_from([1 * GBIT, 100 * GBIT]),
    per_node=st.integers(1, 5),
    delay_s=st.sampled_from([1e-4, 0.02]),
    life_s=st.sampled_from([0.5, 3.0, float("inf")]),
    noticed=st.sampled_from([0.0, 0.5, 1.0]),
    absent_s=st.sampled_from([0.01, 0.5]),
)
WORKS = st.builds(
    Work,
    nbytes=st.sampled_from([1, 100_000, 10_000_000]),
    batch_s=st.sampled_from([1e-4, 0.01, 0.1]),
    sigma=st.sampled_from([0.0, 0.5, 1.0]),
    step_s=st.sampled_from([0.0, 0.02]),
)
OPTIONS = st.fixed_dictionaries(
    {
        "scheduling": st.sampled_from(["static", "dynamic"]),
        "prefetch": st.integers(1, 4),
        "max_buffered_bytes": st.sampled_from([0, 1 << 20, 1 << 30]),
    }
)


@settings(max_examples=60, deadline=None)
@example(  # more waits for the link at the end of what is counted than at its beginning
    work=Work(nbytes=100_000, batch_s=1e-4, sigma=0.0),
    cluster=Cluster(num_workers=8, link_bytes_s=1 * GBIT, per_node=4, life_s=3.0, noticed=0.0, absent_s=0.01),
    options={"scheduling": "static", "prefetch": 1, "max_buffered_bytes": 0},
    seed=0,
)
@given(work=WORKS, cluster=CLUSTERS, options=OPTIONS, seed=st.integers(0, 1000))
def test_nothing_is_lost_and_nothing_is_faster_than_it_can_be(
    work: Work, cluster: Cluster, options: dict[str, Any], seed: int
) -> None:
    """Whatever comes and goes: each batch once, in order (which `run` asserts), and within what time allows."""
    # Over a gigabit ten megabytes take 80 ms, and behind those of others seconds: lives may end before anything comes.
    assume(work.nbytes < 10_000_000 or cluster.life_s == float("inf") or cluster.link_bytes_s > GBIT)
    count = 80
    played = Play(COSTS, work, cluster, count, seed=seed, check=True, **options).run()
    received_s = COSTS.loop_s + work.nbytes / COSTS.receive_bytes_s
    for least_s in (
        played.work_s / cluster.num_workers,
        count * work.nbytes / cluster.link_bytes_s,
        count * received_s,
        (count - 1) * (COSTS.take_s + work.step_s),
    ):
        assert played.elapsed_s >= 0.999 * least_s
    assert all(share < 1.0001 for name, share in played.shares.items() if name != "training"), played.shares
    assert played.shares["workers"] < 1.0001 * played.there < 1.0002
