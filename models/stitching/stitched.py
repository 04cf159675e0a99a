"""Blocks, the junctions between them, and what comes out of a stitched path. numpy only.

A path is a sequence of blocks of several donors (FedStitch, arXiv 2409.07202, section 3). Between two
that are not neighbours in one donor lies a junction: maps are resized to what the next block takes,
then projected, position by position, onto its channels (a 1x1 convolution with bias).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from fedquilt.core import ModelError, Tensors
from fedquilt.data import images

Run = Callable[["Block", np.ndarray], np.ndarray]  # a block on its input, float32


@dataclass(frozen=True)
class Block:
    """One piece of a donor: its ONNX graphs, and what it costs per example. Shapes are without batch.

    Graphs run stage by stage. Those of one stage take the same input, and their outputs lie side by side
    along axis 1: so a linear layer that is larger than a board's memory is there as tiles of its rows.
    """

    donor: str
    index: int
    kind: Literal["start", "middle", "end"]
    stages: tuple[tuple[str, ...], ...]  # of graphs: file names in the bundle
    data: tuple[str, ...]  # files of weights that the graphs call
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    flops: float
    weight_bytes: int
    resident_bytes: int  # weights of its largest graph
    activation_bytes: int
    int8: str | None = None  # a graph of 8-bit weights and maps, for output scores only; None: none was accepted

    @property
    def id(self) -> str:
        return f"{self.donor}.{self.index}"

    @property
    def files(self) -> tuple[str, ...]:
        """What running it takes, by name in the bundle."""
        return (*itertools.chain.from_iterable(self.stages), *self.data)

    @property
    def scored(self) -> Block:
        """The block as it runs to have its output scored: in 8 bits where that was accepted."""
        return self if self.int8 is None else replace(self, stages=((self.int8,),), data=())


@dataclass(frozen=True)
class Donor:
    """A pre-trained network as its blocks, in order; `align` lists its classes for each label, if known."""

    blocks: tuple[str, ...]
    classes: int
    align: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Stock:
    """What there is to stitch: the `meta` of a job bundle."""

    input: images.Input
    labels: tuple[str, ...]
    donors: dict[str, Donor]
    blocks: dict[str, Block]


def stock(meta: Mapping[str, Any]) -> Stock:
    """The stock in a bundle's meta.

    Raises:
        ModelError: it is no bundle of blocks, or its blocks contradict its donors.
    """
    try:
        known = {name: meta[name] for name in ("input", "labels", "donors", "blocks")}
        found = msgspec.convert(known, Stock)
    except (KeyError, msgspec.ValidationError) as error:
        raise ModelError(
            f"the bundle holds no donor blocks ({error}): give the job [[donors]] and prepare it"
        ) from None
    for name, donor in found.donors.items():
        kinds = [found.blocks[block].kind if block in found.blocks else None for block in donor.blocks]
        if kinds != ["start", *["middle"] * (len(kinds) - 2), "end"]:
            raise ModelError(
                f"donor {name!r}: its blocks are {kinds}, expected start, middle ..., end: prepare it anew"
            )
        if donor.align is not None and len(donor.align) != len(found.labels):
            raise ModelError(f"donor {name!r}: align names {len(donor.align)} labels, the job has {len(found.labels)}")
    return found


# -- which block may follow -----------------------------------------------------------------------


def continues(before: Block, after: Block) -> bool:
    """Whether `after` is the donor's own next block: no junction is needed."""
    return after.donor == before.donor and after.index == before.index + 1


def is_native(path: Sequence[Block]) -> bool:
    """Whether a path is the beginning of one donor, unchanged."""
    return path[0].index == 0 and all(continues(a, b) for a, b in itertools.pairwise(path))


def compatible(before: Block, after: Block, max_upsampling: float = 2.0) -> bool:
    """Whether maps can be taken from one block to the other: both 4D, and not enlarged by more than asked."""
    if after.kind == "start" or len(before.out_shape) != 3 or len(after.in_shape) != 3:
        return False
    return all(
        wanted <= max_upsampling * size for size, wanted in zip(before.out_shape[1:], after.in_shape[1:], strict=True)
    )


