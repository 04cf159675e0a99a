"""docs/commands.md has every verb and option with what they do, and none that there is not."""

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

from fedquilt.cli import commands, reference

DOCS = Path(__file__).parents[2] / "docs"


@cache
def leaves() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}

    def add(family: click.Group, words: str) -> None:
        context = click.Context(family, info_name="fedquilt")
        for name in family.list_commands(context):
            verb = family.get_command(context, name)
            assert verb is not None
            found[words + name] = verb
            if isinstance(verb, click.Group):
                add(verb, f"{words}{name} ")

    add(commands.root_command, "")
    return found


def test_the_page_is_what_the_commands_say_now():
    assert (DOCS / "commands.md").read_text() == reference.format_page()


def test_every_verb_word_and_option_says_what_it_is_for():
    text = (DOCS / "commands.md").read_text()
    parts = dict(re.findall(r"^###+ `fedquilt ([a-z -]+)`\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL))
    verbs = leaves()
    assert parts.keys() == verbs.keys()
    for words, command in verbs.items():
        assert command.help, words
        for one in command.params:
            if isinstance(one, commands.Argument):
                assert one.text, (words, one.name)
                assert f"| `{one.human_readable_name}` |" in parts[words]
            elif isinstance(one, commands.Option) and one.name != "verbose":
                assert one.hidden == (one.name == "enclosed"), (words, one.name)
                assert one.hidden or (one.help or "").endswith(".") or "://" in (one.help or ""), (words, one.name)
                assert one.hidden or re.search(rf"^\| `{one.opts[0]}[` ]", parts[words], re.MULTILINE)


def unknown_words(said: str) -> set[str]:
    """Return the options of a `fedquilt` command that its verb does not have, or the verb if there is none such."""
    verbs, words = leaves(), said.split()
    name = next((name for n in (3, 2) if (name := " ".join(words[:n])) in verbs), words[0])
    if name not in verbs:
        return set() if name.isupper() or not name[0].isalpha() else {name}
    known = {option for one in verbs[name].params for option in one.opts} | {"--help", "--version", "--verbose"}
    return {option for word in words if (option := word.partition("=")[0]).startswith("--")} - known


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
def test_no_page_names_an_option_that_is_not_there(page):
    for said in re.findall(r"`fedquilt ([^`]+)`", (DOCS.parent / page).read_text()):
        assert not unknown_words(said), (page, said)


def test_no_message_names_a_command_that_is_not_there():
    folders = ("coordinator", "edge_agent", "fedquilt", "models", "tools")
    files = [file for folder in folders for file in sorted((DOCS.parent / folder).rglob("*.py"))]
    said = {}
    for file in files:
        source = file.read_text()
        if "fedquilt " not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            begins = re.match(r"(?:sudo )?fedquilt ([a-z][^`;,(\n]*)(?!.*\n)", text)  # not a docstring of several lines
            said |= dict.fromkeys(re.findall(r"`(?:sudo )?fedquilt ([^`]+)`", text), file)
            said |= {} if begins is None else {begins[1]: file}
    assert len(said) > 50
    assert {command: file.name for command, file in said.items() if unknown_words(command)} == {}
