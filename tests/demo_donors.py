"""Train the donors of the demo on MNIST.

Usage: `python -m tests.demo_donors --data FOLDER --out FOLDER`. Needs torch, some minutes, and
the four `*-ubyte` files of MNIST (fetched by torchvision.datasets.MNIST). On one machine the result is bit-identical:
one thread, fixed seeds, deterministic algorithms.

Each donor is trained on a few digits only (those that `align` in the job names) and through its own one of
AUGMENTATIONS, so that the donors know different things. None of them sees the digits of the demo.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
EPOCHS = 2
IMAGES = 6000  # of MNIST that a donor is trained on, at most
BATCH = 128
LEARNING_RATE = 0.1  # of SGD with momentum, falling to 0 along a cosine
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4

Augmentation = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def shift_images(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return the images, each shifted by up to 3 pixels in either direction."""
    return _scale_and_shift_randomly(x, scale=(1.0, 1.0), shift=3 / 14, draw=draw)


def enlarge_images(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return the images, each enlarged by 1 to 1.4 and shifted by up to one pixel."""
    return _scale_and_shift_randomly(x, scale=(1.0, 1.4), shift=1 / 14, draw=draw)


def reduce_resolution(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Resample every second image through 9 to 27 pixels, as a camera of lower resolution would."""
    size = int(torch.randint(9, 28, (), generator=draw))
    small = F.interpolate(x[::2], size=(size, size), mode="area")
    mixed = x.clone()
    mixed[::2] = F.interpolate(small, size=x.shape[2:], mode="bilinear")
    return mixed


AUGMENTATIONS: Mapping[str, Augmentation] = {
    "plain": shift_images,
    "residual": enlarge_images,
    "separable": reduce_resolution,
}


def train_donors(data: Path, out: Path, say: Callable[[str], None] = print) -> dict[str, float]:
    job = settings.load_job(DEMO)
    train, test = _load_mnist(data, "train"), _load_mnist(data, "test")
    accuracies = {}
    tables = []
    for donor in job.donors:
        name = donor["name"]
        x, y = _select_digits(*train, donor["align"])
        x_test, y_test = _select_digits(*test, donor["align"])
        with _deterministic_single_thread():
            model = _train_donor(
                donor["network"], x[:IMAGES], y[:IMAGES], AUGMENTATIONS[name], derive_seed("donor", name), say
            )
        with torch.no_grad():
            accuracies[name] = float((model(x_test).argmax(1) == y_test).float().mean())
        say(f"{name}: {accuracies[name]:.2%} of MNIST's test images of its digits")
        weights = out / "weights" / f"{name}.safetensors"
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_bytes(tensors.encode_tensors({key: value.numpy() for key, value in model.state_dict().items()}))
        tables.append({**donor, "weights": str(weights)})
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
    augment: Augmentation,
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
            loss = F.cross_entropy(model(augment(x[rows], draw)), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        say(f"{network['name']}: epoch {epoch + 1} of {EPOCHS}, loss {total / (len(y) // BATCH):.3f}")
    return model.eval()


def _scale_and_shift_randomly(
    x: torch.Tensor, scale: tuple[float, float], shift: float, draw: torch.Generator
) -> torch.Tensor:
    n = len(x)
    factor = scale[0] + (scale[1] - scale[0]) * torch.rand(n, generator=draw)
    move = shift * (2 * torch.rand(n, 2, generator=draw) - 1)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / factor
    theta[:, :, 2] = move
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _select_digits(
    x: torch.Tensor, y: torch.Tensor, align: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    classes = torch.tensor([own[0] if own else -1 for own in align])[y]
    return x[classes >= 0], classes[classes >= 0]


def _load_mnist(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = load_split(DataSpec(path=str(folder), split=split))
    if found.x.shape[1:] != (28, 28):
        raise DataError(f"{folder} holds images of shape {found.x.shape[1:]}, MNIST's are 28 x 28")
    return torch.from_numpy(found.x[:, None].astype(np.float32) / 255), torch.from_numpy(found.y)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--data", type=Path, required=True, help="folder of MNIST's *-ubyte files, or of its raw/")
    arguments.add_argument("--out", type=Path, required=True, help="folder for the weights and the bundle")
    given = arguments.parse_args()
    train_donors(given.data, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
