"""Make donors/*.safetensors: two networks trained elsewhere, to stitch from; and the data of the example `timeseries`.

The data are accelerometer readings of a board on the wrist. The donors have never seen a wrist: each was trained on
readings of phones in pockets, on other activities.
"""

import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedquilt.arrays import tensors
from fedquilt.models.networks import registry

TIMESERIES = Path(__file__).parents[1] / "timeseries" / "make.py"
STEPS = 20  # of a window, two seconds
POCKETS = {  # steps a second, swing in g
    "sit": (0.0, 0.03),
    "stairs": (1.4, 0.4),
    "stroll": (1.1, 0.2),
    "jog": (2.5, 0.6),
    "cycle": (0.7, 0.3),
}
DONORS = {"wide": {"width": 16, "kernel": 5}, "long": {"width": 12, "kernel": 9}}
EPOCHS = 30


def donor(network: dict[str, object], readings: Callable[..., list[list[Any]]], draw: random.Random) -> dict[str, Any]:
    """Weights of a network trained on eight phones in pockets; `readings` is that of the example `timeseries`."""
    classes, windows, labels = sorted(POCKETS), [], []
    for _ in range(8):
        rows = readings("", draw, POCKETS)
        for first in range(0, len(rows) - STEPS + 1, STEPS):
            activities = {activity for *_, activity in rows[first : first + STEPS]}
            if len(activities) == 1:
                windows.append([[float(each) for each in axes] for _, *axes, _ in rows[first : first + STEPS]])
                labels.append(classes.index(activities.pop()))
    x, y = torch.tensor(windows), torch.tensor(labels)
    x = (x - x.mean(dim=(0, 1))) / x.std(dim=(0, 1))
    torch.manual_seed(0)
    model = registry.build_network(network)
    steps = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(EPOCHS):
        for some in torch.randperm(len(x)).split(32):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            steps.step()
    return model.state_dict()


def main() -> None:
    """Write the data and the donors."""
    folder, draw = Path(__file__).parent / "donors", random.Random(1)
    folder.mkdir(exist_ok=True)
    timeseries = runpy.run_path(str(TIMESERIES))
    timeseries["main"]()
    for name, settings in DONORS.items():
        network = {"name": "conv1d", "channels": 3, "steps": STEPS, "classes": len(POCKETS), **settings}
        weights = {key: value.numpy() for key, value in donor(network, timeseries["readings"], draw).items()}
        (folder / f"{name}.safetensors").write_bytes(tensors.encode_tensors(weights))


if __name__ == "__main__":
    main()
