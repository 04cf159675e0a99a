"""Make data/train.csv and data/test.csv: how strongly a motor shakes at some frequencies, and which faults it has.

A motor may have several faults at once, or none.
"""

import csv
import random
from pathlib import Path

BANDS = ("hz_25", "hz_50", "hz_75", "hz_120", "hz_300", "hz_900")
FAULTS = {  # what each adds to the bands
    "unbalanced": (0.2, 2.0, 0.3, 0.1, 0.0, 0.0),
    "loose": (1.5, 0.5, 1.2, 0.2, 0.1, 0.0),
    "bearing": (0.0, 0.1, 0.1, 0.4, 1.6, 2.0),
}


def motor(draw: random.Random) -> list[object]:
    """One row: the bands, then 1 for each fault that the motor has."""
    has = [draw.random() < 0.35 for _ in FAULTS]
    bands = [draw.uniform(0.2, 0.6) for _ in BANDS]
    for fault, present in zip(FAULTS.values(), has, strict=True):
        strength = draw.uniform(0.5, 1.2) if present else 0.0
        bands = [band + strength * more for band, more in zip(bands, fault, strict=True)]
    return [*(f"{band + draw.gauss(0, 0.1):.3f}" for band in bands), *map(int, has)]


def main() -> None:
    """Write both files."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    for split, count in (("train", 900), ("test", 300)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow([*BANDS, *FAULTS])
            table.writerows(motor(draw) for _ in range(count))


if __name__ == "__main__":
    main()
