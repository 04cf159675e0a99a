"""Alignment of a donor's classes with the labels of a job (`align` and `classes` of [[donors]])."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedquilt.core import DataError, JobError, ModelError

Groups = tuple[tuple[int, ...], ...]  # for each label its classes
Align = str | Groups | dict[str, tuple[int | str, ...]]

# ImageNet-1K has no deer (hartebeest, impala and gazelle stand in) and one horse (sorrel)
_IMAGENET_CIFAR10: Groups = (
    (404, 895),  # airplane
    (436, 468, 511, 609, 627, 656, 661, 751, 817),  # automobile
    (*range(7, 25), *range(80, 101), *range(127, 147)),  # bird
    tuple(range(281, 286)),  # cat
    tuple(range(351, 354)),  # deer
    tuple(range(151, 269)),  # dog
    tuple(range(30, 33)),  # frog
    (339,),  # horse
    (403, 484, 510, 554, 625, 628, 724, 780, 814, 871, 914),  # ship
    (555, 569, 675, 717, 864, 867),  # truck
)

KNOWN: Mapping[str, Callable[[int], Groups]] = {
    "identity": lambda classes: tuple((i,) for i in range(classes)),  # class i means label i
    "imagenet-cifar10": lambda classes: _IMAGENET_CIFAR10,
}


def align_labels(
    align: Align, names: str | None, classes: int, labels: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> list[list[int]]:
    """Return for each label the numbers of the classes that have its meaning.

    Args:
        align: Class numbers of each label in order, a table of numbers and class names by label, a name in KNOWN, or
            "names". With "names" a class belongs to a label if one of its names is the label or ends in the label as
            separate words ("tiger cat" is a cat, "catamaran" is not), in singular or plural.
        names: File with one class per line and commas between synonyms, "imagenet" for the list of torchvision, or
            None if only numbers are given.
        classes: Number of classes of the donor.
        labels: Labels of the job.
        say: Function that prints the classes found by name, one line per label, for review.
    """
    if align == "names":
        found = _match_classes_by_name(labels, _read_class_names(names, classes))
    elif isinstance(align, str):
        if align not in KNOWN:
            known = ", ".join([*KNOWN, "names"])
            raise JobError(f"align {align!r} is unknown; there are: {known}")
        found = [list(group) for group in KNOWN[align](classes)]
    elif isinstance(align, Mapping):
        found = _match_classes_by_table(align, labels, names, classes)
    else:
        found = [list(group) for group in align]
    if len(found) != len(labels):
        raise JobError(f"align is for {len(found)} labels, the job has {len(labels)}")
    given = [number for group in found for number in group]
    odd = [number for number in given if not 0 <= number < classes or given.count(number) > 1]
    if odd:
        there = 0 <= odd[0] < classes
        which = " and ".join(repr(label) for label, group in zip(labels, found, strict=True) if odd[0] in group)
        why = f"is there twice, for {which}" if there else f"the donor does not have (it has {classes})"
        raise ModelError(f"align names class {odd[0]}, which {why}: give `align` as a table that says what it means")
    if align == "names":
        told = _read_class_names(names, classes)
        for label, group in zip(labels, found, strict=True):
            say(f"{label}: {'; '.join(f'{number} {told[number]}' for number in group)}")
    return found


def _read_class_names(source: str | None, classes: int) -> list[str]:
    if source is None:
        raise JobError("align goes by class names: say where these are with `classes`, a file or 'imagenet'")
    if source == "imagenet":
        from torchvision.models import ResNet18_Weights

        names = list(ResNet18_Weights.DEFAULT.meta["categories"])
    else:
        try:
            names = Path(source).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"classes = {source!r} cannot be read: {error}: name a text file, or 'imagenet'") from None
    while names and not names[-1].strip():
        names.pop()
    if len(names) != classes:
        raise JobError(
            f"classes = {source!r} holds {len(names)} names, and the donor has {classes} classes: one line for each, "
            "in their order, and nothing else"
        )
    return [name.strip() for name in names]


def _match_classes_by_name(labels: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    known = [[_normalise_words(synonym) for synonym in name.split(",")] for name in names]

    def is_match(label: str, synonyms: Sequence[Sequence[str]]) -> bool:
        wanted = _normalise_words(label)
        return any(wanted and list(each[-len(wanted) :]) == wanted for each in synonyms)

    found = [[number for number, each in enumerate(known) if is_match(label, each)] for label in labels]
    without = [repr(label) for label, group in zip(labels, found, strict=True) if not group]
    if without:
        raise JobError(
            f"align = 'names': no class has the name {', '.join(without)}: give `align` as a table, "
            "{ label = [numbers or names of classes] }; a label may have none, []"
        )
    return found


def _match_classes_by_table(
    table: Mapping[str, Sequence[int | str]], labels: Sequence[str], names: str | None, classes: int
) -> list[list[int]]:
    missing = [repr(label) for label in labels if label not in table]
    strange = [repr(label) for label in table if label not in labels]
    if missing or strange:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(strange)}"] * bool(strange)
        raise JobError(f"align {' and '.join(parts)}, and the job's labels are {', '.join(labels)}: one key for each")
    by_name: dict[str, set[int]] = {}
    if any(isinstance(each, str) for group in table.values() for each in group):
        for number, name in enumerate(_read_class_names(names, classes)):
            for synonym in name.split(","):
                by_name.setdefault(" ".join(_normalise_words(synonym)), set()).add(number)

    def find_class_number(label: str, given: int | str) -> int:
        if isinstance(given, int):
            return given
        found = sorted(by_name.get(" ".join(_normalise_words(given)), ()))
        if len(found) != 1:
            which = f"is the name of classes {' and '.join(map(str, found))}" if found else "is no class's name"
            raise JobError(f"align of {label!r}: {given!r} {which}: give the number of the class")
        return found[0]

    return [[find_class_number(label, given) for given in table[label]] for label in labels]


def _normalise_words(text: str) -> list[str]:
    # lower case, with the last word in singular
    words = re.findall(r"[^\W_]+", text.lower())
    return [*words[:-1], re.sub(r"(?<=[^s])s\Z", "", words[-1])] if words else []
