"""Prometheus metrics of a loader: a training run on digits that answers at /metrics while it trains.

    python examples/prometheus_metrics.py --epochs 5 --port 9000
    curl localhost:9000/metrics

A collector asks `loader.stats()` when Prometheus scrapes, from the thread of the HTTP server. A run costs nothing more
for being watched.
"""

import argparse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from asyncloader import DataLoader
from digits import FOLDER, Trainer, train_and_test_sets, write_digits


class LoaderMetrics(Collector):
    """The newest run of some loaders, by name. Counters start anew with each epoch; Prometheus' rate() knows that."""

    def __init__(self, **loaders: DataLoader[Any]) -> None:
        self._loaders = loaders

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        labels = ["loader"]
        batches = CounterMetricFamily("loader_batches", "Batches taken in this epoch.", labels=labels)
        seconds = SummaryMetricFamily("loader_wait_seconds", "How long training waited for a batch.", labels=labels)
        stages = SummaryMetricFamily("loader_stage_seconds", "Time of a stage.", labels=[*labels, "stage"])
        waited = GaugeMetricFamily("loader_waited_ratio", "Share of its time that training waited.", labels=labels)
        busy = GaugeMetricFamily("loader_workers_busy_ratio", "Share of their time workers worked.", labels=labels)
        bad = CounterMetricFamily("loader_bad_samples", "Samples left out or replaced in this epoch.", labels=labels)
        for name, loader in self._loaders.items():
            stats = loader.stats()
            batches.add_metric([name], stats.batches)
            seconds.add_metric([name], stats.waiting.consumer.count, stats.waiting.consumer.total_s)
            for stage, timing in stats.stages:
                stages.add_metric([name, stage], timing.count, timing.total_s)
            waited.add_metric([name], stats.waited_share)
            busy.add_metric([name], stats.workers.busy_share)
            bad.add_metric([name], stats.faults.bad_count)
        yield from (batches, seconds, stages, waited, busy, bad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--data", type=Path, default=FOLDER, help="where the digits are, or are written to")
    args = parser.parse_args()
    write_digits(args.data)
    torch.manual_seed(0)
    training, _ = train_and_test_sets(args.data)
    loader = DataLoader(training, batch_size=64, shuffle=True, num_workers=args.workers, persistent_workers=True)
    metrics = LoaderMetrics(train=loader)
    REGISTRY.register(metrics)
    server, thread = start_http_server(args.port, addr="127.0.0.1")
    trainer = Trainer(steps=args.epochs * len(loader))
    for epoch in range(args.epochs):
        for images, labels in loader:
            loss = trainer.step(images, labels)
        print(f"epoch {epoch}: loss {loss:.3f}; {loader.stats().verdict}")
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    print(*(line for line in lines if line.startswith("loader_")), sep="\n")
    server.shutdown()
    thread.join()
    server.server_close()
    loader.close()


if __name__ == "__main__":
    main()
