"""Which graphs a device's ONNX Runtime loads, by its release."""

import re

import made_graphs
import pytest

from fedquilt.edge_agent.engines import execution_providers
from fedquilt.onnx.file_format import RUNTIMES, explain_unsupported

runtime = pytest.importorskip("onnxruntime")


@pytest.mark.parametrize(
    ("libraries", "opset", "ir_version", "loads"),
    [
        ({"onnxruntime": "1.19.2"}, 21, 10, True),
        ({"onnxruntime": "1.19.2"}, 22, 10, False),
        ({"onnxruntime": "1.19.2"}, 21, 11, False),
        ({"onnxruntime-gpu": "1.20.0+jetson"}, 22, 10, False),
        ({"onnxruntime": "1.31.1"}, 26, 13, True),
        ({"onnxruntime": "1.31.1"}, 27, 13, False),
        ({"onnxruntime": "1.19.2", "onnxruntime-gpu": "1.24.0"}, 25, 13, True),  # the newer one may be in use
        ({"onnxruntime": "99.0"}, 99, 99, True),  # newer than any that is known: the device's own check decides
        ({"onnxruntime": "1.2.0"}, 99, 99, True),  # older than any that is known
        ({"onnxruntime": "unknown"}, 99, 99, True),
        ({}, 99, 99, True),
    ],
)
def test_a_release_loads_graphs_up_to_its_opset_and_ir_version(libraries, opset, ir_version, loads):
    said = explain_unsupported((opset, ir_version), libraries)
    assert (said == "") is loads
    if said:
        assert re.search(rf"but the model has opset {opset} and IR version {ir_version}: export it with", said)


def loads(opset: int, ir_version: int) -> bool:
    made = made_graphs.product(opsets=[("", opset)], ir_version=ir_version)
    try:
        execution_providers.create_session(made.SerializeToString())
    except Exception:  # the runtime's errors have no common base
        return False
    return True


def test_the_table_is_what_the_installed_release_loads():
    release = tuple(int(part) for part in runtime.__version__.split(".")[:2])
    assert release <= max(RUNTIMES), f"ONNX Runtime {runtime.__version__} is newer than the table"
    opset, ir_version = RUNTIMES[max(row for row in RUNTIMES if row <= release)]
    assert loads(opset, ir_version)
    assert not loads(opset + 1, ir_version)
    assert not loads(opset, ir_version + 1)
