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
    MemoryStack,
)
from fedquilt.models.stitching.stitched_network import Block

STACKS_DIVISOR = 6  # stacks in memory get one sixth of the engine's memory
MAX_CACHE_BYTES = 256 << 20  # path outputs on disk for later tasks, never more than half of the budget
PIECE_BYTES = 2 << 20  # maps read at a time where no graph sets the batch size

Junctions = Sequence[Tensors | None]


class BlockRunner:
    """Runner of one task's blocks, which reports the task's progress.

    Args:
        site: Context of the task.
        blocks: All blocks of the task. They determine the memory left for stacks.
        flops: Estimate for the whole task, for its progress.
        task_bytes: Memory of the task's own arrays.
        matrices_bytes: Largest size that the task passes to `reserve_memory`.
    """

    def __init__(
        self,
        site: ClientContext,
        blocks: Iterable[Block],
        flops: float,
        *,
        task_bytes: int = 0,
        matrices_bytes: int = 0,
    ) -> None:
        self._site, self._flops, self._done_flops = site, max(flops, 1.0), 0.0
        available_bytes, blocks = site.engine.available_bytes, list(blocks)
        largest = max(peak_memory.inference_bytes(block.resident_bytes, block.activation_bytes, 1) for block in blocks)
        largest += 4 * max(prod(block.out_shape) for block in blocks)  # and one example that is resized for it
        largest = max(largest, matrices_bytes)
        self._stacks_bytes = int(max(min(available_bytes // STACKS_DIVISOR, available_bytes - largest - task_bytes), 0))
        self._reserved_bytes = self._stacks_bytes + task_bytes
        self.shelf = ActivationCache(site.cache, self._stacks_bytes, min(site.budget_bytes // 2, MAX_CACHE_BYTES))

    def reserve_memory(self, size: int) -> None:
        """Free the engine's memory until `size` bytes are available beside the stacks and the task's arrays."""
        self._site.engine.make_room(size + self._reserved_bytes)

    def run_block(self, block: Block, source: ActivationSource, count: int | None = None) -> ActivationStack:
        """Return the output of a block for the first `count` examples, or for all."""
        count = source.shape[0] if count is None else count
        flops = block.flops / sum(len(stage) for stage in block.stages)
        output: ActivationStack | None = None
        for stage in block.stages:
            maps, output = output or source, None
            for y in self._iterate_stage_outputs(stage, maps, count, flops):
                output = output or self.shelf.make_stack((count, *y.shape[1:]))
                output.append(y)
                del y  # before the next batch runs, to free its memory
        assert output is not None, "no examples"
        return output

    def run_path(
        self, path: Sequence[Block], junctions: Junctions, source: ActivationSource, rows: np.ndarray
    ) -> ActivationStack:
        """Return the output of a path's last block on the images `rows`.

        Blocks after the longest prefix with a cached output run. The output is cached for later tasks.
        """
        start = len(path)
        maps = self._find_output(path, rows)
        while maps is None and start > 0:
            start -= 1
            maps = self._find_output(path[:start], rows) if start else None
        if start == len(path) and maps is not None:
            return maps
        for i in range(start, len(path)):
            maps = self.run_block(
                path[i], apply_junction_lazily(source if maps is None else maps, junctions[i], path[i])
            )
        assert maps is not None, "an empty path has no output"
        self.shelf.store(cache_key(path, rows, "path"), maps, spare=True)
        return maps

    def _find_output(self, path: Sequence[Block], rows: np.ndarray) -> ActivationStack | None:
        return self.shelf.find(cache_key(path, rows, "path"), (len(rows), *path[-1].out_shape))

    def _iterate_stage_outputs(
        self, stage: Sequence[str], source: ActivationSource, count: int, flops: float
    ) -> Iterator[np.ndarray]:
        if len(stage) == 1:
            yield from self._iterate_graph_outputs(stage[0], source, count, flops)
            return
        tiles = [np.concatenate([*self._iterate_graph_outputs(graph, source, count, flops)]) for graph in stage]
        yield np.concatenate(tiles, axis=1)

    def _iterate_graph_outputs(
        self, graph: str, source: ActivationSource, count: int, flops: float
    ) -> Iterator[np.ndarray]:
        path, engine = self._site.path(graph), self._site.engine
        size = engine.batch(path, self._reserved_bytes, source.example_bytes)
        for start in range(0, count, size):
            stop = min(start + size, count)
            self._site.progress(min(self._done_flops / self._flops, 1.0))
            self._done_flops += flops * (stop - start)
            yield engine.run(path, source.read_examples(start, stop))


def prepare_examples_lazily(x: np.ndarray, table: inputs.Table) -> ActivationSource:
    shape = inputs.network_input_shape(table, x.shape[1:])
    source = MemoryStack.from_array(x)
    return MappedSource(source, lambda part: inputs.prepare_inputs(part, table), shape, 4 * prod(shape))


def cache_key(path: Sequence[Block], rows: np.ndarray, kind: str) -> str:
    digest = hashlib.sha256("/".join(block.id for block in path).encode() + b"\0" + rows.tobytes())
    return f"{kind}.{digest.hexdigest()[:16]}"


def apply_junction_lazily(maps: ActivationSource, junction: Tensors | None, block: Block) -> ActivationSource:
    """Return maps that are resized and projected for `block` on reading, or `maps` if `junction` is None."""
    if junction is None:
        return maps
    in_shape, out_shape = maps.shape[1:], block.in_shape
    # The second of the two steps reads the values that the first step returns.
    is_projected_first = stitched_network.enlarges_maps(in_shape, out_shape)
    channels, sizes = (out_shape[0], in_shape[1:]) if is_projected_first else (in_shape[0], out_shape[1:])
    values = prod(in_shape) + channels * (prod(sizes) + _half_resized_size(in_shape, out_shape))
    return MappedSource(
        maps, lambda part: stitched_network.apply_junction(part, junction, block), out_shape, 4 * values
    )


def resize_maps_lazily(maps: ActivationSource, *sizes: int) -> ActivationSource:
    in_shape = maps.shape[1:]
    if in_shape[1:] == sizes:
        return maps
    out_shape = (in_shape[0], *sizes)
    values = prod(in_shape) + in_shape[0] * _half_resized_size(in_shape, out_shape)
    return MappedSource(maps, lambda part: inputs.resize_maps(part, *sizes), out_shape, 4 * values)


def _half_resized_size(in_shape: Sequence[int], out_shape: Sequence[int]) -> int:
    # Values in one channel after a resize along the first axis alone.
    return out_shape[1] * prod(in_shape[2:]) if len(out_shape) > 2 else 0


def iterate_pieces(source: ActivationSource) -> Iterator[tuple[int, np.ndarray]]:
    """Yield a source in pieces of about PIECE_BYTES, each with the index of its first example."""
    size = max(PIECE_BYTES // max(4 * prod(source.shape[1:]) + source.example_bytes, 1), 1)
    for start in range(0, source.shape[0], size):
        yield start, source.read_examples(start, min(start + size, source.shape[0]))


def sample_vectors(maps: ActivationSource, positions: np.ndarray) -> np.ndarray:
    """Return the channel vectors (r, c), float32, of maps (n, c, ...) at ascending `positions` (r,).

    Position i * area + j is pixel j of example i, where `area` is the number of pixels of a channel.
    """
    _, c, *sizes = maps.shape
    area = prod(sizes)
    vectors = np.empty((len(positions), c), np.float32)
    for start, part in iterate_pieces(maps):
        rows = slice(*np.searchsorted(positions, [start * area, (start + len(part)) * area]))
        example, position = np.divmod(positions[rows] - start * area, area)
        vectors[rows] = part.reshape(len(part), c, area)[example, :, position]
        del part
    return vectors


def draw_positions(n: int, shape: Sequence[int], count: int) -> np.ndarray:
    """Draw ascending positions, numbered as in `sample_vectors`, of n maps of `shape` (c, ...).

    The seed is fixed. One position is drawn from each of `count` equal intervals, or all are returned if there are no
    more.
    """
    total = n * prod(shape[1:])
    count = min(count, total)
    draw = tensors.seeded_rng("positions", total).random(count)
    return np.minimum((np.arange(count) + draw) * (total / count), total - 1).astype(np.int64)
