"""The simulator pfl-research on a workload with its own FedAvg, in torch.distributed processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any


def start_processes() -> int:
    """Start the ranks as torchrun does, but without torch in the parent. Return 0, or 1 if a rank fails."""
    count = int(sys.argv[2])
    if count == 1:
        return int(subprocess.run([sys.executable, *sys.argv], env={**os.environ, "BENCH_RANK": "0"}).returncode != 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={
                **os.environ,
                **common,
                "TORCHELASTIC_RUN_ID": "bench",
                "GLOO_SOCKET_IFNAME": "lo",
                **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "BENCH_RANK")},
            },
        )
        for rank in range(count)
    ]
    codes = [rank.wait() for rank in ranks]
    return int(any(codes))


def run_rank() -> None:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from workload import print_result, read_arguments, seconds_since_start

    work, _ = read_arguments()
    torch.set_num_threads(1)
    np.random.seed(work.spec["seed"])  # equal in all processes, so that they draw the same cohorts
    module: Any = work.network()
    module.loss = lambda x, y, **_: F.cross_entropy(module(x), y)
    module.metrics = lambda x, y, **_: {}

    def create_dataset(user: int) -> Dataset:
        x, y = work.client(user)
        rows = torch.randperm(len(y))
        return Dataset(raw_data=[x[rows], y[rows]], user_id=str(user))

    class RoundClock(TrainingProcessCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []
            self.start_s = 0.0

        def on_train_begin(self, *, model: Any) -> Any:
            self.start_s = seconds_since_start()
            self.times.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(self, *args: Any, **options: Any) -> Any:
            self.times.append(time.perf_counter())
            return False, Metrics()

    cohort_members = iter(work.cohorts.ravel().tolist() * 2)
    training = FederatedDataset(create_dataset, lambda: next(cohort_members))
    rounds, cohort = work.cohorts.shape
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    clock = RoundClock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds + 1, train_cohort_size=cohort, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=training, val_data=training),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=work.spec["lr"], local_num_epochs=1, local_batch_size=work.spec["batch"]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    if os.environ["BENCH_RANK"] == "0":
        times = clock.times
        print_result(clock.start_s, [b - a for a, b in zip(times, times[1:])], work.accuracy(module))  # noqa: B905, RUF007


if __name__ == "__main__":
    if "BENCH_RANK" in os.environ:
        run_rank()
    else:
        sys.exit(start_processes())
