"""Make data/train.csv and data/test.csv: what the accelerometers of six people say while they rest, walk and run.

A row is one reading of 10 a second: user, three axes in g, and what the person did. In train.csv everyone's readings
stand together; test.csv is of two people more.
"""

import csv
import math
import random
from pathlib import Path

RATE = 10  # readings a second
ACTIVITIES = {"rest": (0.0, 0.02), "walk": (1.8, 0.25), "run": (2.8, 0.8)}  # steps a second, swing in g


def readings(
    user: str, draw: random.Random, activities: dict[str, tuple[float, float]] = ACTIVITIES
) -> list[list[object]]:
    """40 seconds of each activity, at this person's own pace and with the board worn at an angle of their own."""
    pace, tilt = draw.uniform(0.85, 1.15), draw.uniform(-0.3, 0.3)
    rows: list[list[object]] = []
    for activity in draw.sample(sorted(activities), len(activities)):
        steps, swing = activities[activity]
        for reading in range(40 * RATE):
            turn = 2 * math.pi * steps * pace * reading / RATE
            x = math.sin(tilt) + 0.5 * swing * math.sin(turn) + draw.gauss(0, 0.05)
            y = 0.3 * swing * math.sin(2 * turn) + draw.gauss(0, 0.05)
            z = math.cos(tilt) + swing * math.cos(turn) + draw.gauss(0, 0.05)
            rows.append([user, f"{x:.3f}", f"{y:.3f}", f"{z:.3f}", activity])
    return rows


def main() -> None:
    """Write both files."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    for split, users in (("train", range(6)), ("test", range(6, 8))):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(["user", "x", "y", "z", "activity"])
            for user in users:
                table.writerows(readings(f"person-{user}", draw))


if __name__ == "__main__":
    main()
