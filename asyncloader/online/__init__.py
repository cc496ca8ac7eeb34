"""Training on data that is being made: samples come from producers while training goes on. Experimental: it may change.

    Feed              a dataset of what producers make; leases, the bound on staleness, batches, states
    FeedHandle        the same for producers in other processes
    Sample            what the function of a feed is given for each sample
    FeedStats         what became of samples, and who waits for whom

See the guide "Data that is being made".
"""

from asyncloader.online.errors import FeedClosedError, FeedFullError, LeaseLostError
from asyncloader.online.feed import Feed
from asyncloader.online.handle import FeedHandle
from asyncloader.online.keys import Sample
from asyncloader.online.producers import Lease
from asyncloader.online.stats import FeedStats

__all__ = [
    "Feed",
    "FeedClosedError",
    "FeedFullError",
    "FeedHandle",
    "FeedStats",
    "Lease",
    "LeaseLostError",
    "Sample",
]
