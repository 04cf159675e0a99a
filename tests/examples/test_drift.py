"""The example of drift is run as a user runs it: a broker, a coordinator, three agents and a model runner."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt.tools.lab import demo

EXAMPLE = Path(__file__).parents[2] / "examples" / "drift" / "drift.py"


@pytest.mark.nightly  # waits like a user; its parts are in test_triggers.py and tests/tools/inference_server
def test_answers_are_wrong_in_the_dark_and_right_with_the_new_model(tmp_path):
    pytest.importorskip("onnxruntime")
    for name in ("job.toml", "digits.npz"):
        shutil.copy(demo.HERE / name, tmp_path)
    (tmp_path / "bundle").symlink_to(demo.HERE / "bundle")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, dark, last = (float(each) for each in re.findall(r"^right answers.*: ([\d.]+)%$", done.stdout, re.MULTILINE))
    assert first > 95
    assert last > dark + 5
    assert re.search(r"drift\D+(0\.[3-9]|1)", done.stdout)
    assert len(re.findall(r"^model-\S+ .*\bdone\b", done.stdout, re.MULTILINE)) == 2
