"""Orders for another machine: files by their content, what comes of them as bytes, and a node's own folder of files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import plain
import pytest

from fedquilt.coordinator.settings import AdversarySettings
from fedquilt.core import BlobRef, StoreError
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.simulation import adversaries
from fedquilt.tools.simulation.pool import WorkerReply, WorkOutcome
from fedquilt.tools.simulation.ray_workers import NodeFiles, pack_request, unpack_request, write_outputs

LYING = AdversarySettings(share=0.2, attack="inner_product")


def sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def ref(payload: bytes) -> BlobRef:
    return BlobRef(sha256=sha256(payload), size=len(payload))


def written(path: Path, payload: bytes) -> str:
    path.write_bytes(payload)
    return str(path)


def order(folder: Path, **changes: object) -> WorkRequest:
    task = plain.task(bundles={"model": ref(b"weights")})
    given = {
        "data": {"share": "dev-0", **adversaries.make_attack_data(LYING)},
        "bundles": {"model": written(folder / "blob", b"weights")},
        "private_state": written(folder / "mine", b"private state"),
        "cache_folder": str(folder / "cache"),
        "output_folder": str(folder),
        "file_prefix": "dev-0.",
        "max_inline_bytes": 8,
    }
    honest = written(folder / "honest", b"what others sent")
    made = WorkRequest(task=task, device="dev-0", budget_bytes=1, **{**given, **changes})  # type: ignore[arg-type]
    return adversaries.add_honest_mean(made, honest)


def test_a_sent_order_names_no_path_of_this_machine_and_the_other_one_puts_its_own_in(tmp_path: Path) -> None:
    given = order(tmp_path)
    sent, files = pack_request(given)
    assert str(tmp_path) not in repr(sent)
    assert files == {
        sha256(b"weights"): given.bundles["model"],
        sha256(b"private state"): given.private_state,
        sha256(b"what others sent"): str(tmp_path / "honest"),
    }
    there = unpack_request(sent, lambda content: f"/node/{content}", "/node/caches", "/node/out")
    assert there.bundles == {"model": f"/node/{sha256(b'weights')}"}
    assert there.private_state == f"/node/{sha256(b'private state')}"
    assert there.data == adversaries.add_honest_mean(given, f"/node/{sha256(b'what others sent')}").data
    assert (there.cache_folder, there.output_folder, there.task) == ("/node/caches/dev-0", "/node/out", given.task)


@pytest.mark.parametrize("data", [{}, adversaries.make_attack_data(LYING)])
def test_an_order_of_a_board_that_overhears_nobody_keeps_its_data(data: dict[str, object]) -> None:
    given = WorkRequest(
        task=plain.task(),
        device="dev-0",
        budget_bytes=1,
        data=data,
        bundles={},
        private_state=None,
        cache_folder="",
        output_folder="",
    )
    sent, files = pack_request(given)
    assert (sent.data, files) == (data, {})
    assert unpack_request(sent, str, "/node/caches", "/node/out").data == data


def test_what_a_node_made_lies_where_a_worker_of_this_machine_would_have_written_it(tmp_path: Path) -> None:
    """A bundle of 8 bytes and more in a file, a smaller one with the outcome, private state in its file."""
    given = order(tmp_path)
    small, large, private = b"small", b"larger than eight", b"left for the next round"
    outcome = WorkResult(
        bundles={"a": ref(small), "b": ref(large)},
        blobs={sha256(small): small, sha256(large): large},
        private=ref(private),
    )
    made = WorkerReply([WorkOutcome(outcome, False)], private_states={sha256(private): private})
    (done,) = write_outputs([given], made).outcomes
    assert done.result.blobs == {sha256(small): small}
    assert (tmp_path / f"dev-0.{sha256(large)}").read_bytes() == large
    assert (tmp_path / "dev-0.private.safetensors").read_bytes() == private


def files(node: Path, worker: str, store: dict[str, bytes], fetched: list[str], most_bytes: int = 1 << 20) -> NodeFiles:
    def fetch(reference: str) -> bytes:
        fetched.append(reference)
        return store[reference]

    return NodeFiles(node, node / worker, fetch, most_bytes)


def test_a_content_is_fetched_once_for_all_workers_of_a_node(tmp_path: Path) -> None:
    store, fetched = {"ref": b"weights"}, list[str]()
    one, two = (files(tmp_path, name, store, fetched) for name in ("one", "two"))
    first, second = (Path(each.ensure_file(sha256(b"weights"), "ref")) for each in (one, two))
    assert fetched == ["ref"]
    assert first != second
    assert first.read_bytes() == second.read_bytes() == b"weights"


def test_a_state_that_a_node_made_is_not_fetched_by_it(tmp_path: Path) -> None:
    fetched: list[str] = []
    one, two = (files(tmp_path, name, {}, fetched) for name in ("one", "two"))
    one.store_file(sha256(b"private"), b"private")
    one.evict_files([])
    assert Path(two.ensure_file(sha256(b"private"), "ref")).read_bytes() == b"private"
    assert not fetched


def test_a_full_folder_loses_what_was_used_longest_ago_and_nobody_loses_what_is_in_use(tmp_path: Path) -> None:
    """Of three contents of 4 bytes, where 8 bytes fit; a lost one is fetched again."""
    store, fetched = {"a": b"aaaa", "b": b"bbbb", "c": b"cccc"}, list[str]()
    one, two = (files(tmp_path, name, store, fetched, most_bytes=8) for name in ("one", "two"))
    in_use = Path(two.ensure_file(sha256(b"aaaa"), "a"))
    for seconds, name in enumerate(store):
        path = one.ensure_file(sha256(store[name]), name)
        os.utime(path, (seconds, seconds))
    one.evict_files([sha256(b"cccc")])
    assert {each.read_bytes() for each in (tmp_path / "files").iterdir()} == {b"bbbb", b"cccc"}
    assert in_use.read_bytes() == b"aaaa"
    assert Path(one.ensure_file(sha256(b"aaaa"), "a")).read_bytes() == b"aaaa"
    assert fetched == ["a", "b", "c", "a"]


def test_a_content_that_comes_damaged_is_refused(tmp_path: Path) -> None:
    made = files(tmp_path, "one", {"ref": b"weighty"}, [])
    with pytest.raises(StoreError, match="is damaged in the object store"):
        made.ensure_file(sha256(b"weights"), "ref")
    assert not list((tmp_path / "files").iterdir())
