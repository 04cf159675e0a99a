"""Blobs by the coordinator's own HTTP server: both ways, and over the broker for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from streamed import Pair, profile
from two_sides import noise

MB = 1_000_000


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, "a", "b")
    yield made
    made.close()


def test_a_board_fetches_by_http_and_no_chunk_goes_over_the_broker(pair: Pair) -> None:
    ref, board = pair.coordinator.depot.put(noise(3 * MB)), pair.boards["a"]
    board.transfers.want("a", ref)
    pair.play(lambda: bool(board.errors))
    assert board.errors == {("a", ref.sha256): None}
    assert board.depot.load(ref.sha256) == noise(3 * MB)
    assert pair.broker.chunks == 0
    assert board.transfers.traffic_bytes("a", "dn") == 3 * MB


def test_a_board_puts_by_http_and_no_chunk_goes_over_the_broker(pair: Pair) -> None:
    board = pair.boards["a"]
    ref = board.depot.put(noise(3 * MB))
    pair.coordinator.transfers.want("a", ref)
    pair.play(lambda: bool(pair.coordinator.errors))
    assert pair.coordinator.errors == {("a", ref.sha256): None}
    assert pair.coordinator.depot.load(ref.sha256) == noise(3 * MB)
    assert pair.broker.chunks == 0
    assert pair.coordinator.transfers.traffic_bytes("a", "up") == 3 * MB


def test_a_board_that_knows_no_carrier_is_named_no_place(pair: Pair) -> None:
    ref, board = pair.coordinator.depot.put(noise(MB)), pair.boards["a"]
    pair.places.said(profile("a", "pigeon"))
    board.transfers.want("a", ref)
    pair.play(lambda: bool(board.errors))
    assert pair.broker.chunks == 4


def test_a_small_blob_comes_over_the_broker_at_once(pair: Pair) -> None:
    ref, board = pair.coordinator.depot.put(noise(1000)), pair.boards["a"]
    board.transfers.want("a", ref)
    pair.play(lambda: bool(board.errors))
    assert pair.broker.chunks == 1
