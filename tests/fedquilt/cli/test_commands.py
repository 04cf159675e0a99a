"""How command lines are read: verbs from files, words and options, near words, help, and what is imported for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import fedquilt.cli
from command_lines import parsed
from fedquilt.cli import commands, main

HELPERS = {"__init__", "__main__", "commands", "homes", "options", "reference"}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that refuses these words."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_every_file_of_a_verb_has_its_place_in_the_help() -> None:
    """And every verb of the help has its file."""
    files = {path.stem for path in Path(fedquilt.cli.__file__).parent.glob("*.py")} - HELPERS
    named = [name.replace("-", "_") for names in commands.SECTIONS.values() for name in names]
    assert sorted(named) == sorted(files)


def test_a_verb_of_another_spelling_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """So are an option, a word of a fixed set, and a verb of a family."""
    assert "no verb 'flsh'; did you mean 'flash'?" in said(capsys, "flsh")
    assert "no verb 'isue'; did you mean 'issue'?" in said(capsys, "ca", "isue")
    assert "no such option: --hom; did you mean '--home'? (`fedquilt ls --help`)" in said(capsys, "ls", "--hom", "x")
    assert "did you mean 'memory'?" in said(capsys, "fleet", "job.toml", "--link", "memry")


def test_an_option_of_many_words_takes_all_up_to_the_next() -> None:
    """Numbers below 0 are words; given twice, it has the words of both."""
    given = parsed(["compare", "job.toml", "--methods", "fedavg", "fedprox", "--seeds", "0", "-1", "--on", "held"])
    assert (given["methods"], given["seeds"], given["on"]) == (("fedavg", "fedprox"), (0, -1), "held")
    assert parsed(["compare", "job.toml"])["seeds"] == (0, 1, 2)
    assert parsed(["compare", "job.toml", "--seeds", "3", "--seeds=4"])["seeds"] == (3, 4)
    assert parsed(["flash", "agent.toml", "--extras"])["extras"] == ("",)
    assert parsed(["flash", "agent.toml"])["extras"] == ("onnx",)
    with pytest.raises(click.UsageError, match="requires an argument"):
        parsed(["compare", "job.toml", "--methods"])


def test_an_optional_word_after_an_option_may_be_left_out() -> None:
    """`bench stitch --ablate` takes the demo's job."""
    assert parsed(["bench", "stitch", "--ablate"])["ablate"] == Path()
    assert parsed(["bench", "stitch", "--ablate", "job.toml"])["ablate"] == Path("job.toml")
    assert parsed(["bench", "stitch"])["ablate"] is None


def test_options_that_exclude_each_other_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Named, both."""
    assert "--rootfs and --ssh: one of them" in said(capsys, "flash", "a.toml", "--rootfs", "r", "--ssh", "me@orin")


def test_a_verb_of_a_family_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """With the help of the family, on standard error."""
    for words in ((), ("ca",)):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert "Usage: fedquilt" in capsys.readouterr().err


def test_more_is_logged_with_v_before_a_verb_or_after_it() -> None:
    """Twice for everything."""
    show = "import logging; logging.lastResort = None; from fedquilt.cli import commands, main; "
    code = show + "main([*{words!r}, 'ls', '--home', '/none', *{more!r}]); print(logging.getLogger().level)"
    for words, more, level in (((), (), 30), (("-v",), (), 20), ((), ("-v",), 20), (("-v",), ("-v",), 10)):
        done = subprocess.run(
            [sys.executable, "-c", code.format(words=words, more=more)], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{level}\n", (words, more)


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every verb, and of every verb of a family."""
    context = click.Context(commands.top, info_name="fedquilt")
    lines = [["--help"]]
    for name in commands.top.list_commands(context):
        found = commands.top.get_command(context, name)
        lines += [[name, "--help"]]
        lines += [[name, inner, "--help"] for inner in getattr(found, "commands", ())]
    for words in lines:
        with pytest.raises(SystemExit):
            main(words)
        shown = capsys.readouterr().out.splitlines()
        assert max(map(len, shown)) <= 80, (words, max(shown, key=len))


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (["--help"], {"numpy", "torch", "sqlite3", "asyncio"}),
        (["agent", "/none.toml"], {"numpy", "torch", "onnxruntime"}),
    ],
)
def test_what_is_light_stays_light(words: list[str], forbidden: set[str]) -> None:
    """`--help` reads every verb's file, and the agent of a board stays up for months."""
    code = f"""
import sys
from fedquilt.cli import main
try:
    main({words!r})
except SystemExit:
    pass
print(*sorted({{name.split('.')[0] for name in sys.modules}}), file=sys.stderr)"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}
    )
    assert not forbidden & set(done.stderr.splitlines()[-1].split())
