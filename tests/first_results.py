"""What `fedquilt simulate DATA` reaches with its defaults, compared with scikit-learn trained centrally with its own.

    python tests/first_results.py [--splits 3] [NAME ...]

Needs scikit-learn, which fedquilt does not. Each data set is divided into a training and a test set, written as a user
would have it, simulated by the command, and evaluated on the test set by `fedquilt model evaluate`. The bar is the
better of a linear model and a random forest; at least six data sets lie within 3 points of accuracy, or 0.05 of R², of
it. The exit code is 1 if fewer do.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.cli import main as fedquilt
from fedquilt.data import inputs

WITHIN: Final = {"accuracy": 0.03, "r2": 0.05}
LEAST: Final = 6  # data sets within it


class DataSet:
    """Examples of a data set, with a central baseline's view of them.

    Args:
        write: Writes the rows `train` and `test` into a folder, and returns the words after `simulate`.
        x: Inputs of the baseline (n, ...): numbers, or rows with words and None for missing values.
        y: Labels (n,).
    """

    def __init__(
        self, write: Callable[[Path, np.ndarray, np.ndarray], list[str]], x: np.ndarray, y: np.ndarray
    ) -> None:
        self.write, self.x, self.y = write, x, y

    @property
    def metric(self) -> str:
        return "r2" if self.y.dtype.kind == "f" else "accuracy"


def sklearn_table(name: str) -> DataSet:
    """A data set of scikit-learn as train.csv and test.csv, with its columns' names."""
    from sklearn import datasets

    held = getattr(datasets, f"load_{name}")()
    y = held.target if name == "diabetes" else np.array([str(held.target_names[each]) for each in held.target])
    return table([str(each) for each in held.feature_names], held.data.astype(object), y)


