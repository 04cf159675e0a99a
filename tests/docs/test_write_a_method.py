"""The pages on methods and sensors: their code is taken from them, put into files as they say, and run."""

import dataclasses
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from waiting import LIMIT_S, wait_until

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import Aggregation, DeviceView, Hooks, Method, Step, Traits
from fedquilt.edge_agent import devices, settings
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.formats import toml
from fedquilt.testing import conformance
from fedquilt.testing.toy_networks import packed_states, point_devices, record_run, run_method, toy_bundle

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reader works; modules that are imported from there are forgotten again."""
    monkeypatch.chdir(tmp_path)
    for name in ("prox", "own", "taught", "untaught", "usb_meter", "wall_plug"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    methods.load.cache_clear()
    return tmp_path


@pytest.fixture
def prox(folder: Path) -> Method:
    (folder / "prox.py").write_text(blocks("tutorials/method.md")[0])
    return methods.load("prox:METHOD")


def test_fedprox_from_the_page_is_about_25_lines_and_ours_to_the_bit(prox, folder):
    code = (folder / "prox.py").read_text().split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    runs = [
        run_method(
            "fedprox", toy_bundle(), point_devices(), {"mu": 0.5, "lr": 0.1}, engine=NumpyEngine(1 << 40), method=method
        )
        for method in (prox, methods.load("fedprox"))
    ]
    for mine, ours in zip(*runs, strict=True):
        for name, value in ours.model.items():
            np.testing.assert_array_equal(mine.model[name], value)


@pytest.mark.parametrize("values", [Method, Aggregation, Traits, Hooks, Step])
def test_the_tables_name_only_fields(values: type):
    page = (DOCS / "write-a-method.md").read_text()
    heading = {Method: "## Fields of `Method`\n", Aggregation: "### `Aggregation`\n", Traits: "### `Traits`\n"}
    text = page.split(heading.get(values, f"| field of `{values.__name__}` |"))[1]
    rows = re.search(r"(?:^\|.*\n)+", text[text.index("|---") :], re.M)
    assert rows is not None
    named = {name for row in rows[0].splitlines() for name in re.findall(r"`(\w+)", row.split("|")[1])}
    fields = {field.name for field in dataclasses.fields(values)}
    assert named <= fields
    if values in (Hooks, Step):
        assert named == fields == set(re.findall(r"^        (\w+): ", values.__doc__ or "", re.M))


def test_the_personal_method_of_the_page_conforms_and_shares_fedavgs_model(folder):
    (folder / "own.py").write_text(blocks("write-a-method.md")[0])
    scenario, states, _, runs = record_run("own:METHOD")
    shared = record_run("fedavg")[1]
    assert packed_states(states) == packed_states(shared)
    (first, first_result), *_ = runs
    later = next(context for context, _ in runs[1:] if context.device == first.device)
    assert first.private_state == {}
    assert tensors.encode_tensors(later.private_state) == tensors.encode_tensors(first_result.private_state)
    for check in (conformance.update_contains_no_private_state, conformance.private_state_is_declared):
        check("own:METHOD")
    own = scenario.method.personal_model
    assert own is not None
    assert own(None, later) == later.private_state  # type: ignore[arg-type]
    assert own(None, first) == first.load("model")  # type: ignore[arg-type]


def test_the_distillation_of_the_page_conforms_and_leaves_statistics_to_training(folder):
    code = blocks("write-a-method.md")[1]
    (folder / "taught.py").write_text(code)
    (folder / "untaught.py").write_text(code.replace('reduction="batchmean")', 'reduction="batchmean") * 0'))
    taught, untaught = (record_run(f"{name}:METHOD")[1][-1].model for name in ("taught", "untaught"))
    assert any((taught[name] != untaught[name]).any() for name in taught)
    conformance.run_is_reproducible("taught:METHOD")
    conformance.run_works_on_network("taught:METHOD", "batch norm", unfit=False)


def test_the_expressions_on_the_page_freeze_a_layer_and_fine_tune_it(folder):
    page = (DOCS / "write-a-method.md").read_text().split("| to | write |\n")[1].split("\n\n")[0]
    name, send, freeze, train, cost = (row.rpartition("| ")[2].split("`")[-2] for row in page.splitlines()[1:])
    train = next(text for text in page.split("`") if text.startswith("client.engine.train"))
    (folder / "tuned.py").write_text(f"""
from dataclasses import replace
from fedquilt.core import Hooks, Step
from fedquilt.methods import fedavg, ft_part
from fedquilt.models import local_training

def send(state, device):
    task_spec, names = fedavg.send(state, device), {name}
    task_spec = {send}
    return {cost}

def work(task, client):
    frozen = task.params["frozen"]
    return fedavg.work(task, client, {freeze})

def check(task, client):
    network, start = task.params["network"], client.load("model")
    model, metrics = {train}
    return client.engine.evaluate(network, model, client.held_out)

METHOD = replace(fedavg.METHOD, send=send, work=work, check=check)
""")
    states = record_run("tuned:METHOD")[1]
    first, last = states[0].model, states[-1].model
    assert {name for name in first if (first[name] == last[name]).all()} == {"3.weight", "3.bias"}
    task_spec = methods.load("tuned:METHOD").send(states[0], DeviceView("a", None))
    assert task_spec.check.flops_per_example > task_spec.work.flops_per_example


def test_the_settings_on_the_pages_are_a_boards(folder):
    for page in ("tutorials/method.md", "write-a-method.md", "add-a-sensor.md"):
        lines = [text for text in blocks(page, "toml") if text.startswith("# agent.toml")]
        assert lines
        for text in lines:
            settings.parse_settings({"device": "d", "home": "h", **toml.parse_toml(text, page)})


def test_the_usb_meter_of_the_page_reads_its_file(folder):
    (folder / "usb_meter.py").write_text(blocks("add-a-sensor.md")[0])
    meter = devices.create_meter({"name": "usb_meter:UsbMeter", "path": str(folder / "told")})
    assert meter.read(0.0).total_w is None
    (folder / "told").write_text("5.1 2.0\n")
    assert (meter.read(1.0).total_w, meter.coverage, meter.read(1.0).source) == (10.2, "board", "usb meter")


class Tasmota(BaseHTTPRequestHandler):
    may = threading.Event()

    def do_GET(self) -> None:
        self.may.wait(LIMIT_S)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"StatusSNS": {"ENERGY": {"Power": 42.5}}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_wall_plug_of_the_page_is_asked_beside_the_agents_loop(folder):
    (folder / "wall_plug.py").write_text(blocks("add-a-sensor.md")[1])
    with HTTPServer(("127.0.0.1", 0), Tasmota) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        meter = devices.create_meter({"name": "wall_plug:WallPlug", "host": f"127.0.0.1:{server.server_port}"})
        assert meter.read(0.0).total_w is None
        Tasmota.may.set()
        power = wait_until(lambda: (now := meter.read(0.0)).total_w is not None and now, "the plug's watts")
        assert (power.total_w, power.source) == (42.5, "wall plug")
        server.shutdown()
