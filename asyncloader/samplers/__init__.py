"""Samplers: plain torch samplers, which work with any loader."""

from asyncloader.samplers.block_shuffle import BlockShuffleSampler
from asyncloader.samplers.elastic import ElasticSampler

__all__ = ["BlockShuffleSampler", "ElasticSampler"]
