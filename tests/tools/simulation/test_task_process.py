"""One device's tasks in the agent's own task process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedquilt import methods
from fedquilt.core import BlobRef, Bundle, DeviceView, ModelError
from fedquilt.tools.simulation.task_process import TaskProcess

NETWORK = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}
MODEL = {
    "1.weight": np.arange(12, dtype=np.float32).reshape(3, 4) / 12,
    "1.bias": np.zeros(3, np.float32),
    "3.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 6,
    "3.bias": np.zeros(2, np.float32),
}


def test_a_task_tells_its_peak_and_gives_what_it_would_send_or_says_why_not(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x_train=draws.random((20, 4), np.float32), y_train=np.arange(20) % 2)
    method = methods.load("fedavg")
    made = Bundle({"network": NETWORK}, {"model": BlobRef(sha256="0" * 64, size=1)}, lambda name: MODEL)
    order = method.send(method.init(made, method.params(), 0), DeviceView("alone", None))
    assert order is not None
    data = {"path": str(tmp_path / "own.npz")}
    with TaskProcess("fedavg", "numpy", 1 << 30, data, Path, tmp_path) as process:
        outcome, sent = process.run_task(order, 0)
        assert outcome.weight == 16  # the others are held out
        assert outcome.peak_bytes is not None
        assert 10**7 < outcome.peak_bytes < 1 << 30
        assert outcome.peak_bytes <= process.outside_bytes < 1.5 * outcome.peak_bytes  # a little later, so no less
        assert sent["model"].keys() == MODEL.keys()
        assert not np.array_equal(sent["model"]["1.weight"], MODEL["1.weight"])
        order.params["network"]["inputs"] = 5  # type: ignore[index]
        with pytest.raises(ModelError, match="a task of fedavg in 1074 MB: "):
            process.run_task(order, 1)
