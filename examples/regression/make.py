"""Make data/train.csv and data/test.csv: weather at houses, and the power of their heat pumps in kW."""

import csv
import math
import random
from pathlib import Path


def make_hour(rng: random.Random) -> list[object]:
    """Return one row. The power increases with cold and wind, and decreases with sun."""
    outside_c, wind, sun = rng.uniform(-10, 20), rng.expovariate(0.2), max(0.0, rng.gauss(0.3, 0.3))
    hour_of_day = rng.randrange(24)
    target_c = 21 if 6 <= hour_of_day < 22 else 18
    power = max(0.0, 0.12 * (target_c - outside_c) * (1 + 0.02 * wind) - 0.8 * sun) + rng.gauss(0, 0.15)
    angle = 2 * math.pi * hour_of_day / 24
    return [
        f"{outside_c:.1f}",
        f"{wind:.1f}",
        f"{sun:.2f}",
        f"{math.sin(angle):.3f}",
        f"{math.cos(angle):.3f}",
        f"{power:.3f}",
    ]


def main() -> None:
    """Write both files, sorted by house."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for split, count in (("train", 900), ("test", 300)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["house", "outside_c", "wind_m_s", "sun", "clock_sin", "clock_cos", "power_kw"])
            table.writerows([f"house-{row * 3 // count}", *make_hour(rng)] for row in range(count))


if __name__ == "__main__":
    main()
