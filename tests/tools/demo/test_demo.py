"""The demo as a newcomer runs it: agents as processes, the embedded broker, real digits, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_demo_stitches_a_network_and_sets_it_beside_everything_it_has_to_beat(tmp_path: Path) -> None:
    """The file it writes classifies as the table says, in a process that has only ONNX Runtime's part of us."""
    out = tmp_path / "demo"
    command = [sys.executable, "-X", "importtime", "-m", "fedquilt.cli"]
    ran = subprocess.run(
        [*command, "demo", "--format", "json", "--out", str(out)], capture_output=True, text=True, check=True
    )
    assert " torch" not in ran.stderr  # the coordinator, the comparisons and the export need none
    result = json.loads(ran.stdout.splitlines()[-1])
    rows = {row["name"]: row for row in result["accuracy"]}
    stitched = rows["stitched by the federation"]
    *blocks, head = stitched["note"].split(" > ")
    assert head == "new head"
    assert f"chosen: {stitched['note']}\n" in ran.stdout  # as the story of the search tells it
    donors = {block.split(".")[0] for block in blocks}
    assert len(donors) >= 2, "a stitched network has blocks of more than one donor"
    for name, row in rows.items():
        if "unmodified" in name or "alone" in name:
            assert stitched["accuracy"] > row["accuracy"], name
    assert stitched["accuracy"] > 0.95
    assert len(result["devices"]) == 6
    for ledger in result["devices"].values():
        assert ledger["energy_source"].startswith("profile ")
        assert 30e6 < ledger["peak_bytes"] < 512e6
        assert ledger["down_bytes"] > 100_000
    shown = subprocess.run(
        [sys.executable, "-m", "fedquilt.cli", "run-model", str(out / "stitched.onnx"), str(out / "held-out.npz")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{100 * stitched['accuracy']:.1f}" in shown.stdout
