"""Files of a task that are not what they were stored with, whenever that happens: refused by name, not worked with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from children import METHODS, MODEL, Place, child, run_request
from msgspec.structs import replace

from fedquilt.arrays import tensors
from fedquilt.core import BlobRef, Encoding, StoreError
from fedquilt.edge_agent.task import main
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, WorkRequest, WorkResult

WORK = """
from pathlib import Path
def work(task, site):
    model = site.load("model")
    for file in task.params["flips"]:
        kept = bytearray(Path(file).read_bytes())
        kept[-1] ^= 1
        Path(file).write_bytes(kept)
    steps = {name: np.arange(value.size, dtype=np.float32).reshape(value.shape) ** 2 for name, value in model.items()}
    return ClientResult({"model": {name: value + steps[name] for name, value in model.items()}}, 1.0)
"""
PAYLOAD = tensors.encode_tensors(MODEL)


@pytest.fixture
def moving(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place whose method answers with its model moved, after it has flipped a bit in some files."""
    monkeypatch.setitem(METHODS, "moving", WORK)
    return place


def order(
    place: Place, *, flips: tuple[str, ...] = (), codec: str = "int8", private: str | None = None, sha256: str = ""
) -> WorkRequest:
    """A task as an agent gives it; int8 reads the model again when the work is done."""
    ref = BlobRef(sha256=hashlib.sha256(PAYLOAD).hexdigest(), size=len(PAYLOAD))
    made = place.order("moving", wire=Encoding(codec=codec), private=private)
    made.task.params["flips"] = list(flips)
    return replace(made, task=replace(made.task, bundles={"model": ref}), verify_bundles=True, private_sha256=sha256)


def done(place: Place, given: WorkRequest) -> WorkResult:
    with child(place.command()) as worker:
        return run_request(worker, given)


def test_a_model_that_has_changed_since_the_agent_opened_it_is_not_worked_with(moving: Place) -> None:
    model = moving.folder / "model"
    assert done(moving, order(moving, codec="raw")).code == "ok"
    changed = bytearray(PAYLOAD)
    changed[-1] ^= 1
    model.write_bytes(changed)
    outcome = done(moving, order(moving, codec="raw"))
    assert (outcome.code, outcome.bundles) == ("disk", {})
    assert f"{model} is damaged" in outcome.reason


def test_a_model_that_is_opened_by_its_path_is_compared_with_its_hash_before(moving: Place) -> None:
    given = order(moving, codec="raw")
    assert main._verified_bundle_file(given, "model") == moving.folder / "model"
    model = moving.folder / "model"
    changed = bytearray(model.read_bytes())
    changed[-1] ^= 1
    model.write_bytes(changed)
    with pytest.raises(StoreError, match="is damaged"):
        main._verified_bundle_file(given, "model")
    assert main._verified_bundle_file(replace(given, verify_bundles=False), "model") == model


def test_a_model_that_changes_while_a_task_works_is_no_base_of_its_update(moving: Place) -> None:
    outcome = done(moving, order(moving, flips=(str(moving.folder / "model"),)))
    assert (outcome.code, outcome.bundles) == ("disk", {})
    assert f"{moving.folder / 'model'} is damaged" in outcome.reason


def test_private_state_that_changes_while_a_task_works_is_not_added_to_its_update(moving: Place) -> None:
    first = order(moving)
    assert done(moving, first).code == "ok"
    private = Path(first.output_folder) / PRIVATE_FILE
    sha256 = hashlib.sha256(private.read_bytes()).hexdigest()
    assert np.any(tensors.read_tensors(private)["unsent/model/1.weight"])
    calm = done(moving, order(moving, private=str(private), sha256=sha256))
    assert calm.code == "ok"
    outcome = done(moving, order(moving, private=str(private), sha256=sha256, flips=(str(private),)))
    assert (outcome.code, outcome.bundles) == ("disk", {})
    assert f"{private} is damaged" in outcome.reason
