"""The README is short, and every command and line of Python in it is run, by this test or by the tutorial's."""

from __future__ import annotations

import re

import documents

PAGE = "README.md"
MOST_LINES = 120

# by whoever runs this, and by tests/tools/demo
ELSEWHERE = [
    "make demo",
    "make test",
    "fedquilt run-model fedquilt-demo/stitched.onnx fedquilt-demo/held-out.npz",
    "fedquilt demo --story",
]
BOARDS = [  # by test_tutorials.py
    "fedquilt serve --home runs --broker mqtts://broker.site:8883 --ca ca.crt --cert coordinator.crt "
    "--key coordinator.key",
    "fedquilt agent agent.toml",
    "fedquilt run train.toml --home runs",
    "fedquilt devices --home runs",
]
ON_BOARDS = ["fedquilt serve-model models --http 127.0.0.1:8080"]  # by tests/tools/runner/test_command.py
DEPLOYED = [  # by tests/end_to_end/test_rollout.py, and the last one by test_upgrade.py there
    "fedquilt deploy train --home runs --canary 5% --phases 25,100 --abort-above 10% --min-gain -0.5pt "
    "--max-latency 40ms",
    "fedquilt rollouts --home runs",
    "fedquilt deploy --rollback --home runs",
    "fedquilt upgrade agents.tar --home runs",
]
SIMULATED = [
    "fedquilt init --method fedprox --data digits --out job.toml",
    "fedquilt prepare job.toml",
    "fedquilt fleet job.toml --link memory",
    "fedquilt report job --out report.html",
]


def test_it_is_a_front_door() -> None:
    """What does not fit belongs into docs/."""
    assert len((documents.ROOT / PAGE).read_text().splitlines()) <= MOST_LINES


def test_no_command_is_left_out() -> None:
    """A new one needs a place in one of the lists above."""
    assert documents.commands(PAGE) == [*ELSEWHERE, *BOARDS, *DEPLOYED, *ON_BOARDS, *SIMULATED]
    assert set(BOARDS) <= set(documents.commands("docs/tutorials/fleet.md"))


def test_its_picture_is_there() -> None:
    """Drawn from a run of the demo."""
    (path,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (documents.ROOT / PAGE).read_text())
    text = (documents.ROOT / path).read_text()
    assert text.startswith("<svg")
    assert "FedAvg from scratch" in text
    assert len(text) < 50_000


def test_a_simulated_fleet(shell: documents.Shell) -> None:
    """From a question to a report."""
    for command in SIMULATED:
        shell.run(command)
    assert "</html>" in (shell.folder / "report.html").read_text()


def test_python(shell: documents.Shell) -> None:
    """A simulation, and a method of one's own."""
    documents.run_python(PAGE, shell.folder)
