"""Streams of shards that mix, shuffle, pack and resume: on other workers, and on other ranks.

Parts compose like iterables, from a :class:`ShardedStream` outwards. The outermost one is a dataset for any loader, or
is iterated over by itself; its state says what was given, and nothing that was read beyond.
"""

from asyncloader.streams.bucket import Bucket
from asyncloader.streams.mapped import Filter, Map
from asyncloader.streams.merging import merge
from asyncloader.streams.mix import Mix
from asyncloader.streams.pack import Pack
from asyncloader.streams.sharded import ShardedStream
from asyncloader.streams.shuffle import Shuffle
from asyncloader.streams.stream import Stream

__all__ = ["Bucket", "Filter", "Map", "Mix", "Pack", "ShardedStream", "Shuffle", "Stream", "merge"]
