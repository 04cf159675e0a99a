"""Flower on a workload: its own FedAvg, message API and Ray backend. Runs in an environment of its own."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import Workload, arguments, since_start, tell

FOLDER = os.environ.setdefault("BENCH_FOLDER", sys.argv[1] if len(sys.argv) > 1 else "")
held: dict[str, Any] = {}  # of this process: an actor keeps its workload and network from one client to the next

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """One epoch on the client's own examples."""
    if not held:
        torch.set_num_threads(1)
        held["work"] = Workload(os.environ["BENCH_FOLDER"])
        held["model"] = held["work"].network(begun=False)
    work, model = held["work"], held["model"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = work.client(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=work.spec["lr"])
    for rows in torch.randperm(len(y)).split(work.spec["batch"]):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):  # type: ignore[misc]
    """FedAvg that notes when a round's clients are asked; the next round's, or the end, is when it is over."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.began_s: list[float] = []

    def configure_train(self, *args: Any, **options: Any) -> Any:
        if not self.began_s:
            held["start_s"] = since_start()
        self.began_s.append(time.perf_counter())
        return super().configure_train(*args, **options)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """All rounds, then the test set."""
    work = Workload(os.environ["BENCH_FOLDER"])
    rounds, cohort = work.cohorts.shape
    strategy = Timed(fraction_train=cohort / work.spec["clients"], fraction_evaluate=0.0, min_available_nodes=cohort)
    model = work.network()
    result = strategy.start(
        grid, ArrayRecord(model.state_dict()), num_rounds=rounds, train_config=ConfigRecord({"lr": work.spec["lr"]})
    )
    times = [*strategy.began_s, time.perf_counter()]
    model.load_state_dict(result.arrays.to_torch_state_dict())
    tell(held["start_s"], [b - a for a, b in zip(times, times[1:])], work.accuracy(model))  # noqa: B905, RUF007


if __name__ == "__main__":
    given, processes = arguments()
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=given.spec["clients"],
        backend_config={
            "init_args": {"num_cpus": processes, "log_to_driver": False, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
