"""Make data/train.csv and data/test.csv: pumps, what is known of them, and whether they failed within a month.

Some temperatures are missing, as they are in real tables; the material is a word.
"""

import csv
import random
from pathlib import Path

MATERIALS = {"steel": 0.0, "bronze": 0.8, "plastic": 2.0}  # what each adds to the risk


def pump(draw: random.Random) -> list[object]:
    """One row. Old, hot and plastic pumps fail; so do those that shake."""
    age, load = draw.uniform(0, 15), draw.uniform(0.2, 1.0)
    material = draw.choice(sorted(MATERIALS))
    temperature = 40 + 30 * load + draw.gauss(0, 4)
    shaking = draw.expovariate(1.0)
    risk = 0.3 * age + 0.1 * (temperature - 60) + MATERIALS[material] + 1.2 * shaking - 4.5
    failed = risk + draw.gauss(0, 0.5) > 0
    known = "" if draw.random() < 0.05 else f"{temperature:.1f}"
    return [f"{age:.1f}", f"{load:.2f}", known, f"{shaking:.2f}", material, int(failed)]


def main() -> None:
    """Write both files."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    for split, count in (("train", 900), ("test", 300)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(["age_years", "load", "temperature_c", "shaking_mm_s", "material", "failed"])
            table.writerows(pump(draw) for _ in range(count))


if __name__ == "__main__":
    main()
