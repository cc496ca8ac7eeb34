"""Samplers: plain torch samplers, which work with any loader.

    ElasticSampler         all samples, shuffled, divided among ranks
    MixtureSampler         sources by weight
    WeightedSampler        samples by weights of their own
    LengthBatchSampler     batches of like length, under a budget of tokens
    BalancedBatchSampler   batches of equal cost: no rank waits for another one
    PackingBatchSampler    blocks of a fixed number of tokens; packed gives a loader what it needs for it
    OrderedSampler         the base of your own: say the order of an epoch, and it can be resumed on any ranks

The order of each is a function of seed and epoch that can be looked at anywhere: nothing of it is stored, and a state
of any one rank, taken after the same number of steps on all, is resumed on any number of ranks. The last three
can be given the order of another sampler.
"""

from asyncloader.samplers.balanced_batches import BalancedBatchSampler
from asyncloader.samplers.elastic import ElasticSampler
from asyncloader.samplers.length_batches import LengthBatchSampler
from asyncloader.samplers.mixture import MixtureSampler
from asyncloader.samplers.ordered import Order, OrderedSampler
from asyncloader.samplers.pack_collate import pack_collate
from asyncloader.samplers.packing import PackingBatchSampler, packed
from asyncloader.samplers.weighted import WeightedSampler

__all__ = [
    "BalancedBatchSampler",
    "ElasticSampler",
    "LengthBatchSampler",
    "MixtureSampler",
    "Order",
    "OrderedSampler",
    "PackingBatchSampler",
    "WeightedSampler",
    "pack_collate",
    "packed",
]
