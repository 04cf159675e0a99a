"""Make data/train.csv, data/test.csv and donors/*.safetensors: two networks trained elsewhere, to stitch from.

The data are accelerometer readings of a board on the wrist, 10 a second: user, three axes in g, and what the person
did. The donors have never seen a wrist: each was trained on readings of phones in pockets, on other activities.
"""

import csv
import math
import random
from pathlib import Path

import torch

from fedquilt import tensors
from fedquilt.models.networks import registry

RATE = 10  # readings a second
STEPS = 20  # of a window, two seconds
WRIST = {"rest": (0.0, 0.02), "walk": (1.8, 0.25), "run": (2.8, 0.8)}  # steps a second, swing in g
POCKETS = {"sit": (0.0, 0.03), "stairs": (1.4, 0.4), "stroll": (1.1, 0.2), "jog": (2.5, 0.6), "cycle": (0.7, 0.3)}
DONORS = {"wide": {"width": 16, "kernel": 5}, "long": {"width": 12, "kernel": 9}}
EPOCHS = 30


def readings(activities: dict[str, tuple[float, float]], draw: random.Random) -> list[tuple[str, list[float]]]:
    """40 seconds of each activity, at one person's own pace and with the board worn at an angle of their own."""
    pace, tilt = draw.uniform(0.85, 1.15), draw.uniform(-0.3, 0.3)
    rows = []
    for activity in draw.sample(sorted(activities), len(activities)):
        steps, swing = activities[activity]
        for reading in range(40 * RATE):
            turn = 2 * math.pi * steps * pace * reading / RATE
            x = math.sin(tilt) + 0.5 * swing * math.sin(turn) + draw.gauss(0, 0.05)
            y = 0.3 * swing * math.sin(2 * turn) + draw.gauss(0, 0.05)
            z = math.cos(tilt) + swing * math.cos(turn) + draw.gauss(0, 0.05)
            rows.append((activity, [x, y, z]))
    return rows


def table(path: Path, people: range, draw: random.Random) -> None:
    """A CSV file of what some people do."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        lines = csv.writer(stream, lineterminator="\n")
        lines.writerow(["user", "x", "y", "z", "activity"])
        for person in people:
            for activity, axes in readings(WRIST, draw):
                lines.writerow([f"person-{person}", *(f"{value:.3f}" for value in axes), activity])


def donor(network: dict[str, object], draw: random.Random) -> dict[str, torch.Tensor]:
    """A network trained on eight phones in pockets."""
    classes, windows, labels = sorted(POCKETS), [], []
    for _ in range(8):
        rows = readings(POCKETS, draw)
        for first in range(0, len(rows) - STEPS + 1, STEPS):
            activities = {activity for activity, _ in rows[first : first + STEPS]}
            if len(activities) == 1:
                windows.append([axes for _, axes in rows[first : first + STEPS]])
                labels.append(classes.index(activities.pop()))
    x, y = torch.tensor(windows), torch.tensor(labels)
    x = (x - x.mean(dim=(0, 1))) / x.std(dim=(0, 1))
    torch.manual_seed(0)
    model = registry.build(network)
    steps = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(EPOCHS):
        for some in torch.randperm(len(x)).split(32):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            steps.step()
    return model.state_dict()


def main() -> None:
    """Write the data and the donors."""
    folder, draw = Path(__file__).parent, random.Random(0)
    for name in ("data", "donors"):
        (folder / name).mkdir(exist_ok=True)
    table(folder / "data" / "train.csv", range(6), draw)
    table(folder / "data" / "test.csv", range(6, 8), draw)
    for name, settings in DONORS.items():
        network = {"name": "conv1d", "channels": 3, "steps": STEPS, "classes": len(POCKETS), **settings}
        weights = {key: value.numpy() for key, value in donor(network, draw).items()}
        (folder / "donors" / f"{name}.safetensors").write_bytes(tensors.encode(weights))


if __name__ == "__main__":
    main()
