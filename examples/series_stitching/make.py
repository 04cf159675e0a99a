"""Make donors/*.safetensors, two donor networks for stitching, and the data of the example `timeseries`.

The data are accelerometer readings of a board on the wrist. The donors were trained on other activities, with readings
of phones in pockets.
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
STEPS = 20  # per window, two seconds
POCKETS = {  # steps a second, swing in g
    "sit": (0.0, 0.03),
    "stairs": (1.4, 0.4),
    "stroll": (1.1, 0.2),
    "jog": (2.5, 0.6),
    "cycle": (0.7, 0.3),
}
DONORS = {"wide": {"width": 16, "kernel": 5}, "long": {"width": 12, "kernel": 9}}
EPOCHS = 30


def train_donor(
    network: dict[str, object], make_readings: Callable[..., list[list[Any]]], rng: random.Random
) -> dict[str, Any]:
    """Return the weights of a network trained on eight phones. `make_readings` is from the example `timeseries`."""
    classes, windows, labels = sorted(POCKETS), [], []
    for _ in range(8):
        rows = make_readings("", rng, POCKETS)
        for start in range(0, len(rows) - STEPS + 1, STEPS):
            activities = {activity for *_, activity in rows[start : start + STEPS]}
            if len(activities) == 1:
                windows.append([[float(value) for value in axes] for _, *axes, _ in rows[start : start + STEPS]])
                labels.append(classes.index(activities.pop()))
    x, y = torch.tensor(windows), torch.tensor(labels)
    x = (x - x.mean(dim=(0, 1))) / x.std(dim=(0, 1))
    torch.manual_seed(0)
    model = registry.build_network(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.state_dict()


def main() -> None:
    """Write the data and the donors."""
    folder, rng = Path(__file__).parent / "donors", random.Random(1)
    folder.mkdir(exist_ok=True)
    timeseries = runpy.run_path(str(TIMESERIES))
    timeseries["main"]()
    for name, settings in DONORS.items():
        network = {"name": "conv1d", "channels": 3, "steps": STEPS, "classes": len(POCKETS), **settings}
        weights = {key: value.numpy() for key, value in train_donor(network, timeseries["make_readings"], rng).items()}
        (folder / f"{name}.safetensors").write_bytes(tensors.encode_tensors(weights))


if __name__ == "__main__":
    main()
