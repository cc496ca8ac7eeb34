"""Workers on other machines: agents that run them there, and the trainer's side of them.

Public is `RayWorkers` alone. Everything else is private, and is imported when a run begins.
"""

from asyncloader.ray.workers import RayWorkers

__all__ = ["RayWorkers"]
