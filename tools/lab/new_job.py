"""Job file for a data set, with a network and settings chosen from the data."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import JobError, StoreError
from fedquilt.data import inspection
from fedquilt.data.inspection import DataInspection
from fedquilt.formats import toml
from fedquilt.host import disk
from fedquilt.tools.experiments import method_pages
from fedquilt.tools.lab import demo

DIGITS: Final = "digits"  # name of the handwritten digits in the package
DEVICES: Final = 10
ROUNDS: Final = 30
SEARCH_ROUNDS: Final = 200  # maximum, because a search ends by itself
BOARDS: Final = ("jetson-nano", "jetson-orin-nano", "raspberry-pi-5", "x86-host")
DONORS: Final = {"mobilenet": "torchvision/mobilenet_v2", "squeezenet": "torchvision/squeezenet1_1"}  # of images
REQUIRED_PARAMS: Final = {"fedlps": {"encoder": 0.0}}  # without which a method refuses random weights
TRAINING: Final = {"batch": 16, "lr": 0.05, "momentum": 0.9}  # if the method accepts these parameters
WEIGHT_DECAY: Final = {"regression": 0.1, "classes": 0.03, "labels": 0.03}  # by task, for few examples
MIN_EXAMPLES: Final = 2  # of a device
MANY_EXAMPLES = 20_000  # more examples make rounds of a simulation slow
FEW_EXAMPLES: Final = 400  # up to which noise is learned without a strong weight decay
STEPS: Final = 10  # of a device per round, reached by the number of epochs
SMALL_SIDE: Final = 12  # largest image for a fully connected network


@dataclass(frozen=True)
class NewJob:
    """Job to write. Raises JobError if a search has no images, or devices too few examples."""

    path: Path
    data: DataInspection
    method: str
    devices: int
    rounds: int

    def __post_init__(self) -> None:
        source, examples = self.data.data.get("path") or self.data.data["dataset"], self.data.examples
        if self.is_search and "channels" not in self.data.input:
            problem = f"examples of {source} have shape {self.data.shape}"
            fix = "write your own [[donors]] (docs/jobs.md, examples/series_stitching)"
            raise JobError(f"{self.method} needs donors, which `init` has only for images, but {problem}: {fix}")
        most_devices = max(1, examples // MIN_EXAMPLES)
        if self.devices > most_devices:
            problem = f"{examples} examples are too few for {self.devices} devices"
            raise JobError(f"{source}: {problem}: use --devices {most_devices} or fewer")

    @property
    def is_search(self) -> bool:
        return has_donors(self.method)

    @property
    def network(self) -> dict[str, Any]:
        data = self.data
        outputs = {"classes" if data.data.get("task", "classes") == "classes" else "outputs": data.outputs}
        has_torch = importlib.util.find_spec("torch") is not None
        if (size := data.input.get("size", 0)) > SMALL_SIDE and has_torch:
            return {"name": "cnn", "channels": data.input["channels"], "size": size, **outputs}
        if len(data.shape) == 2 and not size and has_torch:
            return {"name": "conv1d", "steps": data.shape[0], "channels": data.shape[1], **outputs}
        inputs = data.input["channels"] * size**2 if size else math.prod(data.shape)
        return {"name": "mlp", "inputs": inputs, "hidden": [64 if inputs > 32 else 32], **outputs}

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the method that differ from its defaults."""
        required = REQUIRED_PARAMS.get(self.method, {})
        batches = math.ceil(self.data.examples * 0.8 / self.devices / TRAINING["batch"])
        training = {"epochs": max(1, round(STEPS / batches)), **TRAINING, "weight_decay": self.weight_decay}
        return {**settings.select_shared_params(self.method, training, required), **required}

    @property
    def weight_decay(self) -> float:
        largest = WEIGHT_DECAY[self.data.data.get("task", "classes")]
        return float(f"{largest * min(1, FEW_EXAMPLES / self.data.examples):.2g}")

    def list_notes(self) -> list[str]:
        network = ", ".join(f"{key} {value}" for key, value in self.network.items() if key != "name")
        if self.is_search:
            choice = f"{self.method} from donors {' and '.join(DONORS)}"
        else:
            choice = f"{self.method} trains {self.network['name']} ({network})"
        is_small_table = "channels" not in self.data.input and self.data.examples < FEW_EXAMPLES
        notes = [*self.data.notes, f"{choice}, {self.rounds} rounds, {self.devices} devices"]
        if is_small_table:
            notes.append(f"with {self.data.examples} examples a linear model may do as well")
        if self.data.examples > MANY_EXAMPLES:
            fewer = MANY_EXAMPLES // 2
            notes.append(f"for a faster trial, add limit = {fewer} to [data], the number of examples to draw")
        return notes

    def write(self, *, force: bool = False) -> None:
        """Write the job file, and the digits into the same folder if they are the data.

        Raise StoreError if a file with other content exists and `force` is false.
        """
        text, digits_copy = "\n".join(self._format_lines()) + "\n", self.path.with_name(find_digits().name)
        has_digits = self.data.data.get("path") == str(find_digits())
        if not force:
            _require_same_or_absent(self.path, text.encode(), self._suggest_path().name)
            if has_digits:
                _require_same_or_absent(digits_copy, find_digits().read_bytes())
        disk.write_output(self.path, text)
        if has_digits:
            with disk.disk_errors(f"write {digits_copy}"):
                shutil.copyfile(find_digits(), digits_copy)

    def _suggest_path(self) -> Path:
        """Return the path of a file that does not exist, named after the data."""
        stem = Path(str(self.data.data.get("path") or self.data.data["dataset"])).stem
        names = (f"{stem}{f'-{number}' if number > 1 else ''}.toml" for number in itertools.count(1))
        return next(path for path in map(self.path.with_name, names) if not path.exists())

    def _format_lines(self) -> Iterator[str]:
        data, card, method = self.data, method_pages.make_card(self.method), methods.load(self.method)
        network = self.network
        name = re.sub(r"[^a-z0-9._-]+", "-", self.path.stem.lower()).strip("-._")[:40] or "job"
        yield "# A job for fedquilt; docs/jobs.md lists every key. Lines that begin with # are defaults."
        yield ""
        yield f"name = {json.dumps(name)}"
        yield f"method = {json.dumps(self.method)}   # {card.title}"
        yield f"rounds = {self.rounds}" + ("        # at most: the job ends by itself" if self.is_search else "")
        if self.is_search:
            names = data.data.get("labels") or [str(parameter) for parameter in range(data.outputs)]
            yield f"labels = {toml.format_value(names)}   # names of the classes in order"
        yield "# seed = 0          # of all random numbers"
        if "numpy" in method.engines and network["name"] == "mlp":
            yield 'engine = "numpy"    # enough for a small network; without this line devices train with torch'
        yield ""
        yield "[params]              # of the method"
        params = self.params
        width = max((len(parameter.name) for parameter in card.parameters), default=0)
        for parameter in card.parameters:
            description = parameter.about.replace("\n", " ")
            value = params.get(parameter.name, parameter.default)
            text = "..." if value is None else toml.format_value(value)
            yield f"{'' if parameter.name in params else '# '}{parameter.name.ljust(width)} = {text}" + (
                f"   # {description}" if description else ""
            )
        yield ""
        yield "[cohort]"
        yield "# size = 0            # devices in a round; 0: all"
        yield "# deadline_s = 600    # limit of a round in seconds"
        yield "quorum = 0.5          # share of the devices that is enough at the limit"
        if card.evaluates:
            yield ""
            yield "[check]"
            yield "every = 1             # rounds between evaluations on the examples that each device holds out"
        yield ""
        yield from _format_donors() if self.is_search else self._format_model(method.traits.frozen_weights)
        yield ""
        yield from self._format_data()
        yield ""
        yield "[fleet]               # devices of `fedquilt simulate`; boards and budgets take turns"
        yield f"devices = {self.devices}"
        yield f"boards = {json.dumps(list(BOARDS))}"
        budget = "256MB" if network["name"] == "mlp" and not self.is_search else "1GB"
        yield f'budgets = ["{budget}"]   # memory budget of a task'

    def _format_model(self, frozen: str) -> Iterator[str]:
        yield "[model]               # docs/jobs.md lists the networks"
        for key, value in self.network.items():
            yield f"{key} = {toml.format_value(value)}"
        if frozen:
            yield f'# weights = "FILE"    # of a pre-trained network, of which the method keeps {frozen}'
        yield ""
        yield "[input]               # scales of what the network gets"
        for key, value in self.data.input.items():
            yield f"{key} = {toml.format_value(value)}"

    def _format_data(self) -> Iterator[str]:
        table = dict(self.data.data)
        if path := table.get("path"):
            is_digits = path == str(find_digits())
            table["path"] = find_digits().name if is_digits else os.path.relpath(path, self.path.parent)
        yield "[data]                # of simulated devices; a board of your own names its data in agent.toml"
        for key, value in table.items():
            yield f"{key} = {toml.format_value(value)}"
        if table.get("task", "classes") == "classes":
            yield 'partition = "dirichlet"   # shares of the classes differ between devices; with "iid" they are equal'
            yield "alpha = 0.5           # smaller values make shares differ more"
        else:
            yield 'partition = "iid"     # devices have equal shares, drawn at random'
        yield "# held = 0.2          # share of a device's examples held out for evaluations"


