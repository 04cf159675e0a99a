"""Blocks, junctions between them, and the outputs of stitched paths. numpy only.

A path is a sequence of blocks of several donors (FedStitch, arXiv 2409.07202, section 3). A junction connects two
blocks that are not neighbours in one donor: maps are resized for the next block, and projected onto its channels
position by position (a 1x1 convolution with bias). Maps of images are (c, h, w), maps of time series (c, l).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from fedquilt.core import ModelError, Tensors
from fedquilt.data import images, inputs

Run = Callable[["Block", np.ndarray], np.ndarray]  # a block on its input, float32


@dataclass(frozen=True)
class Block:
    """One piece of a donor: its ONNX graphs and its costs per example. Shapes are without batch.

    Graphs run stage by stage. The graphs of one stage take the same input, and their outputs are concatenated along
    axis 1: a linear layer larger than a board's memory is stored as tiles of its rows.
    """

    donor: str
    index: int
    kind: Literal["start", "middle", "end"]
    stages: tuple[tuple[str, ...], ...]  # file names of graphs in the bundle
    data: tuple[str, ...]  # files of the graphs' external weights
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    flops: float
    weight_bytes: int
    resident_bytes: int  # weights of its largest graph
    activation_bytes: int
    int8: str | None = None  # a graph of 8-bit weights and maps, for output scores only; None: none was accepted

    @property
    def id(self) -> str:
        """Name of the block in paths and bundles, "donor.index"."""
        return f"{self.donor}.{self.index}"

    @property
    def files(self) -> tuple[str, ...]:
        """Names in the bundle of all files needed to run the block."""
        return (*itertools.chain.from_iterable(self.stages), *self.data)

    @property
    def scored(self) -> Block:
        """The block as it runs for its output score: in 8 bits where that was accepted."""
        return self if self.int8 is None else replace(self, stages=((self.int8,),), data=())


@dataclass(frozen=True)
class Donor:
    """A pre-trained network as its blocks, in order; `align` lists its classes for each label, if known."""

    blocks: tuple[str, ...]
    classes: int
    align: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Stock:
    """Donors and blocks to stitch from: the `meta` of a job bundle."""

    input: inputs.Table
    labels: tuple[str, ...]
    donors: dict[str, Donor]
    blocks: dict[str, Block]


def stock(meta: Mapping[str, Any]) -> Stock:
    """Read the stock from a bundle's meta.

    Raises:
        ModelError: the bundle holds no donor blocks, or its blocks contradict its donors.
    """
    try:
        known = {name: meta[name] for name in ("input", "labels", "donors", "blocks")}
        found = msgspec.convert(known, Stock)
        msgspec.convert(found.input, images.Input if "channels" in found.input else inputs.Values)
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
    """Whether `after` is the donor's own next block, so that no junction is needed."""
    return after.donor == before.donor and after.index == before.index + 1


def is_native(path: Sequence[Block]) -> bool:
    """Whether a path is the beginning of one donor, unchanged."""
    return path[0].index == 0 and all(continues(a, b) for a, b in itertools.pairwise(path))


def compatible(before: Block, after: Block, max_upsampling: float = 2.0) -> bool:
    """Whether a junction can connect two blocks: maps with as many axes, enlarged by `max_upsampling` at most."""
    if after.kind == "start" or len(before.out_shape) != len(after.in_shape) or len(after.in_shape) < 2:
        return False
    return all(
        wanted <= max_upsampling * size for size, wanted in zip(before.out_shape[1:], after.in_shape[1:], strict=True)
    )


# -- junctions ------------------------------------------------------------------------------------


def junction_name(path: Sequence[str]) -> str:
    """Name of the junction in front of a path's last block; it depends on the whole path."""
    return "junction." + hashlib.sha256("/".join(path).encode()).hexdigest()[:16]


