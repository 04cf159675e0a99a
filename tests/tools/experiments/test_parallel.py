"""Runs by several processes."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt.core import FedquiltError
from fedquilt.tools.experiments import comparison


def test_each_result_comes_with_the_number_of_its_run() -> None:
    assert dict(comparison.run_in_processes(operator.floordiv, [(9, 3), (8, 2)], workers=2)) == {0: 3, 1: 4}
    assert list(comparison.run_in_processes(operator.floordiv, [])) == []


def test_what_a_run_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        dict(comparison.run_in_processes(operator.floordiv, [(1, 0)]))


RUNS = """
import os, signal, sys, time
from pathlib import Path
from fedquilt.tools.experiments import comparison
from fedquilt.tools.simulation.pool import ScratchFolder

def play(number):
    with ScratchFolder():
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    list(comparison.run_in_processes(play, [(0,), (1,)], workers=1))
"""


def test_runs_that_are_ended_clean_up_and_begin_no_others(tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text(RUNS)
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "runs.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode in (130, -signal.SIGINT)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_process_that_is_killed_is_told_in_a_sentence() -> None:
    with pytest.raises(FedquiltError, match=r"has ended, 2 at a time: .* fewer cores"):
        dict(comparison.run_in_processes(os._exit, [(9,), (9,)], workers=2))
