"""Make data/train.csv and data/test.csv: vibration of motors in some frequency bands, and their faults.

A motor can have several faults at once, or none.
"""

import csv
import random
from pathlib import Path

BANDS = ("hz_25", "hz_50", "hz_75", "hz_120", "hz_300", "hz_900")
FAULTS = {  # summands of the bands
    "unbalanced": (0.2, 2.0, 0.3, 0.1, 0.0, 0.0),
    "loose": (1.5, 0.5, 1.2, 0.2, 0.1, 0.0),
    "bearing": (0.0, 0.1, 0.1, 0.4, 1.6, 2.0),
}


def make_motor(rng: random.Random) -> list[object]:
    """Return one row: the bands, then 1 or 0 for each fault."""
    faults = [rng.random() < 0.35 for _ in FAULTS]
    bands = [rng.uniform(0.2, 0.6) for _ in BANDS]
    for fault, has_fault in zip(FAULTS.values(), faults, strict=True):
        strength = rng.uniform(0.5, 1.2) if has_fault else 0.0
        bands = [band + strength * added for band, added in zip(bands, fault, strict=True)]
    return [*(f"{band + rng.gauss(0, 0.1):.3f}" for band in bands), *map(int, faults)]


def main() -> None:
    """Write both files."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for split, count in (("train", 900), ("test", 300)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow([*BANDS, *FAULTS])
            table.writerows(make_motor(rng) for _ in range(count))


if __name__ == "__main__":
    main()
