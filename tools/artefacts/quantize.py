"""Blocks in 8 bits, for output scores: made from the float32 ones, and kept only where they change nothing.

A block's graph is quantized by ONNX Runtime, weights per channel, maps by the ranges they have on some
images, both when the block's own donor feeds it and when junctions after the first blocks of the donors do.
(Ranges of the donor alone cut off what a junction makes, such as negative values where the donor has a
ReLU: of the 28 candidates of mobilenet_v2 and squeezenet1_1 with ImageNet weights, at 64 pixels, all passed
the first test below and 7 failed the second.) On other images it has to pass two tests:

- its output's CKA with the output of every block of the stock is within INT8_DELTA of the float32 block's;
- as a candidate after the first one and two blocks of each donor, scored as a device scores, it is again
  within INT8_DELTA, and the best K blocks are the same as with float32.

Paths, what scores are compared with, junctions, heads and the network that comes out are float32 always.
Whether 8 bits are faster depends on the board's processor: what is told here is true of this machine.

Graphs hold the operators on integers themselves (ONNX Runtime's QOperator format), so that what runs in
integers does not hang on the optimizations an engine has memory for, as it does with float operators
between quantizers (QDQ). Weights have 7 bits: with 8, processors without a dot product of integers
saturate, and a block accepted here would score differently there. Tiles of a large layer stay float32.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import bundle, config, tensors
from fedquilt.core import Bundle, DataError, DeviceView, Examples, JobError, Site, StoreError, Tensors
from fedquilt.data.examples import load_all
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.methods.fedstitch import METHOD
from fedquilt.models.stitching import (
    block_runner,
    cka,
    least_squares,
    scoring,
    search,
    stitched,
    vote,
)
from fedquilt.models.stitching.activations import Part, Source, Stack
from fedquilt.models.stitching.block_runner import Flow
from fedquilt.models.stitching.search_state import PAPER, Net, Params, State
from fedquilt.models.stitching.stitched import Block, Stock
from fedquilt.tools.artefacts.quantized_block import quantized
from fedquilt.tools.simulation import Member, hands

INT8_DELTA = 0.01  # a CKA that changes by as much is another one
LENGTHS = (1, 2)  # of the donors' beginnings that candidates are scored after
ENGINE_BYTES = 2 << 30
UNUSED = (  # no shares here
    *("limit", "per_class", "held", "groups", "partition"),
    *("share", "shares", "alpha", "min_size", "classes", "shards"),
)


class Images(DataSpec, frozen=True, forbid_unknown_fields=True):
    """The `[int8]` table: examples as in `[data]`, of which three times `images` are drawn."""

    images: Annotated[int, Meta(ge=cka.MIN_IMAGES)] = 64  # for the ranges; as many to compare; as many for junctions


@dataclass(frozen=True)
class Tried:
    """A block in 8 bits beside itself in float32, on images that its ranges were not taken from."""

    graph: bytes
    delta: float  # largest change of its output's CKA with any block's
    seconds: float  # it took; and the float32 block
    plain_seconds: float


@dataclass(frozen=True)
class Verdict:
    """Quantisation result per block; the stem is excluded because it is never a candidate."""

    accepted: Mapping[str, Tried]
    off: tuple[str, ...] = ()  # a CKA or a score changed by INT8_DELTA or more
    choices: tuple[str, ...] = ()  # came among the best K, or left them
    float_only: tuple[str, ...] = ()  # tiles, nothing that can be quantized, or more memory than in float32

    def __str__(self) -> str:
        blocks = len(self.accepted) + len(self.off) + len(self.choices) + len(self.float_only)
        told = f"{len(self.accepted)} of {blocks} candidates in 8 bits"
        for count, why in (
            (self.off, "too far off"),
            (self.choices, "changed a choice"),
            (self.float_only, "float32 only"),
        ):
            told += f", {len(count)} {why}" if count else ""
        if not self.accepted:
            return told
        delta = max(tried.delta for tried in self.accepted.values())
        times = [sum(getattr(t, name) for t in self.accepted.values()) for name in ("seconds", "plain_seconds")]
        return f"{told}; CKA changes by {delta:.4f} at most; {times[0] / times[1]:.2f} of the float32 time here"


@dataclass(frozen=True)
class Trial:
    """How blocks are scored, and on what images: three times so many, in no order."""

    params: Params
    examples: Examples
    images: int

    def accepted(
        self, out: Path, meta: Mapping[str, Any], files: Mapping[str, bytes], say: Callable[[str], None]
    ) -> dict[str, bytes]:
        """Quantised graphs that a bundle may hold, by block.

        Args:
            out: a folder with room for the bundle, while this runs.
            meta: of the bundle with float32 blocks alone.
            files: of the same bundle.
            say: called with one line for each donor.

        Raises:
            DataError: the images do not fit the donors.
            StoreError: the folder cannot be written.
        """
        with _room(out) as folder:
            bench = _Bench(folder, self.examples, self.images)
            plain = bundle.write(folder, meta, files)
            tried = _tried(bench, plain, self.params)
            close = {name: one for name, one in tried.items() if one.delta < INT8_DELTA}
            table = {**meta["blocks"], **{name: {**meta["blocks"][name], "int8": file_of(name)} for name in close}}
            graphs = {file_of(name): one.graph for name, one in close.items()}
            quick = bundle.write(folder, {**meta, "blocks": table}, {**files, **graphs})
            off, moved = settled(list(_choices(bench, plain, quick, self.params)), close, self.params.k)
        taken = {name: one for name, one in close.items() if name not in off | moved}
        for donor, facts in meta["donors"].items():
            own = facts["blocks"][1:]
            verdict = Verdict(
                {name: taken[name] for name in own if name in taken},
                tuple(name for name in own if name in off or (name in tried and name not in close)),
                tuple(name for name in own if name in moved),
                tuple(name for name in own if name not in tried),
            )
            say(f"donor {donor}: {verdict}")
        return {name: one.graph for name, one in taken.items()}


def trial(job: Mapping[str, Any]) -> Trial:
    """What a job file's table asks for with `[int8]`.

    Raises:
        JobError: a key that is missing or wrong, no donors, or output scores are never taken.
        DataError: the images cannot be had, or are too few.
    """
    if not job.get("donors"):
        raise JobError("[int8] is for the blocks of [[donors]], and the job has none: leave it out")
    params, table = _params(job), _table(job["int8"])
    return Trial(params, _examples(table), table.images)


def file_of(block: str) -> str:
    """Name of a block's 8-bit graph in a bundle."""
    return f"{block}.int8.onnx"


