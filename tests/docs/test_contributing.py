"""CONTRIBUTING.md: the targets that it names exist, and its commands run."""

import re

import documents

PAGE = "CONTRIBUTING.md"
REPLAY = "python -m tests.faults --seed 17"


def test_every_command_is_one():
    targets = set(re.findall(r"^([a-z]+):", (documents.ROOT / "Makefile").read_text(), re.MULTILINE))
    others = []
    for command in documents.commands(PAGE):
        words = command.split()
        if words[0] == "make":
            assert words[1] in targets, command
        else:
            others.append(command)
    assert REPLAY in others
    assert all(each.startswith((".venv/bin/", "python ")) for each in others)


def test_every_folder_that_it_names_is_there():
    for name in re.findall(r"`([a-z_./]+/)`", (documents.ROOT / PAGE).read_text()):
        assert (documents.ROOT / name).is_dir(), name


def test_a_seed_can_be_played_again():
    assert "it holds" in documents.Shell(documents.ROOT).run(REPLAY)
