"""What the tables share: where data and weights lie in a folder, and runs with several seeds beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt import tensors
from fedquilt.core import DataError, Examples, Fit, JobError, Tensors
from fedquilt.edge_agent import data as shares
from fedquilt.tools import processes


def require(table: str, tables: Iterable[str]) -> None:
    """Raises JobError: there is no such table."""
    if table not in tables:
        raise JobError(f"table {table!r} is unknown; there are: {', '.join(tables)}")


def mnist(table: str, data: Path | None) -> str:
    """The folder of MNIST's files: `data` itself, or where torchvision puts them below it.

    Raises:
        DataError: no folder is given, or one without these files.
    """
    if data is None:
        raise DataError(f"{table} needs --data: a folder with MNIST's files")
    nested = data / "MNIST" / "raw"
    place = nested if nested.is_dir() else data
    if not any(place.glob("*images?idx3-ubyte*")):
        raise DataError(
            f"{table}: there is no MNIST in {place}: train-images-idx3-ubyte, t10k-images-idx3-ubyte and their labels, "
            "or the same with .gz, are wanted there or in MNIST/raw below it"
        )
    return str(place)


def cifar(data: Path) -> dict[str, Any]:
    """Where CIFAR-10 lies, as keys of a [data] table: a cifar10*.npz, or as torchvision puts it.

    Raises:
        DataError: it is not there.
    """
    files = sorted(data.glob("cifar10*.npz"))
    if not files and not (data / "cifar-10-batches-py").is_dir():
        raise DataError(f"there is no CIFAR-10 in {data}: cifar10.npz, or torchvision's folder cifar-10-batches-py")
    return {"path": str(files[0])} if files else {"path": str(data), "dataset": "CIFAR10"}


def weights(data: Path, architecture: str) -> Path:
    """The file of one of torchvision's networks' ImageNet weights.

    Raises:
        DataError: it is not there.
    """
    files = sorted((data / "weights").glob(f"{architecture}*.pt*"))
    if not files:
        raise DataError(f"no {architecture}*.pt in {data / 'weights'}: put torchvision's weights there")
    return files[0]


def on_first_digits(network: Mapping[str, Any], data: str, seed: int, engine: Any, fit: Fit, examples: int) -> Tensors:
    """A network's weights after training on the digits 0 to 4.

    Args:
        examples: of all digits, of which about half are used.
    """
    from fedquilt.models import zoo  # torch

    every = shares.load_all(shares.DataSpec(path=data, limit=examples, seed=seed))
    rows = every.y < 5
    drawn = {key: value for key, value in network.items() if key != "input"}
    start = {name: value.numpy() for name, value in zoo.load(drawn, seed=seed).state_dict().items()}
    some = Examples(every.x[rows], every.y[rows])
    model: Tensors = engine.train(network, start, some, fit, tensors.rng(seed))[0]
    return model


def by_seed(
    play: Callable[..., dict[str, Any]],
    data: str,
    seeds: Sequence[int],
    rounds: int,
    told: Callable[[dict[str, Any]], Sequence[str]],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """`play(data, seed, rounds)` of every seed, in their order; what is `told` of each is said as it is finished."""
    found: dict[int, dict[str, Any]] = {}
    for index, run in processes.spread(play, [(data, seed, rounds) for seed in seeds]):
        found[index] = run
        for line in told(run):
            say(line)
    return [found[index] for index in range(len(seeds))]