@contextlib.contextmanager
def _room(out: Path) -> Iterator[Path]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="int8-", dir=out)
    except OSError as error:
        raise StoreError(f"cannot write the bundle {out}: {error.strerror}") from None
    with folder as name:
        yield Path(name)


# -- what is asked --------------------------------------------------------------------------------


def _params(job: Mapping[str, Any]) -> Params:
    params = config.convert(job.get("params") or {}, Params, "[params]")
    if params.mode == "paper":
        params = replace(params, **PAPER)
    if params.score_at == "input":
        raise JobError("[params] score_at = 'input' runs no candidate: leave out [int8], which would do nothing")
    return params


def _table(table: Mapping[str, Any]) -> Images:
    odd = [key for key in UNUSED if key in table]
    if odd:
        raise JobError(f"[int8] {', '.join(odd)}: images are drawn from all of the split; leave it out")
    return config.convert(table, Images, "[int8]")


def _examples(wanted: Images) -> Examples:
    """Images in no order."""
    need = 3 * wanted.images
    found = load_all(msgspec.structs.replace(wanted, limit=need))
    if len(found) < need:
        raise DataError(
            f"{wanted.where} has {len(found)} images, [int8] images = {wanted.images} takes {need}: "
            f"give more, or images = {len(found) // 3}"
        )
    order = tensors.rng("int8", wanted.seed).permutation(need)
    return Examples(found.x[order], found.y[order])


# -- one block ------------------------------------------------------------------------------------


class _Bench:
    """Runs a device's work on this machine, in a folder. Ranges are taken from the last third of its images."""

    def __init__(self, folder: Path, examples: Examples, images: int) -> None:
        self.folder, self.examples, self.images = folder, examples, images
        self.engine = OnnxEngine(ENGINE_BYTES)

    def paths(self, made: Bundle) -> dict[str, Path]:
        return {name: self.folder / "blobs" / ref.sha256 for name, ref in made.files.items()}

    def member(self) -> Member:
        """A device that has the other images."""
        rest = Examples(self.examples.x[: 2 * self.images], self.examples.y[: 2 * self.images])
        return Member("int8", rest, rest)

    def flow(self, paths: Mapping[str, Path], stock: Stock) -> Flow:
        member, cache = self.member(), self.folder / "cache"
        site = Site(
            member.device,
            ENGINE_BYTES,
            self.engine,
            tensors.rng("int8"),
            member.train,
            member.held,
            {},
            lambda name: {},
            paths.__getitem__,
            cache,
        )
        return Flow(site, stock.blocks.values(), 1.0)


def _tried(bench: _Bench, plain: Bundle, params: Params) -> dict[str, Tried]:
    """Every block that can be quantized, tried on what its donor feeds it."""
    stock, paths, n = stitched.stock(plain.meta), bench.paths(plain), bench.images
    run = bench.flow(paths, stock)
    graphs: dict[str, bytes] = {}
    seconds: dict[str, tuple[float, float]] = {}
    grams: dict[str, np.ndarray] = {}
    grams8: dict[str, np.ndarray] = {}
    shown = block_runner.Prepared(bench.examples.x[n:], stock.input)  # n to compare on, and n for the ranges
    begun = _begun(run, stock, Part(shown, n, 2 * n))
    for donor in stock.donors.values():
        maps: Source = shown
        for block in (stock.blocks[name] for name in donor.blocks):
            outputs, plain_s = _timed(run, block, maps, n)
            grams[block.id] = scoring.gram(outputs, n, params.maps)
            graph = quantized(block, paths, _fed(Part(maps, n, 2 * n), begun, block, params))
            if graph is not None:
                path = bench.folder / file_of(block.id)
                path.write_bytes(graph)
                paths[path.name] = path
                outputs8, quick_s = _timed(run, replace(block, int8=path.name).scored, maps, n)
                graphs[block.id], seconds[block.id] = graph, (quick_s, plain_s)
                grams8[block.id] = scoring.gram(outputs8, n, params.maps)
            maps = run.block(block, maps, n, 2 * n, outputs)

    def change(name: str) -> float:
        """Largest change of the CKA with any block whose matrix has as many rows."""
        others = [gram for gram in grams.values() if gram.shape == grams[name].shape]
        return max(
            abs(
                cka.cka(grams8[name], gram, params.estimator).value - cka.cka(grams[name], gram, params.estimator).value
            )
            for gram in others
        )

    return {name: Tried(graph, change(name), *seconds[name]) for name, graph in graphs.items()}


