"""Baseline of `python -m tests.benches sim`: plain PyTorch training in one or more processes."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch
import torch.nn.functional as F
from workload import ContestantWorkload, print_result, processor_seconds, read_arguments, seconds_since_start


class TrainingLoop:
    def __init__(self, work: ContestantWorkload) -> None:
        torch.set_num_threads(1)
        self.work, self.model = work, work.network(initial_weights=False)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=work.spec["lr"])

    def train(self, start: list[torch.Tensor], clients: Any, total: list[torch.Tensor]) -> None:
        """Train each client for one epoch from `start`, and add its weights to `total`."""
        for client in clients:
            x, y = self.work.client(int(client))
            with torch.no_grad():
                for value, initial in zip(self.parameters, start, strict=True):
                    value.copy_(initial)
            for rows in torch.randperm(len(y)).split(self.work.spec["batch"]):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x[rows]), y[rows]).backward()
                self.optimizer.step()
            with torch.no_grad():
                for value, sum_of_value in zip(self.parameters, total, strict=True):
                    sum_of_value.add_(value)


def run_worker(folder: str, start: list[torch.Tensor], total: list[torch.Tensor], pipe: Any) -> None:
    """Train each batch of clients from `pipe` until None. Send None when ready and after each batch."""
    loop = TrainingLoop(ContestantWorkload(folder))
    pipe.send(None)
    while (clients := pipe.recv()) is not None:
        with torch.no_grad():
            for value in total:
                value.zero_()
        loop.train(start, clients, total)
        pipe.send(None)


def main() -> None:
    work, processes = read_arguments()
    loop, spawn = TrainingLoop(work), multiprocessing.get_context("spawn")
    start = [value.detach().clone().share_memory_() for value in work.network().parameters()]
    totals = [[torch.zeros_like(value).share_memory_() for value in start] for _ in range(processes)]
    pipes = []
    for total in totals[1:]:
        own_end, worker_end = spawn.Pipe()
        spawn.Process(target=run_worker, args=(str(work.folder), start, total, worker_end), daemon=True).start()
        pipes.append(own_end)
    for pipe in pipes:
        pipe.recv()
    start_s, rounds_s, began_cpu_s = seconds_since_start(), [], 0.0
    for cohort in work.cohorts:
        began_s = time.perf_counter()
        for rank, pipe in enumerate(pipes, 1):
            pipe.send(cohort[rank::processes])
        for value in totals[0]:
            value.zero_()
        loop.train(start, cohort[::processes], totals[0])
        for pipe in pipes:
            pipe.recv()
        for value, *sums in zip(start, *totals, strict=True):
            value.copy_(sum(sums) / len(cohort))
        rounds_s.append(time.perf_counter() - began_s)
        began_cpu_s = began_cpu_s or processor_seconds()
    steady_cpu_s = processor_seconds() - began_cpu_s
    for pipe in pipes:
        pipe.send(None)
    with torch.no_grad():
        for value, end in zip(loop.parameters, start, strict=True):
            value.copy_(end)
    print_result(start_s, rounds_s, work.accuracy(loop.model), steady_cpu_s=steady_cpu_s)


if __name__ == "__main__":
    main()
