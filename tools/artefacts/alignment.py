"""Which of a donor's classes mean which of the job's labels: `align` and `classes` of a job's [[donors]]."""

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


def groups(
    align: Align, names: str | None, classes: int, labels: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> list[list[int]]:
    """For each label, the numbers of the classes that mean it.

    Args:
        align: a list of numbers for each label in order; a table of numbers and class names for each label by its
            name; one of KNOWN; or "names": each label means the classes of which a name is the label, or ends in it as
            words of their own ("tiger cat" is a cat, "catamaran" is not), in singular or plural.
        names: where the class names are: a file with one a line, in the order of the classes, with commas between
            synonyms; or "imagenet" for torchvision's list. None: only numbers can be given.
        classes: how many the donor has.
        say: told what was found by names, a line for each label: chance likeness ("hot dog") is for people to see.

    Raises:
        JobError: an unknown word, labels that are missing or not the job's, names without a list of names, or a label
            of which no class has the name.
        DataError: the list of names cannot be read.
        ModelError: a class that the donor does not have, or one that would mean two labels.
    """
    if isinstance(align, str) and align != "names":
        if align not in KNOWN:
            known = ", ".join([*KNOWN, "names"])
            raise JobError(f"align {align!r} is unknown; there are: {known}")
        align = KNOWN[align](classes)
    if align == "names":
        found = _by_names(labels, _names(names, classes))
    elif isinstance(align, Mapping):
        found = _by_table(align, labels, names, classes)
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
        told = _names(names, classes)
        for label, group in zip(labels, found, strict=True):
            say(f"{label}: {'; '.join(f'{number} {told[number]}' for number in group)}")
    return found


def _names(given: str | None, classes: int) -> list[str]:
    """The name of each class."""
    if given is None:
        raise JobError("align goes by class names: say where these are with `classes`, a file or 'imagenet'")
    if given == "imagenet":
        from torchvision.models import ResNet18_Weights

        names = list(ResNet18_Weights.DEFAULT.meta["categories"])
    else:
        try:
            names = Path(given).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"classes = {given!r} cannot be read: {error}: name a text file, or 'imagenet'") from None
    while names and not names[-1].strip():
        names.pop()
    if len(names) != classes:
        raise JobError(
            f"classes = {given!r} holds {len(names)} names, and the donor has {classes} classes: one line for each, in "
            "their order, and nothing else"
        )
    return [name.strip() for name in names]


def _by_names(labels: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    known = [[_words(synonym) for synonym in name.split(",")] for name in names]

    def means(label: str, synonyms: Sequence[Sequence[str]]) -> bool:
        wanted = _words(label)
        return any(wanted and list(each[-len(wanted) :]) == wanted for each in synonyms)

    found = [[number for number, each in enumerate(known) if means(label, each)] for label in labels]
    without = [repr(label) for label, group in zip(labels, found, strict=True) if not group]
    if without:
        raise JobError(
            f"align = 'names': no class has the name {', '.join(without)}: give `align` as a table, "
            "{ label = [numbers or names of classes] }; a label may have none, []"
        )
    return found


def _by_table(
    table: Mapping[str, Sequence[int | str]], labels: Sequence[str], names: str | None, classes: int
) -> list[list[int]]:
    missing = [repr(label) for label in labels if label not in table]
    strange = [repr(label) for label in table if label not in labels]
    if missing or strange:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(strange)}"] * bool(strange)
        raise JobError(f"align {' and '.join(parts)}, and the job's labels are {', '.join(labels)}: one key for each")
    by_name: dict[str, set[int]] = {}
    if any(isinstance(each, str) for group in table.values() for each in group):
        for number, name in enumerate(_names(names, classes)):
            for synonym in name.split(","):
                by_name.setdefault(" ".join(_words(synonym)), set()).add(number)

    def number(label: str, given: int | str) -> int:
        if isinstance(given, int):
            return given
        found = sorted(by_name.get(" ".join(_words(given)), ()))
        if len(found) != 1:
            which = f"is the name of classes {' and '.join(map(str, found))}" if found else "is no class's name"
            raise JobError(f"align of {label!r}: {given!r} {which}: give the number of the class")
        return found[0]

    return [[number(label, given) for given in table[label]] for label in labels]


def _words(text: str) -> list[str]:
    """Its words in small letters, the last in singular."""
    words = re.findall(r"[^\W_]+", text.lower())
    return [*words[:-1], re.sub(r"(?<=[^s])s\Z", "", words[-1])] if words else []
