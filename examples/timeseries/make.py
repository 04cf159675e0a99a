"""Make data/train.csv and data/test.csv: accelerometer readings of people who rest, walk and run.

There are 10 rows per second: user, three axes in g, and activity. train.csv is of six people, sorted by person, and
test.csv of two others.
"""

import csv
import math
import random
from pathlib import Path

RATE = 10  # readings per second
ACTIVITIES = {"rest": (0.0, 0.02), "walk": (1.8, 0.25), "run": (2.8, 0.8)}  # steps per second, swing in g


def make_readings(
    user: str, rng: random.Random, activities: dict[str, tuple[float, float]] = ACTIVITIES
) -> list[list[object]]:
    """Return rows of 40 seconds of each activity, with a random pace and tilt of the board for this person."""
    pace, tilt = rng.uniform(0.85, 1.15), rng.uniform(-0.3, 0.3)
    rows: list[list[object]] = []
    for activity in rng.sample(sorted(activities), len(activities)):
        steps_per_s, swing = activities[activity]
        for reading in range(40 * RATE):
            angle = 2 * math.pi * steps_per_s * pace * reading / RATE
            x = math.sin(tilt) + 0.5 * swing * math.sin(angle) + rng.gauss(0, 0.05)
            y = 0.3 * swing * math.sin(2 * angle) + rng.gauss(0, 0.05)
            z = math.cos(tilt) + swing * math.cos(angle) + rng.gauss(0, 0.05)
            rows.append([user, f"{x:.3f}", f"{y:.3f}", f"{z:.3f}", activity])
    return rows


def main() -> None:
    """Write both files."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for split, users in (("train", range(6)), ("test", range(6, 8))):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["user", "x", "y", "z", "activity"])
            for user in users:
                table.writerows(make_readings(f"person-{user}", rng))


if __name__ == "__main__":
    main()
