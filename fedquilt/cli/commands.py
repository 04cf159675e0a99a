"""Classes for commands, options and arguments, with their help and errors. Verbs are imported on use.

`SECTIONS` gives each verb of `fedquilt --help` the file of this folder with the command of the same name.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, TypeVar

import click

from fedquilt import __version__

SECTIONS: Final = {
    "Begin": {"demo": "lab", "init": "lab"},
    "Run a federation": dict.fromkeys(("prepare", "run", "simulate", "serve", "stop", "resume"), "jobs"),
    "Look at runs": dict.fromkeys(("ls", "logs", "why", "report", "prune", "backup"), "runs"),
    "Use a result": {"model": "model", "rollout": "rollout"},
    "Watch a fleet": {"devices": "runs", "dash": "dash", "doctor": "board"},
    "Experiments": {"compare": "jobs", "methods": "jobs", "lab": "lab"},
    "Boards and their identities": {"agent": "agent", "board": "board", "broker": "jobs", "identity": "identity"},
}
VERB_FILES: Final = {verb: file for verbs in SECTIONS.values() for verb, file in verbs.items()}

ALL_VERBS: Final = "install the package fedquilt, which has all verbs"
EPILOG: Final = """\b
exit codes: 0 done; 1 an error of fedquilt's own; 2 the job file, a setting or
the command line; 3 data; 4 a network or donor; 5 the broker; 6 a folder, the
store or a full disk; 7 memory; 8 the job failed, or clocks; 9 the job was
stopped; 10 doctor has warnings, 11 errors; 130 interrupted; 141 broken pipe"""

F = TypeVar("F", bound=Callable[..., Any])

_NEGATIVE: Final = re.compile(r"-\.?\d")


class Option(click.Option):
    """Option with a heading in --help, and optionally with several values: `--seeds 0 1 2`.

    Args:
        group: Heading in --help.
        variadic: Whether the option takes all words up to the next option, separated by spaces or commas. The function
            then gets a tuple.
        commas: With `variadic`, whether commas separate words.
        allow_empty: With `variadic`, whether zero words are allowed. The function then gets one empty string.
    """

    def __init__(
        self,
        param_decls: Sequence[str],
        *,
        group: str = "Options",
        variadic: bool = False,
        commas: bool = True,
        allow_empty: bool = False,
        **attributes: Any,
    ) -> None:
        super().__init__(param_decls, multiple=variadic or attributes.pop("multiple", False), **attributes)
        self.group, self.variadic, self.commas, self.allow_empty = group, variadic, commas, allow_empty

    def split_words(self, words: Sequence[str]) -> list[str]:
        if not self.commas:
            return list(words)
        return [part for word in words for part in ([part for part in word.split(",") if part] or [word])]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return (record[0] + "...", record[1]) if record and self.variadic else record


class Argument(click.Argument):
    def __init__(self, param_decls: Sequence[str], *, text: str = "", **attributes: Any) -> None:
        super().__init__(param_decls, **attributes)
        self.text = text


class _BaseCommand(click.Command):
    """Command with headings in --help, `-h`, variadic options, and -v before or after the verb."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        attributes["context_settings"] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        super().__init__(*args, **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._repeat_option_names(args))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, Argument):
                record: tuple[str, str] | None = (
                    (parameter.human_readable_name, parameter.text) if parameter.text else None
                )
            else:
                record = parameter.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if isinstance(parameter, Argument) else getattr(parameter, "group", "Options")
                groups.setdefault(heading, []).append(record)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # `format_options` writes the arguments, in every version of click.
        ...

    def _repeat_option_names(self, args: Sequence[str]) -> list[str]:
        """Return the words with the option's name before each value of a variadic option, as click expects."""
        parameters = [parameter for parameter in self.params if isinstance(parameter, Option) and parameter.variadic]
        variadic_options = {name: parameter for parameter in parameters for name in parameter.opts}
        remaining = list(args)
        expanded: list[str] = []
        while remaining:
            argument = remaining.pop(0)
            if argument == "--":
                return [*expanded, argument, *remaining]
            name, equals, text = argument.partition("=")
            if name in variadic_options and equals:
                for value in variadic_options[name].split_words([text]):
                    expanded += [name, value]
                continue
            if argument not in variadic_options:
                expanded.append(argument)
                continue
            allow_empty = variadic_options[argument].allow_empty
            words = list(takewhile(lambda word: not word.startswith("-") or _NEGATIVE.match(word), remaining))
            del remaining[: len(words)]
            for value in variadic_options[argument].split_words(words) or ([""] if allow_empty else []):
                expanded += [argument, value]
            if not words and not allow_empty:
                expanded.append(argument)  # click reports the missing word
        return expanded


class Command(_BaseCommand):
    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params.append(_verbose_option())


