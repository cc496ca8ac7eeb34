"""The successor of torchdata's StatefulDataLoader: its name, signature, order and states, on our loader.

    -from torchdata.stateful_dataloader import StatefulDataLoader
    +from asyncloader.stateful import StatefulDataLoader

Checkpoints that were made with torchdata 0.8 to 0.11 are loaded as they are, by this class and by
:class:`asyncloader.DataLoader`; :func:`convert` writes one down as a state of ours.
"""

from asyncloader.stateful.loader import StatefulDataLoader, convert
from asyncloader.stateful.samplers import BatchSampler, RandomSampler

__all__ = ["BatchSampler", "RandomSampler", "StatefulDataLoader", "convert"]
