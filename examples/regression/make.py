"""Make data/train.csv and data/test.csv: the weather at houses, and the power in kW that their heat pumps draw."""

import csv
import math
import random
from pathlib import Path


def hour(draw: random.Random) -> list[object]:
    """One row. The power grows with the cold and the wind, less so in the sun."""
    outside, wind, sun = draw.uniform(-10, 20), draw.expovariate(0.2), max(0.0, draw.gauss(0.3, 0.3))
    clock = draw.randrange(24)
    warm = 21 if 6 <= clock < 22 else 18
    power = max(0.0, 0.12 * (warm - outside) * (1 + 0.02 * wind) - 0.8 * sun) + draw.gauss(0, 0.15)
    turn = 2 * math.pi * clock / 24
    return [
        f"{outside:.1f}",
        f"{wind:.1f}",
        f"{sun:.2f}",
        f"{math.sin(turn):.3f}",
        f"{math.cos(turn):.3f}",
        f"{power:.3f}",
    ]


def main() -> None:
    """Write both files; each house's hours are together."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    for split, count in (("train", 900), ("test", 300)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(["house", "outside_c", "wind_m_s", "sun", "clock_sin", "clock_cos", "power_kw"])
            table.writerows([f"house-{row * 3 // count}", *hour(draw)] for row in range(count))


if __name__ == "__main__":
    main()
