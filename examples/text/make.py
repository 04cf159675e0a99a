"""Make data/train.csv and data/test.csv, notes from a machine hall, and vocabulary.txt, the words and parts of them."""

import csv
import random
from pathlib import Path

PLACES = ("pump 3", "the left conveyor", "oven 12", "line B", "the compressor")
WHEN = ("since this morning", "again", "after the break", "for two hours", "during the night shift")
NOTES = {
    "noise": ("rattling loudly", "grinding noise from", "squeaks and rattles", "whistling sound at", "hums too loud"),
    "leak": ("oil dripping below", "leaking coolant at", "a puddle of water under", "hose leaks near", "wet floor at"),
    "heat": ("overheating badly", "too hot to touch", "smells burnt at", "smoke rising from", "temperature alarm at"),
}
PIECES = ("##s", "##ing", "##ed", "##ly", "##er")


def note(kind: str, draw: random.Random) -> str:
    """One note; the words come in two orders."""
    what, place, when = draw.choice(NOTES[kind]), draw.choice(PLACES), draw.choice(WHEN)
    return draw.choice((f"{what} {place} {when}", f"{place} {when}: {what}")).capitalize() + "."


def vocabulary() -> list[str]:
    """[PAD] first; every word of the notes, the letters, and pieces that words may go on with."""
    words = {
        word.strip(":.,").lower()
        for group in (PLACES, WHEN, *NOTES.values())
        for phrase in group
        for word in phrase.split()
    }
    letters = "abcdefghijklmnopqrstuvwxyz"
    marks = [".", ",", ":", *"0123456789"]
    return [
        "[PAD]",
        "[UNK]",
        *dict.fromkeys([*marks, *letters, *(f"##{each}" for each in letters), *PIECES, *sorted(words)]),
    ]


def main() -> None:
    """Write all three files."""
    here, draw = Path(__file__).parent, random.Random(0)
    (here / "data").mkdir(exist_ok=True)
    (here / "vocabulary.txt").write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
    for split, count in (("train", 240), ("test", 90)):
        with (here / "data" / f"{split}.csv").open("w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(["note", "kind"])
            for number in range(count):
                kind = sorted(NOTES)[number % len(NOTES)]
                table.writerow([note(kind, draw), kind])


if __name__ == "__main__":
    main()
