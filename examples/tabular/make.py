"""Make data/train.csv and data/test.csv: properties of pumps, and whether they failed within a month.

Some temperatures are missing, as in real tables. The material is a word.
"""

import csv
import random
from pathlib import Path

MATERIALS = {"steel": 0.0, "bronze": 0.8, "plastic": 2.0}  # summands of the risk


def make_pump(rng: random.Random) -> list[object]:
    """Return one row. Old, hot, plastic and shaking pumps are more likely to fail."""
    age, load = rng.uniform(0, 15), rng.uniform(0.2, 1.0)
    material = rng.choice(sorted(MATERIALS))
    temperature = 40 + 30 * load + rng.gauss(0, 4)
    shaking = rng.expovariate(1.0)
    risk = 0.3 * age + 0.1 * (temperature - 60) + MATERIALS[material] + 1.2 * shaking - 4.5
    failed = risk + rng.gauss(0, 0.5) > 0
    temperature_text = "" if rng.random() < 0.05 else f"{temperature:.1f}"
    return [f"{age:.1f}", f"{load:.2f}", temperature_text, f"{shaking:.2f}", material, int(failed)]


def main() -> None:
    """Write both files."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for split, count in (("train", 900), ("test", 300)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["age_years", "load", "temperature_c", "shaking_mm_s", "material", "failed"])
            table.writerows(make_pump(rng) for _ in range(count))


if __name__ == "__main__":
    main()