def _timed(run: Flow, block: Block, maps: Source, n: int) -> tuple[Stack, float]:
    """A block's output for the first n examples, and how long it took once its graphs were loaded."""
    run.block(block, Part(maps, 0, 1))
    start = time.perf_counter()
    outputs = run.block(block, maps, 0, n)
    return outputs, time.perf_counter() - start


def _begun(run: Flow, stock: Stock, shown: Source) -> list[tuple[Block, Source]]:
    """The last blocks of the beginnings of each donor, and what they put out."""
    found: list[tuple[Block, Source]] = []
    for donor in stock.donors.values():
        maps = shown
        for block in (stock.blocks[name] for name in donor.blocks[: max(LENGTHS)]):
            maps = run.block(block, maps)
            found.append((block, maps))
    return found


def _fed(own: Source, begun: Iterable[tuple[Block, Source]], block: Block, params: Params) -> Iterator[np.ndarray]:
    """Inputs of a block, a few examples at a time: from its own donor, and from junctions fitted to that."""
    yield from (part for _, part in block_runner.pieces(own))
    for before, maps in begun:
        if not stitched.compatible(before, block, params.max_upsampling) or stitched.continues(before, block):
            continue
        places = block_runner.positions(own.shape[0], block.in_shape, params.positions)
        x = block_runner.sample(block_runner.resized(maps, *block.in_shape[1:]), places)
        weights, bias = least_squares.Fit(x, params.ridge, params.bias).weights(block_runner.sample(own, places))
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
        yield from (part for _, part in block_runner.pieces(block_runner.joined(maps, junction, block)))


# -- choices --------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The scores of a pool, in its order, with float32 blocks and with those in 8 bits."""

    pool: tuple[str, ...]
    plain: np.ndarray
    quick: np.ndarray


def _choices(bench: _Bench, plain: Bundle, quick: Bundle, params: Params) -> Iterator[Choice]:
    """Every block that may follow is scored by its output after the beginnings of each donor, on all images."""
    before, after = (METHOD.init(made, params, 0) for made in (plain, quick))
    everywhere = replace(before.params, score_at="output", early=0, completion=False)
    member = bench.member()
    local: Tensors = {}

    def scores(state: State, net: Net, pool: tuple[str, ...]) -> np.ndarray:
        nonlocal local
        order = METHOD.send(replace(state, params=everywhere, current=net, pool=pool), DeviceView("int8", None, ()))
        assert order is not None
        task, site = hands.delivered(
            METHOD,
            order,
            member,
            bench.folder / "sent",
            engine=bench.engine,
            local=local,
            cache=bench.folder / "cache",
            path=lambda ref: bench.folder / "blobs" / ref.sha256,
        )
        answer = METHOD.work(task, site)
        local = answer.local
        return answer.bundles["scores"]["score"]

    for begun in search.beginnings(before.stock):
        own = before.stock.donors[before.stock.blocks[begun.path[0]].donor].blocks
        for length in LENGTHS:
            net = replace(begun, path=own[:length])
            pool = search.offered(net, before.stock, everywhere)
            if pool and length < len(own):
                yield Choice(pool, scores(before, net, pool), scores(after, net, pool))


def settled(choices: Sequence[Choice], candidates: Iterable[str], k: int) -> tuple[set[str], set[str]]:
    """Which candidates are too far off in a score, and which others would change a best K.

    A block that comes among the K or leaves them is taken back, until with those that are left no K differs.
    """
    left = set(candidates)
    off = {
        name
        for pool, plain, quick in choices
        for name, change in zip(pool, np.abs(quick - plain), strict=True)
        if name in left and change >= INT8_DELTA
    }
    left -= off
    moved: set[str] = set()
    while True:
        found: set[str] = set()
        for pool, plain, quick in choices:
            mixed = np.where([name in left for name in pool], quick, plain)
            found |= (_best(pool, plain, k) ^ _best(pool, mixed, k)) & left
        if not found:
            return off, moved
        left, moved = left - found, moved | found


def _best(pool: Sequence[str], scores: np.ndarray, k: int) -> set[str]:
    return {pool[j] for j in vote.ranking(scores, np.ones(len(pool), np.int64), pool)[:k]}