class CommandGroup(_BaseCommand, click.Group):
    command_class = Command
    is_partial = False

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, subcommand_metavar="VERB ...", **attributes)

    def add_operator_verbs(self, file: str) -> None:
        """Add the verbs of a file of `fedquilt.cli`, if installed. The wheel for boards leaves the file out."""
        if f"{file}.py" not in os.listdir(os.path.dirname(__file__)):
            self.is_partial = True
            return
        for value in vars(importlib.import_module(f"fedquilt.cli.{file}")).values():
            if isinstance(value, click.Command):
                self.add_command(value)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Without a verb, click would exit with 0.
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            from fedquilt.formats import toml

            if self.is_partial:
                ctx.fail(f"the verb {args[0]!r} is not installed: {ALL_VERBS}")
            ctx.fail(f"there is no verb {args[0]!r}{toml.suggest_nearest(args[0], names)}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def sections(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        return {"Verbs": self.list_commands(ctx)}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for heading, names in self.sections(ctx).items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), self._short_help(ctx, name)) for name in names])

    def _short_help(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return command.get_short_help_str(400) if command is not None else ""


class RootCommand(CommandGroup):
    """The `fedquilt` command with the verbs whose files are installed. A verb's file is imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self.sections(ctx).values() for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in VERB_FILES and args[0] not in self.list_commands(ctx):
            ctx.fail(f"the verb {args[0]!r} is not installed: {ALL_VERBS}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        command: click.Command = getattr(importlib.import_module(f"fedquilt.cli.{VERB_FILES[name]}"), name)
        return command

    def sections(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        files = os.listdir(os.path.dirname(__file__))
        installed = {
            heading: [verb for verb, file in verbs.items() if f"{file}.py" in files]
            for heading, verbs in SECTIONS.items()
        }
        return {heading: verbs for heading, verbs in installed.items() if verbs}

    def _short_help(self, ctx: click.Context, name: str) -> str:
        # Read from the source, because importing the files of all verbs would triple the time of --help.
        with open(f"{os.path.dirname(__file__)}/{VERB_FILES[name]}.py", encoding="utf-8") as file:
            docstring = file.read().partition(f"\ndef {name}(")[2].split('"""')[1]
        return click.Command(name, help=docstring).get_short_help_str(400)


def verb(**attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    return click.command(cls=Command, **attributes)


def verb_group(**attributes: Any) -> Callable[[Callable[..., Any]], CommandGroup]:
    return click.group(cls=CommandGroup, **attributes)


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """Return a decorator that adds an `Option`. Defaults are shown, except None and those of flags."""
    attributes.setdefault("show_default", attributes.get("default") is not None and not attributes.get("is_flag"))
    return click.option(*names, cls=Option, **attributes)


def argument(name: str, text: str = "", **attributes: Any) -> Callable[[F], F]:
    return click.argument(name, cls=Argument, text=text, **attributes)


def verbosity() -> int:
    return click.get_current_context().find_root().obj or 0


def explain_usage_error(error: click.UsageError) -> str:
    """Return click's message with the command that prints help, and the nearest name of an unknown option."""
    message, context = error.format_message(), error.ctx
    if isinstance(error, click.NoSuchOption) and context is not None:
        from fedquilt.formats import toml

        names = [
            name for parameter in context.command.get_params(context) for name in parameter.opts if name != "--help"
        ]
        message = f"no such option: {error.option_name}{toml.suggest_nearest(error.option_name, names)}"
    if message.startswith("Got unexpected extra argument") and context is not None:
        arguments = [piece for piece in context.command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        message = f"{message.rstrip('.')}: write {' '.join([context.command_path, *arguments])}"
    message = message[:1].lower() + message[1:].rstrip(".")
    return f"{message} (`{context.command_path} --help`)" if context is not None else message


def _verbose_option() -> Option:
    help = "Log more; given twice, log everything."
    return Option(["-v", "--verbose"], count=True, help=help, expose_value=False, callback=_raise_verbosity)


def _raise_verbosity(context: click.Context, parameter: click.Parameter, count: int) -> None:
    if count:
        import logging  # imported here, because `fedquilt --help` does not log

        root = context.find_root()
        root.obj = (root.obj or 0) + count
        logging.getLogger().setLevel("DEBUG" if root.obj > 1 else "INFO")


@click.group(cls=RootCommand, epilog=EPILOG, params=[_verbose_option()])
@click.version_option(__version__, prog_name="fedquilt", message="%(prog)s %(version)s")
def root_command() -> None:
    """Run federated learning on edge devices."""
    import logging

    from fedquilt.console import progress
    from fedquilt.host import logs

    logging.basicConfig(format=logs.PLAIN, handlers=[progress.LogHandler()])
