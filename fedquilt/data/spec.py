"""The `[data]` table of a job or an agent: source of examples, and a device's share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fedquilt.core import JobError, TaskKind
from fedquilt.formats import toml
from fedquilt.host import sysfs

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Above0 = Annotated[float, Meta(gt=0)]
TABLES = (".csv", ".tsv", ".parquet")
Columns = str | tuple[str, ...]
AUTO: Final = "auto"  # stands for all words of a column in the training data (fedquilt.data.reading_settings)
SKLEARN: Final = "sklearn/"  # prefix of scikit-learn's data sets: "sklearn/iris"
SYNTHETIC: Final = ("fedpews-32k", "fedpews-3.2k")  # generated data sets (fedquilt.data.synthetic)
HOW = ("task", "target", "labels", "categories", "fill", "column", "audio", "text", "windows", "size", "depth")
"""Keys that determine how a file is read. A [test] table with its own path inherits these keys from [data]."""


def is_builtin_dataset(name: str) -> bool:
    """Return whether a data set belongs to fedquilt or scikit-learn, rather than to a plug-in."""
    return name in SYNTHETIC or name.startswith(SKLEARN)


class Audio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rate: Positive = 16000  # samples per second of every recording
    seconds: Above0 = 1.0  # longer recordings are cut, shorter ones end in silence
    mels: Positive = 40  # frequency bands
    frame_ms: Above0 = 25.0  # length of the sound in one frame
    hop_ms: Above0 = 10.0  # time between the starts of two frames


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    vocabulary: str | tuple[str, ...]  # file with a token in each line, or the tokens
    length: Positive = 64  # tokens of an example; longer texts are cut, shorter ones padded


class Windows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings for cutting a table's rows, one per time step, into examples (steps, features)."""

    steps: Positive
    stride: Natural = 0  # rows between the beginnings of two windows; 0: `steps`, without overlap


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean and std of each number to predict. A network learns (y - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[Above0, ...]


class Domains(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Simulated domain shift of images by device. Share i uses entry i of each list, modulo its length."""

    rotation: Annotated[tuple[Annotated[float, Meta(ge=-360, le=360)], ...], Meta(min_length=1)] = (0.0,)
    """Degrees, counter-clockwise."""
    noise: Annotated[tuple[Annotated[float, Meta(ge=0, le=1)], ...], Meta(min_length=1)] = (0.0,)
    """Standard deviation, as a share of the largest level."""
    brightness: Annotated[tuple[Annotated[float, Meta(ge=0, le=10)], ...], Meta(min_length=1)] = (1.0,)
    """Factor."""

    def values_of_share(self, share: int) -> dict[str, float]:
        table = msgspec.structs.asdict(self)
        return {name: share_values[share % len(share_values)] for name, share_values in table.items()}


class ExampleSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    labels_from: Natural  # class of the whole data set that the source calls class 0; sources may share classes
    x: str = ""
    y: str = ""
    dataset: str = ""
    download: bool = False


def describe_path_problem(path: Path) -> str:
    """Return why a file or folder of examples cannot be opened, or ""."""
    if sysfs.is_forbidden(path):
        return f"this user may not read the data {path}: change its owner or mode (`ls -ld {path}`)"
    if os.path.exists(path):  # `Path.exists` raises some errors of the disk
        return ""
    hint = ": set [data] path to a .npz or IDX file, a table, or a folder of images by class"
    return f"no data at {path}{toml.suggest_file(path) or hint}"


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Source of the examples, and this device's share.

    The source is exactly one of `path`, `sources` and `dataset`. Devices of a simulated fleet of n get the
    same table, with `share = i` and `shares = n` for device i.
    """

    path: str = ""  # file or folder; for torchvision its root
    split: str = "train"
    x: Columns = ""  # npz: name of the array of inputs; default x_<split>, else x. Tables: columns; default all others
    y: Columns = ""  # npz: name of the array of labels; default y_<split>, else y. Tables: columns; default "y"
    task: TaskKind = "classes"  # kind of label: a class, real numbers, or several labels of 0 or 1
    target: Target | None = None  # regression: scale of the labels; None: unscaled
    labels: tuple[str, ...] = ()  # names of classes or labels, in order; of an .npz: values of y, or names of 0, 1, ...
    categories: dict[str, tuple[str, ...] | Literal["auto"]] = {}
    """Tables: column of words -> the words, each an input of 0 or 1; in a job "auto" for those of the training data."""
    fill: float | dict[str, float] | None = None  # for missing numbers, or by column; None: they are an error
    column: str = ""  # tables: user of each example; npz: the array of users; folders by class: a name for their users
    audio: Audio | None = None
    text: Text | None = None
    windows: Windows | None = None
    dataset: str = ""  # torchvision: class, as "CIFAR10"; without a path "sklearn/iris", a plug-in's or SYNTHETIC
    download: bool = False  # torchvision: download the data set if it is missing
    sources: tuple[ExampleSource, ...] = ()  # a mixture, in this order
    size: Natural = 0  # scale images to size x size; 0: unchanged, all alike
    depth: Annotated[int, Meta(ge=0, le=16)] = 0  # bits of a grey level in image files, 9 to 16; 0: 8-bit images
    limit: Natural = 0  # number of examples to use, drawn by the seed; 0: all
    per_class: Natural | dict[str, Natural] = (
        0  # largest number of examples of each class, not with `limit`; or by split
    )
    held: Annotated[float, Meta(ge=0, lt=1)] = 0.2  # fraction of the device's examples that is held out
    groups: Literal["source"] | tuple[tuple[Natural, ...], ...] = ()
    """Groups of classes, or one group for each source. Devices are split into blocks of nearly equal size, one block
    for each group, and `partition` applies within a group."""
    partition: Literal["all", "iid", "dirichlet", "classes", "shards", "quantity", "column"] = "all"
    share: Natural = 0  # of this device, from 0
    shares: Positive = 1
    alpha: Annotated[float, Meta(gt=0)] = 0.5
    """dirichlet: concentration; quantity: exponent of sizes. Small values differ, large ones approach iid."""
    min_size: Positive = 2  # dirichlet, quantity: smallest share
    classes: Positive = 2  # classes: number for each device
    domains: Domains | None = None  # images
    seed: Natural = 0

    def __post_init__(self) -> None:
        sources = [name for name in ("path", "sources") if getattr(self, name)]
        if not sources and self.dataset:
            sources = ["dataset"]
        if len(sources) != 1:
            raise ValueError(f"one of path, sources and dataset is required, not {' and '.join(sources) or 'none'}")
        for name in ("x", "y", "dataset", "download", "column"):
            if sources == ["dataset"] and name == "dataset":
                continue
            if sources != ["path"] and getattr(self, name) not in ("", False):
                raise ValueError(f"{name} requires path{', or set it in each source' * (sources == ['sources'])}")
        if self.share >= self.shares:
            raise ValueError(f"share {self.share} of {self.shares}: shares are counted from 0 to {self.shares - 1}")
        if 0 < self.depth < 9:
            raise ValueError(f"depth = {self.depth}: leave it out for images of up to 8 bits, or set 9 to 16")
        if self.is_synthetic and self.size:
            raise ValueError(f"size is for images, but {self.dataset} has points: leave size out")
        if self.limit and self.per_class:
            raise ValueError("limit and per_class are both set: leave one out")
        if self.groups == "source":
            if len(self.sources) < 2:
                raise ValueError('groups = "source" requires at least two sources')
        elif self.groups:
            listed_classes = [kind for group in self.groups for kind in group]
            if not all(self.groups) or len(set(listed_classes)) < len(listed_classes):
                raise ValueError("groups has an empty group or a repeated class: list each class in one group")
        if self.target is not None and self.task != "regression":
            raise ValueError(f'`target` is set for task = {self.task!r}: leave it out, or set task = "regression"')
        self._require_unique_names()
        self._require_classes()
        if sum(option is not None for option in (self.audio, self.text, self.windows)) > 1:
            raise ValueError("more than one of audio, text and windows is set: keep the kind of your examples")
        if self.domains is not None and (self.audio or self.text or self.windows or self.is_synthetic):
            raise ValueError("domains changes images, and these examples are none: leave domains out")
        if self.partition == "column" and (not self.column or self.groups):
            raise ValueError('partition = "column" requires column = "..." and no groups')

    def _require_unique_names(self) -> None:
        # A repeated column or word would be an input or class that counts twice or never.
        lists = {"x": self.x, "y": self.y, "labels": self.labels}
        lists |= {f"categories.{column}": categories_ for column, categories_ in self.categories.items()}
        for key, names in lists.items():
            if not isinstance(names, str) and (repeated := [name for name in names if names.count(name) > 1]):
                raise ValueError(f"{key}: {repeated[0]!r} is named twice; name it once")

    def _require_classes(self) -> None:
        if self.task == "classes":
            return
        by_class = [name for name in ("per_class", "groups", "sources", "is_synthetic") if getattr(self, name)]
        if self.partition in ("dirichlet", "classes", "shards"):
            by_class.append(f"partition = {self.partition!r}")
        if by_class:
            raise ValueError(
                f"task = {self.task!r} has no classes, which {by_class[0]} requires: leave it out; partition may be "
                '"all", "iid", "quantity" or "column"'
            )

    @property
    def is_synthetic(self) -> bool:
        return not self.path and self.dataset in SYNTHETIC

    def list_paths(self) -> list[Path]:
        """Return the files and folders of the data, without those that are downloaded if they are missing."""
        sources: tuple[DataSpec | ExampleSource, ...] = (self, *self.sources)
        return [Path(source.path) for source in sources if source.path and not source.download]

    def find_path_problem(self) -> str:
        return next(filter(None, map(describe_path_problem, self.list_paths())), "")

    @property
    def source_name(self) -> str:
        return (
            self.path
            or (f"data set {self.dataset!r}" if self.dataset else "")
            or " + ".join(source.path for source in self.sources)
        )

    @classmethod
    def parse(cls, table: Mapping[str, Any], location: str = "[data]") -> DataSpec:
        spec = toml.convert_table(table, cls, location)
        for column, categories_ in spec.categories.items():
            if categories_ == AUTO:
                raise JobError(
                    f'{location} categories.{column} = "{AUTO}" is only possible in a job file: list the words that '
                    "`fedquilt prepare` prints, so that all devices have the same inputs"
                )
        return spec
