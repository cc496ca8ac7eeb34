"""Workers, and feeds, on other machines, as actors of Ray. Experimental: names and behaviour may change in any version.

Public are `RayWorkers` and `FeedActor`. Everything else is private, and Ray is imported when a run or an actor begins.
"""

from asyncloader.ray.feed import FeedActor
from asyncloader.ray.workers import RayWorkers

__all__ = ["FeedActor", "RayWorkers"]
