"""The `[data]` table of a job or an agent: where examples come from, and which of them are a device's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fedquilt import config

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Format = Literal["auto", "npz", "idx", "folder", "torchvision"]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of several places that examples come from."""

    path: str
    labels_from: Natural  # its class 0 is this class of the whole; two with the same number share their classes
    format: Format = "auto"
    x: str = ""
    y: str = ""
    dataset: str = ""
    download: bool = False


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where examples are, and which are this device's.

    One of `path`, `sources`, `synthetic` and `dataset` says where from. A simulated fleet of n devices gives all the
    same table, and device i `share = i`, `shares = n`.
    """

    path: str = ""  # file or folder; for torchvision its root
    format: Format = "auto"  # auto: by what is at the path
    split: str = "train"
    x: str = ""  # npz: name of the array of inputs; default x_<split>, else x
    y: str = ""  # npz: name of the array of labels; default y_<split>, else y
    dataset: str = (
        ""  # without a path another package's, by entry point or module:name; with one torchvision's, "CIFAR10"
    )
    download: bool = False  # torchvision: fetch it if it is not there
    labels_from: Natural = 0  # what the path's class 0 is called: where a board has but one source of a mixture
    sources: tuple[Source, ...] = ()  # a mixture, in this order
    synthetic: Literal["", "fedpews-32k", "fedpews-3.2k"] = ""  # drawn by the seed: needs no file
    size: Natural = 0  # scale images to size x size; 0: as they are, all alike
    limit: Natural = 0  # use so many of all examples, drawn by the seed; 0: all
    per_class: Natural | dict[str, Natural] = 0  # instead, so many of each class at most; or by split
    held: Annotated[float, Meta(ge=0, lt=1)] = 0.2  # share of the device's own that is held out
    groups: Literal["source"] | tuple[tuple[Natural, ...], ...] = ()
    """Classes, or sources, that no two devices of different groups have in common: devices are split among the
    groups in blocks as even as can be, and `partition` is then among the devices of each group."""
    partition: Literal["all", "iid", "dirichlet", "classes", "shards"] = "all"
    share: Natural = 0  # this device's, counted from 0
    shares: Positive = 1
    alpha: Annotated[float, Meta(gt=0)] = 0.5  # dirichlet: concentration; small is unlike, large is like iid
    min_size: Positive = 2  # dirichlet: draw again until the smallest share has so many
    classes: Positive = 2  # classes: how many each device has
    shards: Positive = 2  # shards: how many pieces of the examples in order of class each device has
    seed: Natural = 0

    def __post_init__(self) -> None:
        given = [name for name in ("path", "sources", "synthetic") if getattr(self, name)]
        if not given and self.dataset:
            given = ["dataset"]
        if len(given) != 1:
            raise ValueError(
                f"one of path, sources, synthetic and dataset is wanted, not {' and '.join(given) or 'none'}"
            )
        for name in ("format", "x", "y", "dataset", "download", "labels_from"):
            if given == ["dataset"] and name in ("dataset", "labels_from"):
                continue
            if given != ["path"] and getattr(self, name) not in ("", "auto", 0):
                raise ValueError(f"{name} goes with path{', or into each source' * (given == ['sources'])}")
        if self.synthetic and self.size:
            raise ValueError("size is for images, not for synthetic points")
        if self.limit and self.per_class:
            raise ValueError("limit and per_class: one of the two")
        if self.groups == "source":
            if len(self.sources) < 2:
                raise ValueError('groups = "source" needs two sources or more')
        elif self.groups:
            named = [kind for group in self.groups for kind in group]
            if not all(self.groups) or len(set(named)) < len(named):
                raise ValueError("groups: each lists a class or more, and no class is in two")

    @property
    def where(self) -> str:
        """Where examples come from, for messages."""
        return (
            self.path
            or self.synthetic
            or (f"data set {self.dataset!r}" if self.dataset else "")
            or " + ".join(source.path for source in self.sources)
        )

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str = "[data]") -> DataSpec:
        """The spec in a `[data]` table, or in another that is like it.

        Raises:
            JobError: says which key is wrong, what is expected there, and which keys there are.
        """
        return config.convert(table, cls, where)
