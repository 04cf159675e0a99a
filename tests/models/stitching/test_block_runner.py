"""A block gives what it gives, however its examples and its weights are taken apart."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, Examples
from fedquilt.costs import peak_memory
from fedquilt.data import inputs
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.device import block_runner
from fedquilt.models.stitching.device.activations import FileStack, MemoryStack
from fedquilt.models.stitching.device.block_runner import BlockRunner
from fedquilt.models.stitching.stitched_network import Block

DRAWS = np.random.default_rng(0)
OBJECTS_BYTES = 8192 + (32 << 10)  # Python's own objects, and numpy's buffer of a sum
X = DRAWS.normal(size=(10, 3, 6, 6)).astype(np.float32)
TILES = DRAWS.normal(size=(3, 4, 27)).astype(np.float32)


class Runner:
    """Graphs as functions, `size` examples at a time."""

    name = "onnx"

    def __init__(self, size: int, room_bytes: int) -> None:
        self.size, self.available_bytes, self.runs = size, room_bytes, list[tuple[str, int]]()

    def batch(self, graph: Path, around_bytes: int = 0, example_bytes: int = 0) -> int:
        return self.size

    def make_room(self, size: int) -> None:
        pass

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        self.runs.append((graph.name, len(x)))
        if graph.name == "pool":
            return x.reshape(len(x), 3, 3, 2, 3, 2).mean(axis=(3, 5)).reshape(len(x), -1)
        if graph.name.startswith("tile"):
            return x @ TILES[int(graph.name[4:])].T
        return x + 1

    def close(self) -> None:
        pass


def block(index: int, *stages: tuple[str, ...]) -> Block:
    shape = (12,) if len(stages) > 1 else (3, 6, 6)
    return Block("a", index, "middle", stages, (), (3, 6, 6), shape, 10.0, 1, 1, 1)


TILED = block(0, ("pool",), ("tile0", "tile1", "tile2"))
WHOLE = np.concatenate([X.reshape(10, 3, 3, 2, 3, 2).mean(axis=(3, 5)).reshape(10, -1) @ tile.T for tile in TILES], 1)


def flowing(folder: Path, size: int = 4, room_bytes: int = 1 << 20) -> tuple[BlockRunner, Runner, list[float]]:
    runner, seen = Runner(size, room_bytes), list[float]()
    nobody = Examples(X[:0], np.zeros(0, np.int64))
    site = ClientContext(
        "d", 1 << 20, runner, tensors.seeded_rng(0), nobody, nobody, {}, lambda name: {}, Path, folder, seen.append
    )
    return BlockRunner(site, [TILED], 100.0), runner, seen


@pytest.mark.parametrize("size", [1, 4, 64])
@pytest.mark.parametrize("room_bytes", [0, 8 << 20])
def test_tiles_and_micro_batches_change_no_value(size, room_bytes, tmp_path):
    run, runner, seen = flowing(tmp_path, size, room_bytes)
    made = run.run_block(TILED, MemoryStack.from_array(X))
    assert isinstance(made, MemoryStack if room_bytes else FileStack)
    np.testing.assert_allclose(made.read_examples(0, 10), WHOLE, atol=1e-5)
    order = [name for name, _ in runner.runs]
    assert order == sorted(order)  # pool, tile0, tile1, tile2
    assert seen == sorted(seen)
    assert seen[-1] < 1.0


def test_what_goes_from_one_stage_to_the_next_lies_in_a_file_where_memory_is_short(tmp_path, monkeypatch):
    run, _, _ = flowing(tmp_path, 4, 0)
    shapes, make = [], run.shelf.make_stack

    def seen(shape):
        found = make(shape)
        shapes.append((shape, type(found)))
        return found

    monkeypatch.setattr(run.shelf, "make_stack", seen)
    run.run_block(TILED, MemoryStack.from_array(X))
    assert sorted(shapes) == [((10, 12), FileStack), ((10, 27), FileStack)]


@pytest.mark.parametrize(("matrices_bytes", "kind"), [(0, MemoryStack), (1 << 20, FileStack)])
def test_stacks_leave_room_for_the_matrices_of_their_task(matrices_bytes, kind, tmp_path):
    _, runner, _ = flowing(tmp_path, 4, peak_memory.SESSION_BYTES + (1 << 20))
    nobody = Examples(X[:0], np.zeros(0, np.int64))
    site = ClientContext(
        "d", 1 << 20, runner, tensors.seeded_rng(0), nobody, nobody, {}, lambda name: {}, Path, tmp_path
    )
    run = BlockRunner(site, [TILED], 1.0, matrices_bytes=matrices_bytes and matrices_bytes + peak_memory.SESSION_BYTES)
    assert isinstance(run.shelf.make_stack((10, 12)), kind)


def test_a_block_runs_on_the_first_examples_alone(tmp_path):
    run, runner, _ = flowing(tmp_path)
    made = run.run_block(TILED, MemoryStack.from_array(X), 7)
    assert made.shape == (7, 12)
    np.testing.assert_allclose(made.read_examples(0, 7), WHOLE[:7], atol=1e-5)
    assert sum(n for name, n in runner.runs if name == "pool") == 7


def test_a_path_begins_where_it_is_known_and_is_kept_for_later(tmp_path):
    path, rows = [block(i, (f"plus{i}",)) for i in range(3)], np.arange(10)
    for length, ran in ((2, ["plus0", "plus1"]), (3, ["plus2"]), (3, [])):
        run, runner, _ = flowing(tmp_path, 64)
        found = run.run_path(path[:length], [None] * length, MemoryStack.from_array(X), rows)
        assert np.array_equal(found.read_examples(0, 10), X + 1 + 1 + (length == 3))
        assert [name for name, _ in runner.runs] == ran
    run, runner, _ = flowing(tmp_path, 64)
    run.run_path(path, [None] * 3, MemoryStack.from_array(X), rows[::-1].copy())
    assert len(runner.runs) == 3


@pytest.mark.parametrize("size", [3, 6, 12])
def test_maps_are_joined_and_resized_as_they_are_asked_for(size):
    after = replace(block(1, ("plus",)), in_shape=(5, size, size))
    junction = {
        "weights": DRAWS.normal(size=(5, 3)).astype(np.float32),
        "bias": DRAWS.normal(size=5).astype(np.float32),
    }
    source = block_runner.apply_junction_lazily(MemoryStack.from_array(X), junction, after)
    assert source.shape == (10, 5, size, size)
    np.testing.assert_allclose(
        source.read_examples(2, 5), stitched_network.apply_junction(X, junction, after)[2:5], rtol=1e-6
    )
    explicit = np.einsum("kc,nchw->nkhw", junction["weights"], inputs.resize_maps(X, size, size))
    np.testing.assert_allclose(source.read_examples(0, 10), explicit + junction["bias"][:, None, None], atol=1e-5)
    assert np.array_equal(
        block_runner.resize_maps_lazily(MemoryStack.from_array(X), size, size).read_examples(1, 3),
        inputs.resize_maps(X[1:3], size, size),
    )


@pytest.mark.parametrize("wanted", [1, 17, 360, 999])
def test_positions_are_spread_over_all_images_and_taken_in_order(wanted, monkeypatch):
    found = block_runner.draw_positions(10, (3, 6, 6), wanted)
    assert len(found) == min(wanted, 360)
    assert (np.diff(found) > 0).all()
    assert found[0] >= 0
    assert found[-1] < 360
    assert np.array_equal(found, block_runner.draw_positions(10, (9, 6, 6), wanted))
    monkeypatch.setattr(block_runner, "PIECE_BYTES", 3 * X[0].nbytes)
    rows = X.transpose(0, 2, 3, 1).reshape(360, 3)
    assert np.array_equal(block_runner.sample_vectors(MemoryStack.from_array(X), found), rows[found])


def test_stored_images_are_prepared_as_they_are_asked_for():
    stored = DRAWS.integers(0, 256, size=(5, 8, 8), dtype=np.uint8)
    wanted = {"channels": 3, "size": 6, "mean": (0.5,), "std": (0.2,)}
    source = block_runner.prepare_examples_lazily(stored, wanted)
    assert source.shape == (5, 3, 6, 6)
    assert np.array_equal(source.read_examples(1, 4), inputs.prepare_images(stored, wanted)[1:4])


@pytest.mark.parametrize("size", [8, 32, 64])
def test_a_join_takes_no_more_memory_than_it_is_planned_with(tmp_path, size):
    maps = FileStack((1, 16, 32, 32), tmp_path)
    maps.append(DRAWS.normal(size=maps.shape))
    junction = {"weights": DRAWS.normal(size=(8, 16)).astype(np.float32), "bias": np.zeros(8, np.float32)}
    joined = block_runner.apply_junction_lazily(maps, junction, replace(TILED, in_shape=(8, size, size)))
    for source in (joined, block_runner.resize_maps_lazily(maps, size, size)):
        source.read_examples(0, 1)  # what is made once, such as the matrices of the resize
        tracemalloc.start()
        made = source.read_examples(0, 1)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes <= source.example_bytes + made.nbytes + OBJECTS_BYTES


def test_positions_of_series_are_sampled_and_resized_as_those_of_maps_of_one_row():
    series = DRAWS.normal(size=(10, 3, 9)).astype(np.float32)
    chosen = block_runner.draw_positions(10, (3, 9), 40)
    assert np.array_equal(chosen, block_runner.draw_positions(10, (3, 1, 9), 40))
    sampled = block_runner.sample_vectors(MemoryStack.from_array(series), chosen)
    assert np.array_equal(sampled, block_runner.sample_vectors(MemoryStack.from_array(series[:, :, None]), chosen))
    longer = block_runner.resize_maps_lazily(MemoryStack.from_array(series), 12)
    assert longer.shape == (10, 3, 12)
    np.testing.assert_allclose(
        longer.read_examples(2, 5), inputs.resize_maps(series[2:5, :, None], 1, 12)[:, :, 0], atol=1e-6
    )
