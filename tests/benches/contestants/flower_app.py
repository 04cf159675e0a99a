"""Flower on a workload with its own FedAvg, message API and Ray backend."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["BENCH_FOLDER"] = sys.argv[1]
os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # for the actors

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from ray_client import client
from workload import ContestantWorkload, print_result, read_arguments, seconds_since_start

server = ServerApp()


class TimedFedAvg(FedAvg):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.round_starts_s: list[float] = []
        self.start_s = 0.0

    def configure_train(self, *args: Any, **options: Any) -> Any:
        """Record the start of the round and, in the first round, the start-up time, then configure the round."""
        if not self.round_starts_s:
            self.start_s = seconds_since_start()
        self.round_starts_s.append(time.perf_counter())
        return super().configure_train(*args, **options)


@server.main()  # type: ignore[untyped-decorator]
def run_rounds(grid: Grid, context: Context) -> None:
    work = ContestantWorkload(os.environ["BENCH_FOLDER"])
    rounds, cohort = work.cohorts.shape
    strategy = TimedFedAvg(
        fraction_train=cohort / work.spec["clients"], fraction_evaluate=0.0, min_available_nodes=cohort
    )
    model = work.network()
    result = strategy.start(
        grid, ArrayRecord(model.state_dict()), num_rounds=rounds, train_config=ConfigRecord({"lr": work.spec["lr"]})
    )
    times = [*strategy.round_starts_s, time.perf_counter()]
    model.load_state_dict(result.arrays.to_torch_state_dict())
    print_result(strategy.start_s, [b - a for a, b in zip(times, times[1:])], work.accuracy(model))  # noqa: B905, RUF007


if __name__ == "__main__":
    given, processes = read_arguments()
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=given.spec["clients"],
        backend_config={
            "init_args": {"num_cpus": processes, "log_to_driver": False, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
