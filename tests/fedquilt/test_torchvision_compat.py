"""torchvision imports beside any torch, and no other failure is hidden."""

import subprocess
import sys

import pytest

from fedquilt.core import ModelError
from fedquilt.host.torchvision_compat import import_torchvision

WHOLE_USE = """
from fedquilt.host.torchvision_compat import import_torchvision
vision = import_torchvision()
from torchvision import datasets, models, transforms
import torch
assert import_torchvision() is vision
assert models.squeezenet1_1(weights=None).eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
"""


def test_networks_and_data_sets_import_without_a_warning():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-W", "error", "-c", WHOLE_USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_absent_torchvision_names_the_mend():
    def load(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.raises(ModelError, match=r"torchvision is not installed: pip install 'fedquilt\[train\]'"):
        import_torchvision(load)


def test_any_other_failure_comes_through():
    def load(name):
        raise RuntimeError("compiled with different CUDA major versions")

    with pytest.raises(RuntimeError, match="different CUDA major versions"):
        import_torchvision(load)