def join(maps: np.ndarray, junction: Tensors | None, block: Block) -> np.ndarray:
    """Resize and project maps (n, c, h, w) or (n, c, l) for `block`; without a junction they are returned as they are.

    `junction` is {"weights": (c_out, c_in), "bias": (c_out,)}, float32. Resizing and projecting commute, since both are
    linear and the rows of a resize sum to one: the projection runs where there are fewer positions.
    """
    if junction is None:
        return maps
    sizes = block.in_shape[1:]
    if grows(maps.shape[1:], block.in_shape):
        return images.resize(_projected(maps, junction), *sizes)
    return _projected(images.resize(maps, *sizes), junction)


def grows(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a junction enlarges maps (c, h, w) or (c, l)."""
    return math.prod(before[1:]) < math.prod(after[1:])


def _projected(maps: np.ndarray, junction: Tensors) -> np.ndarray:
    n, c, *sizes = maps.shape
    made = np.matmul(junction["weights"], maps.reshape(n, c, math.prod(sizes)))
    made += junction["bias"][:, None]
    return made.reshape(n, -1, *sizes)


def junctions(path: Sequence[Block], load: Callable[[str], Tensors]) -> list[Tensors | None]:
    """The junction in front of each block of a path, None where none is needed; `load` finds one by its name."""
    ids = [block.id for block in path]
    found: list[Tensors | None] = [None]
    for i in range(1, len(path)):
        found.append(None if continues(path[i - 1], path[i]) else load(junction_name(ids[: i + 1])))
    return found


def run_block(block: Block, run: Callable[[str, np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Run a block; `run` runs one graph by its file name."""
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
    """Global average pooling: (n, c, h, w) or (n, c, l) -> (n, c), float64; (n, d) stays."""
    return maps.mean(axis=tuple(range(2, maps.ndim)), dtype=np.float64) if maps.ndim > 2 else maps.astype(np.float64)


def align(logits: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Turn a donor's logits (n, classes) into scores (n, labels): logsumexp over each label's classes.

    A label without classes scores -inf, so that it never wins.
    """
    scores = np.full((len(logits), len(groups)), -np.inf)
    for label, group in enumerate(groups):
        if group:
            part = logits[:, list(group)].astype(np.float64)
            top = part.max(axis=1)
            scores[:, label] = top + np.log(np.exp(part - top[:, None]).sum(axis=1))
    return scores


def random_features(width: int, wanted: int, seed: int) -> np.ndarray:
    """Gaussian projection (width, wanted) that preserves lengths on average; a function of the arguments."""
    draw = np.random.Generator(np.random.PCG64(seed)).standard_normal((width, wanted))
    return draw / np.sqrt(wanted)


# -- finished networks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A finished network: paths side by side, and a head or an alignment that turns their ends into label scores.

    Each path ends in a tap. Blocks of a common beginning of paths run once. A network without branches has one tap.

    Attributes:
        taps: block ids of each path, in the order of the head's columns.
        junctions: by `junction_name`; each {"weights": (c_out, c_in), "bias": (c_out,)}. Neighbours in one donor have
            none.
        head: {"weights": (labels, d), "bias": (labels,)} on the taps' pooled maps side by side, d channels in all. With
            {"hidden": (m, d)} the maps are first multiplied by it and passed through a ReLU, and weights are
            (labels, m). None: the only tap is a donor's own classifier, and `align` maps its classes to labels.
        align: the classes of each label; None: `head` is given.
    """

    taps: tuple[tuple[str, ...], ...]
    junctions: Mapping[str, Tensors]
    head: Tensors | None = None
    align: tuple[tuple[int, ...], ...] | None = None


def to_artefact(network: Network, stock: Stock) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Convert a network to an artefact's meta (JSON) and tensors; `from_artefact` is the inverse.

    Junctions that no tap passes are left out. Meta: "taps", "junctions" {name: {"in_shape", "out_shape", and the names
    of the tensors "weights" and "bias"}}, "head" {tensor names of "weights", "bias" and, if any, "hidden"} or None,
    "align", "labels" and "input".
    """
    arrays: dict[str, np.ndarray] = {}
    junctions: dict[str, dict[str, Any]] = {}
    for ids in prefixes(network.taps):
        name = junction_name(ids)
        if name in network.junctions:
            before, after = (stock.blocks[block] for block in ids[-2:])
            names = {part: f"{name}.{part}" for part in ("weights", "bias")}
            arrays |= {names[part]: network.junctions[name][part] for part in names}
            junctions[name] = {"in_shape": before.out_shape, "out_shape": after.in_shape, **names}
    head = None
    if network.head is not None:
        head = {part: f"head.{part}" for part in network.head}
        arrays |= {head[part]: network.head[part] for part in head}
    meta = {
        "taps": network.taps,
        "junctions": junctions,
        "head": head,
        "align": network.align,
        "labels": stock.labels,
        "input": stock.input,
    }
    return msgspec.json.decode(msgspec.json.encode(meta)), arrays


def from_artefact(meta: Mapping[str, Any], arrays: Tensors) -> Network:
    """Read a network from an artefact.

    Raises:
        ModelError: the network has no taps, or nothing turns their ends into label scores.
    """
    parts = ("weights", "bias")
    network = Network(
        taps=tuple(tuple(tap) for tap in meta["taps"]),
        junctions={
            name: {part: arrays[entry[part]] for part in parts} for name, entry in dict(meta["junctions"]).items()
        },
        head=None if meta["head"] is None else {part: arrays[name] for part, name in meta["head"].items()},
        align=None if meta["align"] is None else tuple(tuple(group) for group in meta["align"]),
    )
    require_labels(network)
    return network


def require_labels(network: Network) -> None:
    """Refuse a network whose outputs are no label scores.

    Raises:
        ModelError: the network has no taps, neither a head nor an alignment, or an alignment of several taps.
    """
    if not network.taps or not all(network.taps):
        raise ModelError("the stitched network has no taps, or one without blocks: nothing to run")
    if network.head is None and not any(network.align or ()):
        raise ModelError("the stitched network has neither a head nor an alignment, so its outputs have no labels")
    if network.head is None and len(network.taps) > 1:
        raise ModelError(f"the stitched network joins {len(network.taps)} taps without a head: only a head joins taps")


def prefixes(taps: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Every prefix of the taps' paths once, shorter ones of a path first: an order in which the blocks can run."""
    every = (tuple(tap[: i + 1]) for tap in taps for i in range(len(tap)))
    return list(dict.fromkeys(every))


def ends(network: Network, blocks: Mapping[str, Block], run: Run, x: np.ndarray) -> list[np.ndarray]:
    """The output of each tap's last block for prepared images x (n, channels, size, size).

    Shared beginnings run once, and maps are freed after their last use.
    """
    order = prefixes(network.taps)
    takers = Counter(ids[:-1] for ids in order)
    takers.update(dict.fromkeys(network.taps, 1))
    made: dict[tuple[str, ...], np.ndarray] = {(): x}
    for ids in order:
        before, block = made[ids[:-1]], blocks[ids[-1]]
        takers[ids[:-1]] -= 1
        if not takers[ids[:-1]]:
            del made[ids[:-1]]
        made[ids] = run(block, join(before, network.junctions.get(junction_name(ids)), block))
    return [made[tap] for tap in network.taps]


def classify(network: Network, blocks: Mapping[str, Block], run: Run, x: np.ndarray) -> np.ndarray:
    """Run a finished network: scores (n, labels) of a head on the taps' pooled maps, or of aligned logits.

    Args:
        network: what to run.
        blocks: of the stock, by id.
        run: runs one block.
        x: prepared images (n, channels, size, size).

    Raises:
        ModelError: neither a head nor an alignment says what the outputs mean.
    """
    require_labels(network)
    outputs = ends(network, blocks, run, x)
    if network.head is not None:
        z = np.concatenate([gap(each) for each in outputs], axis=1)
        if "hidden" in network.head:
            z = np.maximum(z @ network.head["hidden"].T, 0.0)
        return z @ network.head["weights"].T + network.head["bias"]
    assert network.align is not None
    return align(outputs[0], network.align)
