"""Workers on other machines, as actors of Ray. Experimental: names and behaviour may change in any version.

Public is `RayWorkers` alone. Everything else is private, and is imported when a run begins.
"""

from asyncloader.ray.workers import RayWorkers

__all__ = ["RayWorkers"]
