"""Generator of docs/commands.md from the commands.

Usage: python -m fedquilt.cli.reference > docs/commands.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from fedquilt.cli.commands import EPILOG, SECTIONS, Argument, Option, root_command

HEAD = """# Commands

`python -m fedquilt.cli.reference` writes this page from the commands; `fedquilt VERB --help` shows the same.
`-v` before a verb or after it logs more, twice everything. An option of several words takes all of them up to
the next option, separated by spaces or commas: `--seeds 0 1 2`. Tables fit 80 columns, or a wider terminal;
colour is for a terminal alone, and never where `NO_COLOR` is set.

## Completion

bash, zsh and fish complete verbs, options, methods, boards, ids of runs in `--home` and files, after one of these
lines in `~/.bashrc`, `~/.zshrc` or `~/.config/fish/completions/fedquilt.fish`:

```sh
eval "$(_FEDQUILT_COMPLETE=bash_source fedquilt)"
eval "$(_FEDQUILT_COMPLETE=zsh_source fedquilt)"
_FEDQUILT_COMPLETE=fish_source fedquilt | source
```
"""


def format_page() -> str:
    context = click.Context(root_command, info_name="fedquilt")
    parts = [HEAD]
    for heading, names in SECTIONS.items():
        parts.append(f"## {heading}\n")
        for name in names:
            command = root_command.get_command(context, name)
            assert command is not None
            parts += _command_section(command, click.Context(command, info_name=name, parent=context))
    codes = EPILOG.removeprefix("\b\n").replace("\n", " ").removeprefix("exit codes: ")
    return "\n".join([*parts, "## Exit codes\n", "| code | |", "|---|---|", *_exit_code_rows(codes)]) + "\n"


def _exit_code_rows(text: str) -> Iterator[str]:
    for entry in text.replace("warnings, 11", "warnings; 11 doctor has").split("; "):
        code, meaning = entry.split(" ", 1)
        yield f"| {code} | {meaning} |"


def _command_section(command: click.Command, context: click.Context, level: int = 3) -> Iterator[str]:
    arguments = [parameter.make_metavar(context) for parameter in command.params if isinstance(parameter, Argument)]
    usage = " ".join(
        [context.command_path, "[OPTIONS]", *arguments, *(["VERB ..."] * isinstance(command, click.Group))]
    )
    yield f"{'#' * level} `{context.command_path}`\n"
    yield f"{' '.join(inspect.cleandoc(command.help or '').split())}\n"
    yield f"`{usage}`\n"
    rows = [row for parameter in command.params if (row := _parameter_row(parameter)) is not None]
    if rows:
        yield "| | |\n|---|---|\n" + "\n".join(rows) + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command_section(inner, click.Context(inner, info_name=name, parent=context), level + 1)


def _parameter_row(parameter: click.Parameter) -> str | None:
    if isinstance(parameter, Argument):
        return f"| `{parameter.human_readable_name}` | {_escape_cell(parameter.text)} |"
    if not isinstance(parameter, Option) or parameter.hidden or parameter.name == "verbose":
        return None
    default = parameter.default if parameter.show_default is True else None
    default_text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    description = f"{parameter.help} Default: `{default_text}`." if default is not None else str(parameter.help)
    usage = " ".join([", ".join(parameter.opts), *_value_placeholder(parameter)])
    return f"| `{_escape_cell(usage)}` | {_escape_cell(description)} |"


def _value_placeholder(option_: Option) -> list[str]:
    if option_.is_flag or option_.count:
        return []
    choices = getattr(option_.type, "choices", None)
    placeholder = option_.metavar or ("|".join(choices) if choices else option_.type.name.upper())
    return [placeholder + ("..." if option_.variadic else "")]


def _escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(format_page(), end="")
