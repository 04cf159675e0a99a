"""Make data/train.csv and data/test.csv, notes from a machine hall, and vocabulary.txt, words and word pieces."""

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
WORD_PIECES = ("##s", "##ing", "##ed", "##ly", "##er")


def make_note(kind: str, rng: random.Random) -> str:
    """Return one note, in one of two word orders."""
    symptom, location, time_text = rng.choice(NOTES[kind]), rng.choice(PLACES), rng.choice(WHEN)
    return rng.choice((f"{symptom} {location} {time_text}", f"{location} {time_text}: {symptom}")).capitalize() + "."


def make_vocabulary() -> list[str]:
    """Return [PAD], [UNK], characters, word pieces and all words of the notes."""
    words = {
        word.strip(":.,").lower()
        for group in (PLACES, WHEN, *NOTES.values())
        for phrase in group
        for word in phrase.split()
    }
    letters = "abcdefghijklmnopqrstuvwxyz"
    characters = [".", ",", ":", *"0123456789"]
    return [
        "[PAD]",
        "[UNK]",
        *dict.fromkeys([*characters, *letters, *(f"##{letter}" for letter in letters), *WORD_PIECES, *sorted(words)]),
    ]


def main() -> None:
    """Write all three files."""
    folder, rng = Path(__file__).parent, random.Random(0)
    (folder / "data").mkdir(exist_ok=True)
    (folder / "vocabulary.txt").write_text("\n".join(make_vocabulary()) + "\n", encoding="utf-8")
    for split, count in (("train", 240), ("test", 90)):
        with (folder / "data" / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["note", "kind"])
            for number in range(count):
                kind = sorted(NOTES)[number % len(NOTES)]
                table.writerow([make_note(kind, rng), kind])


if __name__ == "__main__":
    main()