def table(head: Sequence[str], x: np.ndarray, y: np.ndarray) -> DataSet:
    def write(folder: Path, train: np.ndarray, test: np.ndarray) -> list[str]:
        for split, rows in (("train", train), ("test", test)):
            with (folder / f"{split}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow([*head, "target"])
                writer.writerows([*("" if each is None else each for each in x[row]), y[row]] for row in rows)
        return [str(folder), "--label", "target"]

    return DataSet(write, x, y)


def mixed_table() -> DataSet:
    """Customers: numbers of unlike scales, three columns of words, an id, and missing values."""
    rng = np.random.default_rng(7)
    n = 900
    age, income = rng.integers(18, 80, n).astype(float), rng.lognormal(10, 0.5, n).round(2)
    city, plan = rng.choice(["Kiel", "Lyon", "Oslo", "Turin"], n), rng.choice(["basic", "plus", "pro"], n)
    phone = rng.choice(["android", "ios"], n)
    score = 0.06 * (age - 48) + 1.5 * (plan == "pro") - 1.2 * (plan == "basic") + 0.8 * np.isin(city, ["Kiel", "Oslo"])
    y = np.where(score + 1.2 * (np.log(income) - 10) + rng.normal(0, 0.7, n) > 0.3, "stays", "leaves")
    x = np.stack([each.astype(object) for each in (np.arange(1000, 1000 + n), age, income, city, plan, phone)], axis=1)
    for column in (1, 2, 3):
        x[rng.random(n) < 0.08, column] = None
    return table(["customer_id", "age", "income", "city", "plan", "os"], x, y)


def mixed_images() -> DataSet:
    """Handwritten digits as PNG files of 20 to 48 pixels a side, in a folder for each class."""
    from PIL import Image
    from sklearn import datasets

    held = datasets.load_digits()
    x = np.rint(held.images * (255 / 16)).astype(np.uint8)

    def write(folder: Path, train: np.ndarray, test: np.ndarray) -> list[str]:
        rng = np.random.default_rng(0)
        for split, rows in (("train", train), ("test", test)):
            for row in rows:
                file = folder / split / str(held.target[row]) / f"{row}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                wide, high = (int(each) for each in rng.integers(20, 49, 2))
                Image.fromarray(x[row]).resize((wide, high), Image.Resampling.BILINEAR).save(file)
        return [str(folder)]

    return DataSet(write, inputs.resize_images(x, 20).reshape(len(x), -1), held.target)


def series() -> DataSet:
    """Noisy vibrations of two channels: slow, quick or with knocks, each with a phase of its own."""
    rng = np.random.default_rng(3)
    n, steps = 900, 48
    y, at = np.arange(n) % 3, np.arange(steps)
    phase = rng.uniform(0, 6.28, (n, 1))
    wave = np.sin(at * np.where(y == 1, 0.9, 0.4)[:, None] + phase)
    wave += np.where(y == 2, 1.0, 0.0)[:, None] * (rng.random((n, steps)) < 0.1) * 3
    x = (np.stack([wave, 0.5 * wave], axis=2) + rng.normal(0, 0.5, (n, steps, 2))).astype(np.float32)

    def write(folder: Path, train: np.ndarray, test: np.ndarray) -> list[str]:
        names = np.array(["slow", "quick", "knocks"])
        arrays = {"x_train": x[train], "y_train": names[y[train]], "x_test": x[test], "y_test": names[y[test]]}
        np.savez(folder / "data.npz", **arrays)
        return [str(folder / "data.npz")]

    return DataSet(write, x.reshape(n, -1), y)


SETS: Final[dict[str, Callable[[], DataSet]]] = {
    **{name: partial(sklearn_table, name) for name in ("iris", "wine", "breast_cancer", "digits", "diabetes")},
    "image folder": mixed_images,
    "words and gaps": mixed_table,
    "time series": series,
}


def score_baselines(given: DataSet, train: np.ndarray, test: np.ndarray) -> list[float]:
    """Return the scores of a linear model and a random forest, with their defaults, on scaled inputs."""
    from sklearn import compose, ensemble, impute, linear_model, pipeline, preprocessing

    words = [at for at in range(given.x.shape[1]) if any(isinstance(value, str) for value in given.x[:, at])]
    numbers = [at for at in range(given.x.shape[1]) if at not in words]
    fill = pipeline.make_pipeline(impute.SimpleImputer(strategy="median"), preprocessing.StandardScaler())
    inputs = compose.make_column_transformer(
        (fill, numbers), (preprocessing.OneHotEncoder(handle_unknown="ignore"), words)
    )
    x = given.x.copy()
    if x.dtype == object:
        x[:, numbers] = np.array([[np.nan if each is None else each for each in row] for row in x[:, numbers]], float)
        x[:, words] = np.array([["" if each is None else each for each in row] for row in x[:, words]], object)
    if given.metric == "r2":
        models: tuple[Any, ...] = (linear_model.LinearRegression(), ensemble.RandomForestRegressor(random_state=0))
    else:
        models = (linear_model.LogisticRegression(), ensemble.RandomForestClassifier(random_state=0))
    fitted = (pipeline.make_pipeline(inputs, model).fit(x[train], given.y[train]) for model in models)
    return [float(each.score(x[test], given.y[test])) for each in fitted]


def score_fedquilt(given: DataSet, train: np.ndarray, test: np.ndarray) -> float:
    """Return the score of the command on the test set."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        (Path(name) / "data").mkdir()
        run_quietly("simulate", *given.write(Path(name) / "data", train, test))
        (score,) = json.loads(run_quietly("model", "evaluate", "job", "--format", "json"))["scores"]
        return float(score["metrics"]["r2" if given.metric == "r2" else "accuracy"])


def run_quietly(*arguments: str) -> str:
    """Return the standard output of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = fedquilt(arguments)
    if code:
        raise SystemExit(f"fedquilt {' '.join(arguments)} ended with {code}: {err.getvalue()}")
    return out.getvalue()


def divide(given: DataSet, splits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random training and test rows, four fifths and a fifth."""
    for seed in range(splits):
        rows = np.random.default_rng(seed).permutation(len(given.y))
        yield rows[len(rows) // 5 :], rows[: len(rows) // 5]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--splits", type=int, default=3, help="random divisions of each data set, averaged (default: 3)"
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SETS)} (default: all)")
    told = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    reached = 0
    print(f"{'data set':15} {'metric':9} {'fedquilt':>8} {'linear':>8} {'forest':>8}   within")
    for name in told.names or SETS:
        given = SETS[name]()
        found = [
            [score_fedquilt(given, train, test), *score_baselines(given, train, test)]
            for train, test in divide(given, told.splits)
        ]
        ours, *theirs = np.mean(found, axis=0)
        within = ours >= max(theirs) - WITHIN[given.metric]
        reached += within
        print(f"{name:15} {given.metric:9} {ours:8.3f} {theirs[0]:8.3f} {theirs[1]:8.3f}   {'yes' if within else 'no'}")
        sys.stdout.flush()
    return int(reached < min(LEAST, len(told.names or SETS)))


if __name__ == "__main__":
    raise SystemExit(main())
