"""Blocks run over stacks of maps: one graph at a time, a few examples at a time, within a task's memory.

Each block runs on all examples before the next one starts, so that its weights are loaded once. The maps between two
blocks are held in memory if there is room, otherwise in a file (`fedquilt.models.stitching.activations`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Protocol

import numpy as np

from fedquilt import footprint, tensors
from fedquilt.core import Site, Tensors
from fedquilt.data import images, inputs
from fedquilt.models.stitching import stitched
from fedquilt.models.stitching.activations import Mapped, Shelf, Source, Stack
from fedquilt.models.stitching.stitched import Block

STACKS = 6  # stacks in memory get one sixth of the room
KEPT_MOST_BYTES = 256 << 20  # path outputs kept on disk for later tasks, never more than half of the budget
STRIPE_BYTES = 1 << 20  # maps resized at a time
PIECE_BYTES = 2 << 20  # maps read at a time where no graph sets the batch size

Between = Sequence[Tensors | None]


class Outputs(Protocol):
    """A cache of the outputs of paths on one set of images."""

    def find(self, path: Sequence[Block]) -> Stack | None:
        """The output of a path's last block; None if it is not cached."""
        ...

    def keep(self, path: Sequence[Block], maps: Stack) -> None:
        """Offer a path's output to the cache, which may ignore it."""
        ...


