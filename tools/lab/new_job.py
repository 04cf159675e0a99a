"""First job file for a data set."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedquilt import methods
from fedquilt.core import JobError, StoreError
from fedquilt.data import inspection
from fedquilt.data.inspection import DataInspection
from fedquilt.formats import toml
from fedquilt.host import disk
from fedquilt.tools.experiments import method_pages
from fedquilt.tools.lab import demo

DIGITS: Final = "digits"  # names the handwritten digits that come with fedquilt
DEVICES: Final = 10
ROUNDS: Final = 30
SEARCH_ROUNDS: Final = 200  # at most, of a method that ends by itself
BOARDS: Final = ("jetson-nano", "jetson-orin-nano", "raspberry-pi-5", "x86-host")
DONORS: Final = {"mobilenet": "torchvision/mobilenet_v2", "squeezenet": "torchvision/squeezenet1_1"}  # of images
NEEDED: Final = {"fedlps": {"encoder": 0.0}}  # parameters without whose values a network of random weights is refused
TRAINING: Final = {"batch": 16, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}  # if a method has them
STEPS: Final = 10  # of a device in a round, by the number of epochs
SMALL_SIDE: Final = 12  # pixels of images that a fully connected network tells apart


@dataclass(frozen=True)
class NewJob:
    out: Path
    found: DataInspection
    method: str
    devices: int
    rounds: int

    @property
    def is_search(self) -> bool:
        return has_donors(self.method)

    @property
    def network(self) -> dict[str, Any]:
        """Table [model] of a network that fits the examples."""
        found = self.found
        outputs = {"classes" if found.data.get("task", "classes") == "classes" else "outputs": found.outputs}
        has_torch = importlib.util.find_spec("torch") is not None
        if (size := found.input.get("size", 0)) > SMALL_SIDE and has_torch:
            return {"name": "cnn", "channels": found.input["channels"], "size": size, **outputs}
        if len(found.shape) == 2 and not size and has_torch:
            return {"name": "conv1d", "steps": found.shape[0], "channels": found.shape[1], **outputs}
        inputs = found.input["channels"] * size**2 if size else math.prod(found.shape)
        return {"name": "mlp", "inputs": inputs, "hidden": [64 if inputs > 32 else 32], **outputs}

    @property
    def params(self) -> dict[str, Any]:
        """Chosen parameters of the method."""
        needed, kind = NEEDED.get(self.method, {}), methods.load(self.method).params
        batches = math.ceil(self.found.examples * 0.8 / self.devices / TRAINING["batch"])
        chosen = {"epochs": max(1, round(STEPS / batches)), **TRAINING, **needed}
        try:
            kind(**chosen)
        except (TypeError, ValueError):  # SCAFFOLD refuses momentum, a search trains nothing
            return needed
        return chosen

    def list_notes(self) -> list[str]:
        """Return sentences on the data and the choices."""
        network = ", ".join(f"{key} {value}" for key, value in self.network.items() if key != "name")
        if self.is_search:
            chosen = f"{self.method} from donors {' and '.join(DONORS)}"
        else:
            chosen = f"{self.method} trains {self.network['name']} ({network})"
        return [*self.found.notes, f"{chosen}, {self.rounds} rounds, {self.devices} devices"]

    def write(self, *, force: bool = False) -> None:
        """Write the job file, beside it the digits if these are the data."""
        path = self.found.data.get("path")
        if self.is_search and "channels" not in self.found.input:
            raise JobError(
                f"{self.method} begins with donors, init knows donors of images only, and examples of "
                f"{path or self.found.data['dataset']} have shape {self.found.shape}: write a job with [[donors]] of "
                "your own (docs/jobs.md), as examples/series_stitching has for time series"
            )
        text, beside = "\n".join(self._format_lines()) + "\n", self.out.with_name(find_digits().name)
        has_digits = path == str(find_digits())
        if not force:
            _require_same_or_absent(self.out, text.encode())
            if has_digits:
                _require_same_or_absent(beside, find_digits().read_bytes())
        disk.write_output(self.out, text)
        if has_digits:
            with disk.disk_errors(f"write {beside}"):
                shutil.copyfile(find_digits(), beside)

    def _format_lines(self) -> Iterator[str]:
        found, card, method = self.found, method_pages.make_card(self.method), methods.load(self.method)
        network = self.network
        name = re.sub(r"[^a-z0-9._-]+", "-", self.out.stem.lower()).strip("-._")[:40] or "job"
        yield "# A job for fedquilt; docs/jobs.md lists every key. Lines that begin with # hold defaults."
        yield ""
        yield f"name = {json.dumps(name)}"
        yield f"method = {json.dumps(self.method)}   # {card.title}"
        yield f"rounds = {self.rounds}" + ("        # at most: the job ends by itself" if self.is_search else "")
        if self.is_search:
            names = found.data.get("labels") or [str(each) for each in range(found.outputs)]
            yield f"labels = {format_value(names)}   # names of the classes in order"
        yield "# seed = 0          # everything random is drawn from it"
        if "numpy" in method.engines and network["name"] == "mlp":
            yield 'engine = "numpy"    # enough for a small network; without this line devices train with torch'
        yield ""
        yield "[params]              # of the method"
        chosen = self.params
        wide = max((len(each.name) for each in card.parameters), default=0)
        for each in card.parameters:
            about = each.about.replace("\n", " ")
            value = chosen.get(each.name, each.default)
            yield f"{'' if each.name in chosen else '# '}{each.name.ljust(wide)} = {format_value(value)}" + (
                f"   # {about}" if about else ""
            )
        yield ""
        yield "[cohort]"
        yield "# size = 0            # devices that take part in a round; 0: all"
        yield "# deadline_s = 600    # the longest that a round waits for them"
        if card.evaluates:
            yield ""
            yield "[check]"
            yield "every = 1             # rounds between evaluations on the examples that each device holds out"
        yield ""
        yield from _format_donors() if self.is_search else self._format_model(method.traits.frozen_weights)
        yield ""
        yield from self._format_data()
        yield ""
        yield "[fleet]               # what `fedquilt simulate` simulates, in turn"
        yield f"devices = {self.devices}"
        yield f"boards = {json.dumps(list(BOARDS))}"
        budget = "256MB" if network["name"] == "mlp" and not self.is_search else "1GB"
        yield f'budgets = ["{budget}"]   # memory that a task may take'

    def _format_model(self, frozen: str) -> Iterator[str]:
        yield "[model]               # docs/jobs.md lists the networks"
        for key, value in self.network.items():
            yield f"{key} = {format_value(value)}"
        if frozen:
            yield f'# weights = "FILE"    # of a pre-trained network, of which the method keeps {frozen}'
        yield ""
        yield "[input]               # scales of what the network gets"
        for key, value in self.found.input.items():
            yield f"{key} = {format_value(value)}"

    def _format_data(self) -> Iterator[str]:
        table = dict(self.found.data)
        if path := table.get("path"):
            is_digits = path == str(find_digits())
            table["path"] = find_digits().name if is_digits else os.path.relpath(path, self.out.parent)
        yield "[data]                # of simulated devices; a board of your own names its data in agent.toml"
        for key, value in table.items():
            yield f"{key} = {format_value(value)}"
        if table.get("task", "classes") == "classes":
            yield 'partition = "dirichlet"   # devices have unlike shares of the classes; "iid" makes them alike'
            yield "alpha = 0.5           # the smaller, the more unlike"
        else:
            yield 'partition = "iid"     # devices have equal shares, drawn at random'
        yield "# held = 0.2          # share of a device's examples that it does not train on"


def _require_same_or_absent(file: Path, payload: bytes) -> None:
    with disk.disk_errors(f"read {file}"):
        if file.exists() and file.read_bytes() != payload:
            raise StoreError(f"{file} exists already: --force overwrites it, --out names another file or folder")


def inspect_source(source: str, label: str) -> DataInspection:
    """Inspect a path, a name of a data set, or "digits"."""
    return inspection.inspect_data(str(find_digits()) if source == DIGITS else source, label)


def choose_devices(found: DataInspection) -> int:
    return max(1, min(DEVICES, found.examples // 4))


def choose_rounds(method: str) -> int:
    return SEARCH_ROUNDS if has_donors(method) else ROUNDS


def has_donors(method: str) -> bool:
    return "onnx" in methods.load(method).engines


def find_digits() -> Path:
    return demo.HERE / "digits.npz"


def format_value(value: Any) -> str:
    """Return a value as TOML in one line. "..." stands for None."""
    if value is None:
        return "..."
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{toml.key_text(key)} = {format_value(each)}' for key, each in value.items())} }}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _format_donors() -> Iterator[str]:
    yield "[input]               # of the donors: images are scaled to it, and standardised as ImageNet's"
    yield "channels = 3"
    yield "size = 64             # larger images are told apart better, and take more time"
    yield "mean = [0.485, 0.456, 0.406]"
    yield "std = [0.229, 0.224, 0.225]"
    for name, network in DONORS.items():
        yield ""
        yield "[[donors]]"
        yield f'name = "{name}"'
        yield f'network = {{ name = "{network}" }}'
        yield 'weights = "DEFAULT"   # torchvision\'s, which `fedquilt prepare` downloads; or a file'
