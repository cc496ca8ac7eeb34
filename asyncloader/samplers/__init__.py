"""Samplers: plain torch samplers, which work with any loader."""

from asyncloader.samplers.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
