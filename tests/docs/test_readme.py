"""The README is short, and every command and line of Python in it is run, by this test or by the tutorial's."""

import documents
from fedquilt.tools.lab import demo

PAGE = "README.md"
MOST_LINES = 110

MADE = ["make demo", "make test"]  # by CI and tests/tools/demo
BOARDS = [  # by test_tutorials.py
    "fedquilt serve --home runs --broker mqtts://broker.site:8883 --ca ca.crt --cert coordinator.crt "
    "--key coordinator.key",
    "fedquilt agent agent.toml",
    "fedquilt run train.toml --home runs",
    "fedquilt devices --home runs",
]
SIMULATED = [
    "fedquilt simulate flowers.csv --label kind",
    "fedquilt simulate job.toml --devices 20",
    "fedquilt report job --out report.html",
]


def test_it_is_a_front_door():
    assert len((documents.ROOT / PAGE).read_text().splitlines()) <= MOST_LINES


def test_no_command_is_left_out():
    assert documents.commands(PAGE) == [*MADE, *SIMULATED, *BOARDS]
    assert set(BOARDS) <= set(documents.commands("docs/tutorials/fleet.md"))


def test_a_simulated_fleet(shell):
    rows = [f"{row % 3 + row / 900},{row % 7},{('iris', 'rose', 'lily')[row % 3]}" for row in range(300)]
    (shell.folder / "flowers.csv").write_text("\n".join(["length,width,kind", *rows]) + "\n")
    _, shown = documents.blocks(PAGE, "text")
    documents.require_lines(shown, "".join(map(shell.run, SIMULATED)))
    assert "</html>" in (shell.folder / "report.html").read_text()


def test_the_output_of_the_demo_names_its_networks():
    shown, _ = documents.blocks(PAGE, "text")
    assert demo.STITCHED in shown
    assert demo.ALONE in shown


def test_python(shell):
    documents.run_python(PAGE, shell.folder)
