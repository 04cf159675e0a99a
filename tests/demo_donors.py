"""Train the donors of the demo on MNIST, and make its digits.

Usage: `python -m tests.demo_donors --data FOLDER --out FOLDER`. Needs torch, a minute, and
the four `*-ubyte` files of MNIST (fetched by torchvision.datasets.MNIST). On one machine the result is bit-identical:
one thread, fixed seeds, deterministic algorithms.

Each donor is trained on one of VIEWS of the images only, so that the donors know different things. None of them sees
the digits of the demo, a third of which has each view.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.core import DataError, derive_seed
from fedquilt.data.examples import load_split
from fedquilt.data.spec import DataSpec
from fedquilt.models.networks import registry
from fedquilt.tools.artefacts.prepare import prepare_bundle

DEMO = Path(__file__).resolve().parents[1] / "tools" / "lab" / "demo" / "job.toml"
EPOCHS = 5
IMAGES = 12000  # of MNIST that a donor is trained on, at most
BATCH = 128
LEARNING_RATE = 0.1  # of SGD with momentum, falling to 0 along a cosine
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4

VIEWS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {  # donor -> its view of bright images (n, ..., h, w)
    "upright": lambda x: x,
    "turned": lambda x: torch.rot90(x, 1, (-2, -1)),
    "negative": lambda x: x.max() - x,
}


def make_digits(source: Path) -> dict[str, np.ndarray]:
    """Return arrays of digits of which every third has the same view."""
    with np.load(source) as file:
        digits = dict(file)
    for name in ("x_train", "x_test"):
        for first, view in enumerate(VIEWS.values()):
            digits[name][first::3] = view(torch.from_numpy(digits[name][first::3])).numpy()
    return digits


def shift_images(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return the images, each shifted by up to 3 pixels in either direction."""
    theta = torch.zeros(len(x), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1
    theta[:, :, 2] = 3 / 14 * (2 * torch.rand(len(x), 2, generator=draw) - 1)
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


def reduce_resolution(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Resample every second image through 9 to 27 pixels, as a camera of lower resolution would."""
    size = int(torch.randint(9, 28, (), generator=draw))
    small = F.interpolate(x[::2], size=(size, size), mode="area")
    mixed = x.clone()
    mixed[::2] = F.interpolate(small, size=x.shape[2:], mode="bilinear")
    return mixed


def train_donors(data: Path, out: Path, say: Callable[[str], None] = print) -> dict[str, float]:
    job = settings.load_job(DEMO)
    train, test = _load_mnist(data, "train"), _load_mnist(data, "test")
    accuracies = {}
    tables = []
    for donor in job.donors:
        name = donor["name"]
        with _deterministic_single_thread():
            model = _train_donor(
                donor["network"], train[0][:IMAGES], train[1][:IMAGES], VIEWS[name], derive_seed("donor", name), say
            )
        with torch.no_grad():
            accuracies[name] = float((model(VIEWS[name](test[0])).argmax(1) == test[1]).float().mean())
        say(f"{name}: {accuracies[name]:.2%} of MNIST's test images")
        weights = out / "weights" / f"{name}.safetensors"
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_bytes(tensors.encode_tensors({key: value.numpy() for key, value in model.state_dict().items()}))
        tables.append({**donor, "weights": str(weights)})
    np.savez_compressed(out / "views.npz", **make_digits(DEMO.parent / "digits.npz"))  # type: ignore[arg-type]
    prepare_bundle({"input": job.input, "labels": job.labels, "donors": tables}, out / "bundle", say)
    return accuracies


@contextmanager
def _deterministic_single_thread() -> Iterator[None]:
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def _train_donor(
    network: Mapping[str, Any],
    x: torch.Tensor,
    y: torch.Tensor,
    view: Callable[[torch.Tensor], torch.Tensor],
    seed: int,
    say: Callable[[str], None],
) -> torch.nn.Module:
    draw = torch.Generator().manual_seed(seed)
    model = registry.load_network(network, seed=seed).train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    steps = EPOCHS * (len(y) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(y), generator=draw)
        total = 0.0
        for first in range(0, len(y) - BATCH + 1, BATCH):
            rows = order[first : first + BATCH]
            loss = F.cross_entropy(model(view(reduce_resolution(shift_images(x[rows], draw), draw))), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        say(f"{network['name']}: epoch {epoch + 1} of {EPOCHS}, loss {total / (len(y) // BATCH):.3f}")
    return model.eval()


def _load_mnist(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = load_split(DataSpec(path=str(folder), split=split))
    if found.x.shape[1:] != (28, 28):
        raise DataError(f"{folder} holds images of shape {found.x.shape[1:]}, MNIST's are 28 x 28")
    return torch.from_numpy(found.x[:, None].astype(np.float32) / 255), torch.from_numpy(found.y)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--data", type=Path, required=True, help="folder of MNIST's *-ubyte files, or of its raw/")
    arguments.add_argument("--out", type=Path, required=True, help="folder for the weights, the bundle and the digits")
    given = arguments.parse_args()
    train_donors(given.data, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
