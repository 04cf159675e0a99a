"""Execution of blocks over stacks of maps, within a task's memory.

Each block runs on all examples before the next one starts, so that its weights are loaded once. The maps between two
blocks are held in memory if there is room, otherwise in a file (`fedquilt.models.stitching.device.activations`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, Tensors
from fedquilt.costs import peak_memory
from fedquilt.data import inputs
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.device.activations import (
    ActivationCache,
    ActivationSource,
    ActivationStack,
    MappedSource,
)
from fedquilt.models.stitching.stitched_network import Block

STACKS = 6  # stacks in memory get one sixth of the room
KEPT_MOST_BYTES = 256 << 20  # path outputs kept on disk for later tasks, never more than half of the budget
STRIPE_BYTES = 1 << 20  # maps resized at a time
PIECE_BYTES = 2 << 20  # maps read at a time where no graph sets the batch size

Between = Sequence[Tensors | None]


class BlockRunner:
    """Runner of one task's blocks, which reports progress and raises if the task is cancelled.

    `blocks` determine the memory left for stacks, beside `beside_bytes` of the task's own and the largest size passed
    to `reserve_memory`, `matrices_bytes`. `flops` is an estimate for the whole task.
    """

    def __init__(
        self,
        site: ClientContext,
        blocks: Iterable[Block],
        flops: float,
        *,
        beside_bytes: int = 0,
        matrices_bytes: int = 0,
    ) -> None:
        self._site, self._flops, self._done = site, max(flops, 1.0), 0.0
        room, blocks = site.engine.available_bytes, list(blocks)
        largest = max(peak_memory.inference_bytes(block.resident_bytes, block.activation_bytes, 1) for block in blocks)
        largest += 4 * max(prod(block.out_shape) for block in blocks)  # and one example that is resized for it
        largest = max(largest, matrices_bytes)
        self._stacks_bytes = int(max(min(room // STACKS, room - largest - beside_bytes), 0))
        self._around_bytes = self._stacks_bytes + beside_bytes
        self.shelf = ActivationCache(site.cache, self._stacks_bytes, min(site.budget_bytes // 2, KEPT_MOST_BYTES))

    def reserve_memory(self, size: int) -> None:
        self._site.engine.make_room(size + self._around_bytes)

    def run_block(
        self,
        block: Block,
        source: ActivationSource,
        first: int = 0,
        last: int | None = None,
        into: ActivationStack | None = None,
    ) -> ActivationStack:
        """Run a block on examples [first, last) and append the output to `into`, or to a new stack."""
        last = source.shape[0] if last is None else last
        made = into or self.shelf.make_stack((last, *block.out_shape))
        *inner, final = block.stages
        flops = block.flops / sum(len(stage) for stage in block.stages)
        shift = 0
        for stage in inner:
            between: ActivationStack | None = None
            for y in self._iterate_stage_outputs(stage, source, first - shift, last - shift, flops):
                between = between or self.shelf.make_stack((last - first, *y.shape[1:]))
                between.append(y)
                del y
            assert between is not None, "no examples"
            source, shift = between, first
        for y in self._iterate_stage_outputs(final, source, first - shift, last - shift, flops):
            made.append(y)
            del y  # before the next batch runs, to free its memory
        return made

    def run_path(
        self, path: Sequence[Block], between: Between, source: ActivationSource, rows: np.ndarray
    ) -> ActivationStack:
        """Return the output of a path's last block on the images `rows`, from its longest prefix on the disk.

        The output is stored there for later tasks.
        """
        begin, maps = len(path), self._find_output(path, rows)
        while maps is None and begin > 0:
            begin -= 1
            maps = self._find_output(path[:begin], rows) if begin else None
        if begin == len(path) and maps is not None:
            return maps
        for i in range(begin, len(path)):
            maps = self.run_block(path[i], apply_junction_lazily(source if maps is None else maps, between[i], path[i]))
        assert maps is not None, "an empty path has no output"
        self.shelf.store(cache_key(path, rows, "path"), maps, spare=True)
        return maps

    def _find_output(self, path: Sequence[Block], rows: np.ndarray) -> ActivationStack | None:
        return self.shelf.find(cache_key(path, rows, "path"), (len(rows), *path[-1].out_shape))

    def _iterate_stage_outputs(
        self, stage: Sequence[str], source: ActivationSource, first: int, last: int, flops: float
    ) -> Iterator[np.ndarray]:
        if len(stage) == 1:
            yield from self._iterate_graph_outputs(stage[0], source, first, last, flops)
            return
        tiles = [
            np.concatenate(list(self._iterate_graph_outputs(graph, source, first, last, flops))) for graph in stage
        ]
        yield np.concatenate(tiles, axis=1)

    def _iterate_graph_outputs(
        self, graph: str, source: ActivationSource, first: int, last: int, flops: float
    ) -> Iterator[np.ndarray]:
        path, engine = self._site.path(graph), self._site.engine
        size = engine.batch(path, self._around_bytes, source.example_bytes)
        for start in range(first, last, size):
            stop = min(start + size, last)
            self._site.progress(min(self._done / self._flops, 1.0))
            self._done += flops * (stop - start)
            yield engine.run(path, source.read_examples(start, stop))


class PreparedExamples(ActivationSource):
    def __init__(self, x: np.ndarray, wanted: inputs.Table) -> None:
        self._x, self._wanted = x, wanted
        self.shape = (len(x), *inputs.network_input_shape(wanted, x.shape[1:]))
        self.example_bytes = 4 * prod(self.shape[1:])

    def read_examples(self, first: int, last: int) -> np.ndarray:
        return inputs.prepare_inputs(self._x[first:last], self._wanted)


def cache_key(path: Sequence[Block], rows: np.ndarray, what: str) -> str:
    digest = hashlib.sha256("/".join(block.id for block in path).encode() + b"\0" + rows.tobytes())
    return f"{what}.{digest.hexdigest()[:16]}"


def apply_junction_lazily(maps: ActivationSource, junction: Tensors | None, block: Block) -> ActivationSource:
    """Return maps that are resized and projected for `block` on reading, or the same maps without a junction."""
    if junction is None:
        return maps
    source, beside = maps, prod(maps.shape[1:]) + block.in_shape[0] * prod(maps.shape[2:])
    if stitched_network.enlarges_maps(
        maps.shape[1:], block.in_shape
    ):  # projected, then one axis is resized after the other
        beside += block.in_shape[0] * _half_resized_size(maps, block.in_shape[1:])
    else:
        source = resize_maps(maps, *block.in_shape[1:])
        beside = source.example_bytes // 4 + prod(source.shape[1:])
    return MappedSource(
        source, lambda part: stitched_network.apply_junction(part, junction, block), block.in_shape, 4 * beside
    )


def resize_maps(maps: ActivationSource, *sizes: int) -> ActivationSource:
    return maps if maps.shape[2:] == sizes else ResizedMaps(maps, sizes)


class ResizedMaps(ActivationSource):
    """Maps resized on reading, a few channels at a time, to bound memory."""

    def __init__(self, maps: ActivationSource, sizes: tuple[int, ...]) -> None:
        self._maps, self._sizes = maps, sizes
        self.shape = (*maps.shape[:2], *sizes)
        self._channel_bytes = 4 * (prod(maps.shape[2:]) + _half_resized_size(maps, sizes) + prod(sizes))
        self.example_bytes = self._channel_bytes * min(self._channels_at_once(1), maps.shape[1])

    def read_examples(self, first: int, last: int) -> np.ndarray:
        return self.read_channels(slice(first, last), slice(0, self.shape[1]))

    def read_channels(self, examples: slice, some: slice) -> np.ndarray:
        made = np.empty((examples.stop - examples.start, some.stop - some.start, *self._sizes), np.float32)
        step = self._channels_at_once(len(made))
        for start in range(some.start, some.stop, step):
            stop = min(start + step, some.stop)
            part = self._maps.read_channels(examples, slice(start, stop))
            made[:, start - some.start : stop - some.start] = inputs.resize_maps(part, *self._sizes)
            del part
        return made

    def _channels_at_once(self, examples: int) -> int:
        return max(STRIPE_BYTES // (self._channel_bytes * max(examples, 1)), 1)


def _half_resized_size(maps: ActivationSource, sizes: Sequence[int]) -> int:
    # Values in one channel after a resize along the first axis alone.
    return prod((*sizes[:1], *maps.shape[3:])) if len(sizes) > 1 else 0


def iterate_pieces(source: ActivationSource) -> Iterator[tuple[int, np.ndarray]]:
    """Yield a source in pieces of about PIECE_BYTES, each with the index of its first example."""
    size = max(PIECE_BYTES // max(4 * prod(source.shape[1:]) + source.example_bytes, 1), 1)
    for start in range(0, source.shape[0], size):
        yield start, source.read_examples(start, min(start + size, source.shape[0]))


def sample_vectors(maps: ActivationSource, positions: np.ndarray) -> np.ndarray:
    """Return the channel vectors (r, c), float32, at ascending positions (r,) over all maps."""
    _, c, *sizes = maps.shape
    area = prod(sizes)
    found = np.empty((len(positions), c), np.float32)
    for start, part in iterate_pieces(maps):
        here = slice(*np.searchsorted(positions, [start * area, (start + len(part)) * area]))
        example, position = np.divmod(positions[here] - start * area, area)
        found[here] = part.reshape(len(part), c, area)[example, :, position]
        del part
    return found


def draw_positions(n: int, shape: Sequence[int], wanted: int) -> np.ndarray:
    """Draw positions of n maps, one from each of `wanted` equal intervals, with a fixed seed."""
    total = n * prod(shape[1:])
    wanted = min(wanted, total)
    draw = tensors.seeded_rng("positions", total).random(wanted)
    return np.minimum((np.arange(wanted) + draw) * (total / wanted), total - 1).astype(np.int64)
