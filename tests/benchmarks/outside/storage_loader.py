"""The plug-in that DLIO loads by `reader.data_loader_classname`: its loader for PyTorch, with our class in it."""

from __future__ import annotations

from unittest.mock import patch

from dlio_benchmark.data_loader import torch_data_loader

from asyncloader import DataLoader


class AsyncLoader(torch_data_loader.TorchDataLoader):
    """What DLIO asks for, batches, workers, order and prefetching, stays as it is."""

    def read(self) -> None:
        with patch.object(torch_data_loader, "DataLoader", DataLoader):
            super().read()
