"""Blocks, junctions between blocks, and the outputs of stitched paths.

A path is a sequence of blocks of several donors (FedStitch, arXiv 2409.07202, section 3). A junction connects two
blocks that are not neighbours in one donor: maps are resized for the next block, and projected onto its channels
position by position (a 1x1 convolution with bias). Maps of images are (c, h, w), maps of time series (c, l). Requires
numpy only.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from fedquilt.core import ModelError, Tensors
from fedquilt.data import inputs

Run = Callable[["Block", np.ndarray], np.ndarray]  # a block on its input, float32


@dataclass(frozen=True)
class Block:
    """Block of a donor: its ONNX graphs and its costs per example. Shapes are without the batch.

    Graphs run stage by stage. The graphs of one stage take the same input, and their outputs are concatenated along
    axis 1: a linear layer larger than a device's memory is stored as tiles of its rows.
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

    @property
    def id(self) -> str:
        return f"{self.donor}.{self.index}"

    @property
    def files(self) -> tuple[str, ...]:
        return (*itertools.chain.from_iterable(self.stages), *self.data)


@dataclass(frozen=True)
class Donor:
    blocks: tuple[str, ...]
    classes: int
    align: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class DonorPool:
    input: inputs.Table
    labels: tuple[str, ...]
    donors: dict[str, Donor]
    blocks: dict[str, Block]


def load_donor_pool(meta: Mapping[str, Any]) -> DonorPool:
    """Read the donor pool from a bundle's meta, or raise ModelError if blocks are missing or inconsistent."""
    try:
        fields = {name: meta[name] for name in ("input", "labels", "donors", "blocks")}
        pool = msgspec.convert(fields, DonorPool)
        msgspec.convert(pool.input, inputs.ImageInput if "channels" in pool.input else inputs.ValueInput)
    except (KeyError, msgspec.ValidationError) as error:
        raise ModelError(f"the bundle has no donor blocks ({error}): add [[donors]] and prepare the job") from None
    for name, donor in pool.donors.items():
        kinds = [pool.blocks[block].kind if block in pool.blocks else None for block in donor.blocks]
        if kinds != ["start", *["middle"] * (len(kinds) - 2), "end"]:
            raise ModelError(
                f"donor {name!r} has blocks of kinds {kinds}, not start, middle ..., end: prepare it again"
            )
        if donor.align is not None and len(donor.align) != len(pool.labels):
            raise ModelError(
                f"donor {name!r}: `align` has {len(donor.align)} entries for {len(pool.labels)} labels: name classes "
                "for each label of the job"
            )
    return pool


# -- order of blocks ------------------------------------------------------------------------------


def is_continuation(previous: Block, following: Block) -> bool:
    return following.donor == previous.donor and following.index == previous.index + 1


def is_native_path(path: Sequence[Block]) -> bool:
    return path[0].index == 0 and all(is_continuation(a, b) for a, b in itertools.pairwise(path))


def can_connect(previous: Block, following: Block, max_upsampling: float = 2.0) -> bool:
    """Return whether a junction can connect two blocks and enlarges each axis by at most `max_upsampling`."""
    if following.kind == "start" or len(previous.out_shape) != len(following.in_shape) or len(following.in_shape) < 2:
        return False
    return all(
        target <= max_upsampling * size
        for size, target in zip(previous.out_shape[1:], following.in_shape[1:], strict=True)
    )


# -- junctions ------------------------------------------------------------------------------------


def junction_name(path: Sequence[str]) -> str:
    return "junction." + hashlib.sha256("/".join(path).encode()).hexdigest()[:16]


def apply_junction(maps: np.ndarray, junction: Tensors | None, block: Block) -> np.ndarray:
    """Resize and project maps (n, c, h, w) or (n, c, l) for `block` if there is a junction.

    `junction` is {"weights": (c_out, c_in), "bias": (c_out,)}, float32. Resizing and projecting commute, because both
    are linear and the rows of a resize sum to one. The projection runs where there are fewer positions.
    """
    if junction is None:
        return maps
    sizes = block.in_shape[1:]
    if enlarges_maps(maps.shape[1:], block.in_shape):
        return inputs.resize_maps(_project_maps(maps, junction), *sizes)
    return _project_maps(inputs.resize_maps(maps, *sizes), junction)


