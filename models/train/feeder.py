"""Batches made by worker processes, a few ahead of training."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Self

from models.train.batch import Batch
from models.train.packing import BatchSource

BATCHES_AHEAD = 24


class Feeder:
    """Endless batches of `source`, made by `workers` processes, or in this process if there are none.

    A context manager: leaving it ends the processes.
    """

    def __init__(self, source: BatchSource, workers: int) -> None:
        self.source = source
        # Forked workers would inherit objects of a CUDA context, which they cannot use, and would destroy them.
        context = multiprocessing.get_context("spawn")
        self.queue: Queue[Batch] = context.Queue(BATCHES_AHEAD)
        self.processes = [
            context.Process(target=_fill, args=(self.queue, source, worker), daemon=True) for worker in range(workers)
        ]

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def __iter__(self) -> Iterator[Batch]:
        if not self.processes:
            yield from self.source.batches(worker=0)
        while True:
            yield self.queue.get()


def _fill(queue: "Queue[Batch]", source: BatchSource, worker: int) -> None:
    for batch in source.batches(worker):
        queue.put(batch)
