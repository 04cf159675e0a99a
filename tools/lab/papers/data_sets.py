"""Data sets as users have them, for tables about the job that `fedquilt simulate DATA` writes.

A data set is a function (folder, seed) that writes a training and a test set, four fifths and a fifth of the examples
drawn by `seed`, and returns the source and the label for `simulate`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import JobError
from fedquilt.data.readers import arrays
from fedquilt.data.spec import SKLEARN, DataSpec
from fedquilt.formats import toml
from fedquilt.tools.lab import new_job

Source = tuple[str, str]  # source and label, as arguments of `simulate`
LABEL: Final = "target"
TEST_SHARE: Final = 0.2


def split_rows(count: int, seed: int) -> dict[str, np.ndarray]:
    rows, test_count = np.random.default_rng(seed).permutation(count), int(TEST_SHARE * count)
    return {"train": rows[test_count:], "test": rows[:test_count]}


def write_tables(folder: Path, seed: int, heads: Sequence[str], rows: Sequence[Iterable[Any]]) -> Source:
    for split, numbers in split_rows(len(rows), seed).items():
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(heads)
            writer.writerows(rows[number] for number in numbers)
    return str(folder), LABEL


def write_sklearn(name: str, folder: Path, seed: int) -> Source:
    x, y = arrays.load_sklearn_data(DataSpec(dataset=f"{SKLEARN}{name}"))
    heads = [*(f"feature {number}" for number in range(x.shape[1])), LABEL]
    return write_tables(folder, seed, heads, [[*inputs, label] for inputs, label in zip(x, y, strict=True)])


def write_customers(folder: Path, seed: int) -> Source:
    rng, count = np.random.default_rng(7), 900
    age, income = rng.integers(18, 80, count).astype(float), rng.lognormal(10, 0.5, count).round(2)
    city, plan = rng.choice(["Kiel", "Lyon", "Oslo", "Turin"], count), rng.choice(["basic", "plus", "pro"], count)
    system = rng.choice(["android", "ios"], count)
    score = 0.06 * (age - 48) + 1.5 * (plan == "pro") - 1.2 * (plan == "basic") + 0.8 * np.isin(city, ["Kiel", "Oslo"])
    label = np.where(score + 1.2 * (np.log(income) - 10) + rng.normal(0, 0.7, count) > 0.3, "stays", "leaves")
    columns = [column.astype(object) for column in (np.arange(1000, 1000 + count), age, income, city, plan, system)]
    for column in columns[1:4]:
        column[rng.random(count) < 0.08] = ""
    heads = ["customer_id", "age", "income", "city", "plan", "os", LABEL]
    return write_tables(folder, seed, heads, list(zip(*columns, label, strict=True)))


def write_images(folder: Path, seed: int) -> Source:
    from PIL import Image

    with np.load(new_job.find_digits()) as digits:
        x = np.concatenate([digits["x_train"], digits["x_test"]])
        y = np.concatenate([digits["y_train"], digits["y_test"]])
    rng = np.random.default_rng(0)
    for split, rows in split_rows(len(y), seed).items():
        for row in rows:
            file = folder / split / str(y[row]) / f"{row}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            width, height = (int(side) for side in rng.integers(20, 49, 2))
            Image.fromarray(x[row]).resize((width, height), Image.Resampling.BILINEAR).save(file)
    return str(folder), ""


def write_series(folder: Path, seed: int) -> Source:
    rng, count, times = np.random.default_rng(3), 900, np.arange(48)
    y = np.arange(count) % 3
    wave = np.sin(times * np.where(y == 1, 0.9, 0.4)[:, None] + rng.uniform(0, 2 * np.pi, (count, 1)))
    wave += 3 * ((y == 2)[:, None] & (rng.random((count, len(times))) < 0.1))
    x = (np.stack([wave, 0.5 * wave], axis=2) + rng.normal(0, 0.5, (count, len(times), 2))).astype(np.float32)
    splits = split_rows(count, seed).items()
    contents = {f"{name}_{split}": values[rows] for split, rows in splits for name, values in (("x", x), ("y", y))}
    np.savez(folder / "series.npz", **contents)
    return str(folder / "series.npz"), ""


DATA_SETS: Final[dict[str, Callable[[Path, int], Source]]] = {
    **{name: partial(write_sklearn, name) for name in ("iris", "wine", "breast_cancer", "digits", "diabetes")},
    "images": write_images,
    "customers": write_customers,
    "series": write_series,
}


def make_simulate_job(name: str, seed: int, out: Path) -> JobSettings:
    if name not in DATA_SETS:
        raise JobError(f"data set {name!r} is unknown{toml.describe_choices(name, DATA_SETS)}")
    folder = (out / "data" / f"{name}-{seed}").absolute()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    job = new_job.plan_simulation(folder / "job.toml", *DATA_SETS[name](folder / "data", seed))
    job.write(force=True)
    return settings.load_job(job.path)
