"""How many tickets a worker has at once, from how long batches have taken."""

from __future__ import annotations

from asyncloader.engine.run_ahead import RunAhead
from tests.support import deciders


def test_a_quick_batch_among_slow_ones_makes_no_queue() -> None:
    """Many do."""
    run_ahead = RunAhead(deciders.options())
    depths = []
    for busy_s in [1.0] + 50 * [0.0001]:
        run_ahead.returned(busy_s, 0.0003, is_prompt=True)
        depths.append(run_ahead.queue_depth)
    assert depths[:3] == [1, 1, 1]
    assert depths[-1] > 10