class Flow:
    """Runner of one task's blocks that reports the task's progress; raises when the task is cancelled.

    Args:
        site: the device's engine, files and cache.
        blocks: all blocks that may run; they decide how much memory is left for stacks.
        flops: estimate for the whole task, for the reported progress.
        beside_bytes: of what the task itself holds while blocks run.
        matrices_bytes: the most that it will `reserve` beside the stacks.
    """

    def __init__(
        self, site: Site, blocks: Iterable[Block], flops: float, *, beside_bytes: int = 0, matrices_bytes: int = 0
    ) -> None:
        self._site, self._flops, self._done = site, max(flops, 1.0), 0.0
        room, blocks = site.engine.room_bytes, list(blocks)
        largest = max(footprint.scoring_bytes(block.resident_bytes, block.activation_bytes, 1) for block in blocks)
        largest += 4 * max(prod(block.out_shape) for block in blocks)  # and one example that is resized for it
        largest = max(largest, matrices_bytes)
        self._stacks_bytes = int(max(min(room // STACKS, room - largest - beside_bytes), 0))
        self._around_bytes = self._stacks_bytes + beside_bytes
        self.shelf = Shelf(site.cache, self._stacks_bytes, min(site.budget_bytes // 2, KEPT_MOST_BYTES))

    def reserve(self, size: int) -> None:
        """Have the engine free memory for matrices of `size` bytes beside the stacks and what the task holds."""
        self._site.engine.make_room(size + self._around_bytes)

    def block(
        self, block: Block, source: Source, first: int = 0, last: int | None = None, into: Stack | None = None
    ) -> Stack:
        """A block's output for examples [first, last), appended to `into`, which holds those before `first`."""
        last = source.shape[0] if last is None else last
        made = into or self.shelf.make((last, *block.out_shape))
        *inner, final = block.stages
        flops = block.flops / sum(len(stage) for stage in block.stages)
        shift = 0
        for stage in inner:
            between: Stack | None = None
            for y in self._stage(stage, source, first - shift, last - shift, flops):
                between = between or self.shelf.make((last - first, *y.shape[1:]))
                between.put(y)
                del y
            assert between is not None, "no examples"
            source, shift = between, first
        for y in self._stage(final, source, first - shift, last - shift, flops):
            made.put(y)
            del y  # before the next batch runs, to free its memory
        return made

    def along(self, path: Sequence[Block], between: Between, source: Source, known: Outputs) -> Stack:
        """The output of a path's last block, computed from the longest prefix of the path that is cached."""
        begin, maps = len(path), known.find(path)
        while maps is None and begin > 0:
            begin -= 1
            maps = known.find(path[:begin]) if begin else None
        for i in range(begin, len(path)):
            maps = self.block(path[i], joined(source if maps is None else maps, between[i], path[i]))
            known.keep(path[: i + 1], maps)
        assert maps is not None, "an empty path has no output"
        return maps

    def _stage(self, stage: Sequence[str], source: Source, first: int, last: int, flops: float) -> Iterator[np.ndarray]:
        """Yield a stage's outputs a few examples at a time; tiles run on all examples, one after the other."""
        if len(stage) == 1:
            yield from self._pieces(stage[0], source, first, last, flops)
            return
        tiles = [np.concatenate(list(self._pieces(graph, source, first, last, flops))) for graph in stage]
        yield np.concatenate(tiles, axis=1)

    def _pieces(self, graph: str, source: Source, first: int, last: int, flops: float) -> Iterator[np.ndarray]:
        path, engine = self._site.path(graph), self._site.engine
        size = engine.batch(path, self._around_bytes, source.example_bytes)
        for start in range(first, last, size):
            stop = min(start + size, last)
            self._site.progress(min(self._done / self._flops, 1.0))
            self._done += flops * (stop - start)
            yield engine.run(path, source.rows(start, stop))


class Kept:
    """Outputs of paths on some of a device's images, kept on disk from one task to the next.

    Args:
        flow: whose shelf the outputs are kept on.
        rows: indices of the images, part of the cache key.
        length: paths of other lengths are not kept.
    """

    def __init__(self, flow: Flow, rows: np.ndarray, length: int) -> None:
        self._flow, self._rows, self._length = flow, rows, length

    def find(self, path: Sequence[Block]) -> Stack | None:
        """The output that an earlier task kept; None if it is gone."""
        shape = (len(self._rows), *path[-1].out_shape)
        return self._flow.shelf.find(kept_name(path, self._rows, "path"), shape)

    def keep(self, path: Sequence[Block], maps: Stack) -> None:
        """Keep the output of a path of the wanted length, if there is room on the disk."""
        if len(path) == self._length:
            self._flow.shelf.keep(kept_name(path, self._rows, "path"), maps, spare=True)


class Prepared:
    """Stored examples prepared for a network (`fedquilt.data.inputs.prepare`) when they are read."""

    def __init__(self, x: np.ndarray, wanted: inputs.Table) -> None:
        self._x, self._wanted = x, wanted
        self.shape = (len(x), *inputs.shape(wanted, x.shape[1:]))
        self.example_bytes = 4 * prod(self.shape[1:])

    def rows(self, first: int, last: int) -> np.ndarray:
        """Prepared examples [first, last), float32."""
        return inputs.prepare(self._x[first:last], self._wanted)

    def channels(self, examples: slice, some: slice) -> np.ndarray:
        """Some channels of some prepared examples; all are prepared."""
        return self.rows(examples.start, examples.stop)[:, some]


def kept_name(path: Sequence[Block], rows: np.ndarray, what: str) -> str:
    """Cache key of a value: `what` it is, the path, and the indices of the examples."""
    digest = hashlib.sha256("/".join(block.id for block in path).encode() + b"\0" + rows.tobytes())
    return f"{what}.{digest.hexdigest()[:16]}"


def joined(maps: Source, junction: Tensors | None, block: Block) -> Source:
    """Maps resized and projected for `block` when they are read; without a junction, the maps themselves."""
    if junction is None:
        return maps
    source, beside = maps, prod(maps.shape[1:]) + block.in_shape[0] * prod(maps.shape[2:])
    if stitched.grows(maps.shape[1:], block.in_shape):  # projected, then one axis is resized after the other
        beside += block.in_shape[0] * _between_axes(maps, block.in_shape[1:])
    else:
        source = resized(maps, *block.in_shape[1:])
        beside = source.example_bytes // 4 + prod(source.shape[1:])
    return Mapped(source, lambda part: stitched.join(part, junction, block), block.in_shape, 4 * beside)


def resized(maps: Source, *sizes: int) -> Source:
    """Maps resized to other sizes when they are read."""
    return maps if maps.shape[2:] == sizes else Resized(maps, sizes)


class Resized:
    """Maps resized when they are read, a few channels at a time: an example's maps are never in memory as a whole."""

    def __init__(self, maps: Source, sizes: tuple[int, ...]) -> None:
        self._maps, self._sizes = maps, sizes
        self.shape = (*maps.shape[:2], *sizes)
        self._channel_bytes = 4 * (prod(maps.shape[2:]) + _between_axes(maps, sizes) + prod(sizes))
        self.example_bytes = self._channel_bytes * min(self._at_once(1), maps.shape[1])

    def rows(self, first: int, last: int) -> np.ndarray:
        """Resized examples [first, last), read anew at each call."""
        return self.channels(slice(first, last), slice(0, self.shape[1]))

    def channels(self, examples: slice, some: slice) -> np.ndarray:
        """Some channels of some resized examples."""
        made = np.empty((examples.stop - examples.start, some.stop - some.start, *self._sizes), np.float32)
        step = self._at_once(len(made))
        for start in range(some.start, some.stop, step):
            stop = min(start + step, some.stop)
            part = self._maps.channels(examples, slice(start, stop))
            made[:, start - some.start : stop - some.start] = images.resize(part, *self._sizes)
            del part
        return made

    def _at_once(self, examples: int) -> int:
        return max(STRIPE_BYTES // (self._channel_bytes * max(examples, 1)), 1)


def _between_axes(maps: Source, sizes: Sequence[int]) -> int:
    """Numbers in one channel that is resized along its first axis alone; 0 for series, which have one axis."""
    return prod((*sizes[:1], *maps.shape[3:])) if len(sizes) > 1 else 0


def pieces(source: Source) -> Iterator[tuple[int, np.ndarray]]:
    """Yield a whole source in pieces of about PIECE_BYTES, each with the index of its first example."""
    size = max(PIECE_BYTES // max(4 * prod(source.shape[1:]) + source.example_bytes, 1), 1)
    for start in range(0, source.shape[0], size):
        yield start, source.rows(start, min(start + size, source.shape[0]))


def sample(maps: Source, positions: np.ndarray) -> np.ndarray:
    """Channel vectors (r, c), float32, at some positions (r,), ascending, counted through all examples' maps."""
    _, c, *sizes = maps.shape
    area = prod(sizes)
    found = np.empty((len(positions), c), np.float32)
    for start, part in pieces(maps):
        here = slice(*np.searchsorted(positions, [start * area, (start + len(part)) * area]))
        example, position = np.divmod(positions[here] - start * area, area)
        found[here] = part.reshape(len(part), c, area)[example, :, position]
        del part
    return found


def positions(n: int, shape: Sequence[int], wanted: int) -> np.ndarray:
    """Positions of n maps (c, ...), one drawn from each of `wanted` equal stretches; a function of the arguments."""
    total = n * prod(shape[1:])
    wanted = min(wanted, total)
    draw = tensors.rng("positions", total).random(wanted)
    return np.minimum((np.arange(wanted) + draw) * (total / wanted), total - 1).astype(np.int64)