# -- junctions ------------------------------------------------------------------------------------


def junction_name(path: Sequence[str]) -> str:
    """The name of the junction in front of a path's last block: a path has one set of junctions."""
    return "junction." + hashlib.sha256("/".join(path).encode()).hexdigest()[:16]


def join(maps: np.ndarray, junction: Tensors | None, block: Block) -> np.ndarray:
    """Maps (n, c, h, w) as `block` takes them: resized and projected. None: they are its own.

    `junction` is {"weights": (c_out, c_in), "bias": (c_out,)}, float32. Both are linear and rows of a
    resize sum to one, so they may change places: the projection is done where there are fewer positions.
    """
    if junction is None:
        return maps
    height, width = block.in_shape[1:]
    if grows(maps.shape[1:], block.in_shape):
        return images.resize(_projected(maps, junction), height, width)
    return _projected(images.resize(maps, height, width), junction)


def grows(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether maps (c, h, w) are enlarged on the way."""
    return before[1] * before[2] < after[1] * after[2]


def _projected(maps: np.ndarray, junction: Tensors) -> np.ndarray:
    n, c, h, w = maps.shape
    made = np.matmul(junction["weights"], maps.reshape(n, c, h * w))
    made += junction["bias"][:, None]
    return made.reshape(n, -1, h, w)


def junctions(path: Sequence[Block], load: Callable[[str], Tensors]) -> list[Tensors | None]:
    """For each block of a path, the junction in front of it; `load` finds one by its name."""
    ids = [block.id for block in path]
    found: list[Tensors | None] = [None]
    for i in range(1, len(path)):
        found.append(None if continues(path[i - 1], path[i]) else load(junction_name(ids[: i + 1])))
    return found


def run_block(block: Block, run: Callable[[str, np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """A block on its input; `run` runs one graph by its file name."""
    for stage in block.stages:
        parts = [run(graph, x) for graph in stage]
        x = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return x


def forward(path: Sequence[Block], between: Sequence[Tensors | None], run: Run, x: np.ndarray) -> np.ndarray:
    """The output of a path's last block for prepared images x (n, channels, size, size)."""
    for block, junction in zip(path, between, strict=True):
        x = run(block, join(x, junction, block))
    return x


# -- labels ---------------------------------------------------------------------------------------


def gap(maps: np.ndarray) -> np.ndarray:
    """Global average pooling: (n, c, h, w) -> (n, c), float64; (n, d) stays."""
    return maps.mean(axis=(2, 3), dtype=np.float64) if maps.ndim == 4 else maps.astype(np.float64)


def align(logits: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """A donor's logits (n, classes) as scores of our labels (n, labels): logsumexp over each label's classes.

    A label without classes never wins.
    """
    scores = np.full((len(logits), len(groups)), -np.inf)
    for label, group in enumerate(groups):
        if group:
            part = logits[:, list(group)].astype(np.float64)
            top = part.max(axis=1)
            scores[:, label] = top + np.log(np.exp(part - top[:, None]).sum(axis=1))
    return scores


def random_features(width: int, wanted: int, seed: int) -> np.ndarray:
    """(width, wanted) Gaussian projection that keeps lengths on average: the same on every device."""
    draw = np.random.Generator(np.random.PCG64(seed)).standard_normal((width, wanted))
    return draw / np.sqrt(wanted)


def classify(
    path: Sequence[Block],
    between: Sequence[Tensors | None],
    run: Run,
    x: np.ndarray,
    *,
    head: Tensors | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> np.ndarray:
    """Scores (n, labels) of a finished network: a linear head on pooled maps, or aligned logits.

    Raises:
        ModelError: neither a head nor an alignment says what the outputs mean.
    """
    outputs = forward(path, between, run, x)
    if head is not None:
        return gap(outputs) @ head["weights"].T + head["bias"]
    if groups is not None:
        return align(outputs, groups)
    raise ModelError("a network with neither a head nor an alignment has no labels")