def _require_same_or_absent(file: Path, payload: bytes, new_name: str = "FILE.toml") -> None:
    run = f", run it by `fedquilt simulate {file}`" if file.suffix == ".toml" else ""
    with disk.disk_errors(f"read {file}"):
        if file.exists() and file.read_bytes() != payload:
            raise StoreError(f"{file} exists already with other content: add --out {new_name}{run}, or add --force")


def inspect_source(source: str, label: str) -> DataInspection:
    """Return what a path, a data set's name or "digits" contains. `label` is the column of labels."""
    return inspection.inspect_data(str(find_digits()) if source == DIGITS else source, label)


def plan_simulation(path: Path, source: str, label: str = "", devices: int | None = None) -> NewJob:
    data = inspect_source(source, label)
    return NewJob(path, data, "fedavg", devices or choose_devices(data), ROUNDS)


def make_simulation_settings(source: str, label: str, devices: int | None) -> JobSettings:
    with tempfile.TemporaryDirectory() as folder:
        job = plan_simulation(Path(folder, "job.toml"), source, label, devices)
        job.write()
        return settings.load_job(job.path)


def choose_devices(data: DataInspection) -> int:
    return max(1, min(DEVICES, data.examples // 4))


def choose_rounds(method: str) -> int:
    return SEARCH_ROUNDS if has_donors(method) else ROUNDS


def has_donors(method: str) -> bool:
    return "onnx" in methods.load(method).engines


def find_digits() -> Path:
    return demo.HERE / "digits.npz"


def _format_donors() -> Iterator[str]:
    yield "[input]               # of the donors: images are scaled to this size, and standardised like ImageNet's"
    yield "channels = 3"
    yield "size = 64             # larger images give a higher accuracy, and take more time"
    yield "mean = [0.485, 0.456, 0.406]"
    yield "std = [0.229, 0.224, 0.225]"
    for name, network in DONORS.items():
        yield ""
        yield "[[donors]]"
        yield f'name = "{name}"'
        yield f'network = {{ name = "{network}" }}'
        yield 'weights = "DEFAULT"   # torchvision\'s, which `fedquilt prepare` downloads; or a file'
