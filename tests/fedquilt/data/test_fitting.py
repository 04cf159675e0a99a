"""Data that a network cannot take are told before anything runs, not by every board."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import bundle, config, tensors
from fedquilt.cli import main
from fedquilt.coordinator.store import Store
from fedquilt.core import DataError
from fedquilt.data import fitting
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines import numpy_engine

MLP = {"name": "mlp", "inputs": 16, "hidden": [4], "classes": 3}
PICTURES = {"name": "plain", "channels": 1, "classes": 3, "input": {"channels": 1, "size": 8}}
SERIES: dict[str, Any] = {
    "input": {"mean": [0.0], "std": [1.0]},
    "labels": ["a", "b", "c"],
    "donors": {"wide": {"blocks": ["wide.0"]}},
    "blocks": {"wide.0": {"in_shape": [20, 3]}},
}


def stored(path: Path, *shape: int, most: int = 2) -> DataSpec:
    """A file of twelve examples of this shape, with labels up to `most`."""
    np.savez(path, x=np.zeros((12, *shape), np.float32), y=np.arange(12) % (most + 1))
    return DataSpec(path=str(path))


@pytest.mark.parametrize(
    ("meta", "shape", "most", "said"),
    [
        ({"network": MLP}, (4, 4), 2, ""),
        ({"network": MLP}, (4, 5), 2, r"\(4, 5\) hold 20 values each, network 'mlp' takes 16"),
        ({"network": MLP}, (4, 4), 3, r"labels run from 0 to 3, network 'mlp' predicts 3 classes \(0 to 2\)"),
        ({"network": PICTURES}, (5, 7, 3), 2, ""),
        ({"network": PICTURES}, (64,), 2, r"shape \(64,\), and the job's input are images"),
        ({"network": {"name": "exits", "of": PICTURES}}, (8, 8), 3, "predicts 3 classes"),
        ({"network": {"name": "mine:Net"}}, (2, 3, 4, 5), 99, ""),
        (
            {"input": {"channels": 1, "size": 8}, "labels": ["a", "b"], "donors": {}},
            (8, 8),
            2,
            "has labels for 2 classes",
        ),
        (SERIES, (20, 3), 2, ""),
        (SERIES, (24, 3), 2, r"shape \(24, 3\), donor 'wide' takes \(20, 3\)"),
    ],
)
def test_what_headers_and_labels_tell_is_told(
    tmp_path: Path, meta: dict[str, Any], shape: tuple[int, ...], most: int, said: str
) -> None:
    """With the file, what it holds and what is taken; a network of a user's own may take anything."""
    spec = stored(tmp_path / "own.npz", *shape, most=most)
    if not said:
        fitting.require_fit(meta, spec)
        return
    with pytest.raises(DataError, match=f"own.npz: .*{said}"):
        fitting.require_fit(meta, spec)


@pytest.mark.parametrize("words", [["fleet"], ["fleet", "--link", "memory"], ["compare", "--seeds", "0"]])
def test_commands_refuse_data_that_do_not_fit_and_leave_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Once, in a line."""
    first = tensors.encode(numpy_engine.init(MLP, seed=0))
    bundle.write(tmp_path / "job.bundle", {"network": MLP, "flops": 100}, {"model": first})
    stored(tmp_path / "own.npz", 4, 5)
    table = {"name": "a", "method": "fedavg", "engine": "numpy", "data": {"path": "own.npz", "partition": "iid"}}
    (tmp_path / "job.toml").write_text(config.text(table))
    home = ["--out" if words[0] == "compare" else "--home", str(tmp_path / "out")]
    assert main([words[0], str(tmp_path / "job.toml"), *words[1:], *home]) == DataError.exit_code
    told = capsys.readouterr()
    assert told.err.count("hold 20 values each") == 1
    assert "round" not in told.out
    if words[0] == "fleet":
        with Store(tmp_path / "out") as store:
            assert store.jobs() == []


def test_prepare_says_it_where_the_data_are_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they lie on the boards alone, it cannot be said."""
    pytest.importorskip("torch", reason="preparing builds the network")
    stored(tmp_path / "own.npz", 4, 5)
    table = {"name": "a", "method": "fedavg", "model": MLP, "data": {"path": "own.npz"}}
    (tmp_path / "job.toml").write_text(config.text(table))
    assert main(["prepare", str(tmp_path / "job.toml")]) == DataError.exit_code
    assert "hold 20 values each" in capsys.readouterr().err
    (tmp_path / "own.npz").unlink()
    assert main(["prepare", str(tmp_path / "job.toml")]) == 0