def enlarges_maps(in_shape: Sequence[int], out_shape: Sequence[int]) -> bool:
    return math.prod(in_shape[1:]) < math.prod(out_shape[1:])


def _project_maps(maps: np.ndarray, junction: Tensors) -> np.ndarray:
    n, c, *sizes = maps.shape
    projected = np.matmul(junction["weights"], maps.reshape(n, c, math.prod(sizes)))
    projected += junction["bias"][:, None]
    return projected.reshape(n, -1, *sizes)


def load_junctions(path: Sequence[Block], load_bundle: Callable[[str], Tensors]) -> list[Tensors | None]:
    """Return the junction before each block, None where the block continues its donor."""
    ids = [block.id for block in path]
    return [
        None if i == 0 or is_continuation(path[i - 1], path[i]) else load_bundle(junction_name(ids[: i + 1]))
        for i in range(len(path))
    ]


def run_block(block: Block, run: Callable[[str, np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    for stage in block.stages:
        parts = [run(graph, x) for graph in stage]
        x = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return x


def run_path(path: Sequence[Block], junctions: Sequence[Tensors | None], run: Run, x: np.ndarray) -> np.ndarray:
    for block, junction in zip(path, junctions, strict=True):
        x = run(block, apply_junction(x, junction, block))
    return x


# -- labels ---------------------------------------------------------------------------------------


def global_average_pool(maps: np.ndarray) -> np.ndarray:
    """Return the global average pool (n, c), float64, of maps or of vectors (n, d) unchanged."""
    return maps.mean(axis=tuple(range(2, maps.ndim)), dtype=np.float64) if maps.ndim > 2 else maps.astype(np.float64)


def align_logits(logits: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Convert logits (n, classes) to label scores (n, labels) by logsumexp over a label's classes.

    A label without classes scores -inf, so that it never wins.
    """
    scores = np.full((len(logits), len(groups)), -np.inf)
    for label, group in enumerate(groups):
        if group:
            part = logits[:, list(group)].astype(np.float64)
            top = part.max(axis=1)
            scores[:, label] = top + np.log(np.exp(part - top[:, None]).sum(axis=1))
    return scores


def random_projection(width: int, features: int, seed: int) -> np.ndarray:
    draw = np.random.Generator(np.random.PCG64(seed)).standard_normal((width, features))
    return draw / np.sqrt(features)


# -- finished networks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class EarlyExit:
    """Cheaper network of a cascade, whose paths are prefixes of the larger network's paths.

    An example leaves early if its two best scores differ by `margin` or more. `share` is the share of held-out examples
    that leave early.
    """

    taps: tuple[tuple[str, ...], ...]
    head: dict[str, np.ndarray]
    margin: float
    share: float


@dataclass(frozen=True)
class StitchedNetwork:
    """Finished network: parallel paths, and a head or an alignment to label scores.

    Each path ends in a tap. Blocks of a common prefix of paths run once. A network without branches has one tap.

    Attributes:
        taps: Block ids of each path, in the order of the head's columns.
        junctions: Junctions {"weights": (c_out, c_in), "bias": (c_out,)} by `junction_name`.
        head: {"weights": (labels, d), "bias": (labels,)} on the taps' pooled maps side by side, d channels in all. With
            {"hidden": (m, d)} the maps are first multiplied by the matrix and passed through a ReLU, and weights are
            (labels, m). None if the only tap is a donor's own classifier, whose classes `align` maps to labels.
        align: Classes of each label, or None with a head.
        early: Cheaper network that answers first in a cascade.
    """

    taps: tuple[tuple[str, ...], ...]
    junctions: Mapping[str, Tensors]
    head: Tensors | None = None
    align: tuple[tuple[int, ...], ...] | None = None
    early: EarlyExit | None = None


def to_artefact(network: StitchedNetwork, donor_pool: DonorPool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Convert a network to an artefact's meta (JSON) and tensors, the inverse of `from_artefact`.

    Unused junctions are left out. Meta: "taps", "junctions" {name: {"in_shape", "out_shape", and the names of the
    tensors "weights" and "bias"}}, "head" {tensor names of "weights", "bias" and, if any, "hidden"} or None, "align",
    "early" (an `EarlyExit` with tensor names) or None, "labels" and "input".
    """
    arrays: dict[str, np.ndarray] = {}
    junctions: dict[str, dict[str, Any]] = {}
    for ids in path_prefixes(network.taps):
        name = junction_name(ids)
        if name in network.junctions:
            previous, following = (donor_pool.blocks[block] for block in ids[-2:])
            names = {part: f"{name}.{part}" for part in ("weights", "bias")}
            arrays |= {names[part]: network.junctions[name][part] for part in names}
            junctions[name] = {"in_shape": previous.out_shape, "out_shape": following.in_shape, **names}
    head = None
    if network.head is not None:
        head = {part: f"head.{part}" for part in network.head}
        arrays |= {head[part]: network.head[part] for part in head}
    early = None
    if network.early is not None:
        names = {part: f"early.{part}" for part in network.early.head}
        arrays |= {names[part]: network.early.head[part] for part in names}
        early = {**vars(network.early), "head": names}
    meta = {
        "taps": network.taps,
        "junctions": junctions,
        "head": head,
        "align": network.align,
        "early": early,
        "labels": donor_pool.labels,
        "input": donor_pool.input,
    }
    return msgspec.json.decode(msgspec.json.encode(meta)), arrays


def from_artefact(meta: Mapping[str, Any], arrays: Tensors) -> StitchedNetwork:
    parts, early = ("weights", "bias"), meta.get("early")
    if early is not None:
        head = {part: arrays[name] for part, name in early["head"].items()}
        early = EarlyExit(tuple(tuple(tap) for tap in early["taps"]), head, early["margin"], early["share"])
    network = StitchedNetwork(
        taps=tuple(tuple(tap) for tap in meta["taps"]),
        junctions={
            name: {part: arrays[entry[part]] for part in parts} for name, entry in dict(meta["junctions"]).items()
        },
        head=None if meta["head"] is None else {part: arrays[name] for part, name in meta["head"].items()},
        align=None if meta["align"] is None else tuple(tuple(group) for group in meta["align"]),
        early=early,
    )
    require_label_scores(network)
    return network


def require_label_scores(network: StitchedNetwork) -> None:
    """Raise ModelError unless the network has blocks, and a head or an alignment of classes with labels."""
    if not network.taps or not all(network.taps):
        raise ModelError("the stitched network has no taps, or a tap without blocks: run the search again")
    if network.head is None and not any(network.align or ()):
        raise ModelError("the stitched network has neither a head nor an alignment with labels: run the search again")
    if network.early and not set(path_prefixes(network.early.taps)) <= set(path_prefixes(network.taps)):
        raise ModelError("the cascade's first network is not a part of its second network: run the search again")
    if network.head is None and len(network.taps) > 1:
        raise ModelError(f"the stitched network joins {len(network.taps)} taps without a head: run the search again")


def path_prefixes(taps: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return every prefix of the taps' paths once, in an order in which the blocks can run."""
    prefixes = (tuple(tap[: i + 1]) for tap in taps for i in range(len(tap)))
    return list(dict.fromkeys(prefixes))


def run_taps(network: StitchedNetwork, blocks: Mapping[str, Block], run: Run, x: np.ndarray) -> list[np.ndarray]:
    """Return the output of each tap's last block for prepared images x (n, channels, size, size).

    Common prefixes run once, and maps are freed after their last use.
    """
    prefixes = path_prefixes(network.taps)
    readers = Counter(ids[:-1] for ids in prefixes)
    readers.update(dict.fromkeys(network.taps, 1))
    outputs: dict[tuple[str, ...], np.ndarray] = {(): x}
    for ids in prefixes:
        previous_output, block = outputs[ids[:-1]], blocks[ids[-1]]
        readers[ids[:-1]] -= 1
        if not readers[ids[:-1]]:
            del outputs[ids[:-1]]
        outputs[ids] = run(block, apply_junction(previous_output, network.junctions.get(junction_name(ids)), block))
    return [outputs[tap] for tap in network.taps]


def choose_early_scores(early_scores: np.ndarray, late_scores: np.ndarray, margin: float) -> np.ndarray:
    """Return a cascade's scores (n, labels): early ones where their best two differ by at least `margin`."""
    return np.where(score_margins(early_scores)[:, None] >= margin, early_scores, late_scores)


def score_margins(scores: np.ndarray) -> np.ndarray:
    """Return the difference (n,) of the two best scores of each example, infinite for one label."""
    if scores.shape[1] < 2:
        return np.full(len(scores), np.inf)
    best = np.partition(scores, -2, axis=1)
    return np.asarray(best[:, -1] - best[:, -2])


def compute_label_scores(network: StitchedNetwork, blocks: Mapping[str, Block], run: Run, x: np.ndarray) -> np.ndarray:
    """Return the label scores (n, labels) of a network for prepared images (n, channels, size, size)."""
    require_label_scores(network)
    if network.early is not None:
        first = replace(network, taps=network.early.taps, head=network.early.head, early=None)
        second = compute_label_scores(replace(network, early=None), blocks, run, x)
        return choose_early_scores(compute_label_scores(first, blocks, run, x), second, network.early.margin)
    outputs = run_taps(network, blocks, run, x)
    if network.head is not None:
        z = np.concatenate([global_average_pool(output) for output in outputs], axis=1)
        if "hidden" in network.head:
            z = np.maximum(z @ network.head["hidden"].T, 0.0)
        return z @ network.head["weights"].T + network.head["bias"]
    assert network.align is not None
    return align_logits(outputs[0], network.align)


# -- display names -----------------------------------------------------------------------------------


def network_name(taps: Sequence[Sequence[str]], headed: bool, early: Sequence[Sequence[str]] = ()) -> str:
    """Return a network's name, such as "head on a.0-3 + (a.0-2 > b.1)" for two taps, one of them stitched.

    `early` are the taps of a cascade's first network. A network that is not `headed` is named by its only path.
    """
    if early:
        return f"{network_name(early, headed)}, then {network_name(taps, headed)}"
    if not headed:
        return path_name(taps[0])
    parts = list[str]()
    for stitched, group in itertools.groupby(map(tap_name, taps), key=lambda name: name.startswith("(")):
        names = list(group)
        parts += names if stitched else _abbreviate_donor_runs(names)
    return f"head on {' + '.join(parts)}"


def artefact_name(meta: Mapping[str, Any]) -> str:
    early = meta["early"] or {"taps": ()}
    return network_name(meta["taps"], meta["head"] is not None, early["taps"])


def tap_name(ids: Sequence[str]) -> str:
    """Return a tap's name: the last block of an unmodified donor, otherwise the path in brackets."""
    donor, _, _ = ids[0].rpartition(".")
    native = list(ids) == [f"{donor}.{index}" for index in range(len(ids))]
    return ids[-1] if native else f"({path_name(ids)})"


def path_name(ids: Sequence[str]) -> str:
    return " > ".join(_abbreviate_donor_runs(ids))


def _abbreviate_donor_runs(ids: Sequence[str]) -> Iterator[str]:
    start = 0
    while start < len(ids):
        donor, _, first = ids[start].rpartition(".")
        end = start + 1
        while end < len(ids) and ids[end] == f"{donor}.{int(first) + end - start}":
            end += 1
        if end - start > 2:
            yield f"{ids[start]}-{int(first) + end - start - 1}"
        else:
            yield from ids[start:end]
        start = end
