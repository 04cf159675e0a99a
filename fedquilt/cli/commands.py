"""Classes of the commands: a root command that imports verbs on use, and their help and errors.

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
FILES: Final = {verb: file for verbs in SECTIONS.values() for verb, file in verbs.items()}

# verbs of a group that the wheel for boards does not list, as they need the whole package
OPERATORS: Final = {
    "model": ("export", "evaluate"),
    "identity": ("init", "issue", "list", "revoke", "token", "serve", "sign"),
}

EPILOG: Final = """\b
exit codes: 0 done; 1 an error of fedquilt's own; 2 the job file, a setting or
the command line; 3 data; 4 a network or donor; 5 the broker; 6 a folder, the
store or a full disk; 7 memory; 8 the job failed, or clocks; 9 the job was
stopped; 10 doctor has warnings, 11 errors; 12 the machine was too busy for a
bench; 130 interrupted; 141 broken pipe"""

F = TypeVar("F", bound=Callable[..., Any])

_NEGATIVE: Final = re.compile(r"-\.?\d")


class Option(click.Option):
    """Option with a heading in --help, and optionally with several values: `--seeds 0 1 2`.

    Args:
        group: Heading in --help.
        many: Whether the option takes all words up to the next option, separated by spaces or commas. The function then
            gets a tuple.
        commas: With `many`, whether commas separate words.
        none: With `many`, whether zero words are allowed. The function then gets one empty string.
    """

    def __init__(
        self,
        param_decls: Sequence[str],
        *,
        group: str = "Options",
        many: bool = False,
        commas: bool = True,
        none: bool = False,
        **attributes: Any,
    ) -> None:
        super().__init__(param_decls, multiple=many or attributes.pop("multiple", False), **attributes)
        self.group, self.many, self.commas, self.none = group, many, commas, none

    def split_words(self, given: Sequence[str]) -> list[str]:
        if not self.commas:
            return list(given)
        return [word for each in given for word in ([part for part in each.split(",") if part] or [each])]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return (record[0] + "...", record[1]) if record and self.many else record


class Argument(click.Argument):
    def __init__(self, param_decls: Sequence[str], *, text: str = "", **attributes: Any) -> None:
        super().__init__(param_decls, **attributes)
        self.text = text


class _BaseCommand(click.Command):
    """Help in groups, `-h`, options of many words, and -v after a verb as before it."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        attributes["context_settings"] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        super().__init__(*args, **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._repeat_option_names(args))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            if isinstance(one, Argument):
                record: tuple[str, str] | None = (one.human_readable_name, one.text) if one.text else None
            else:
                record = one.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if isinstance(one, Argument) else getattr(one, "group", "Options")
                groups.setdefault(heading, []).append(record)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # `format_options` writes the arguments, in every version of click.
        ...

    def _repeat_option_names(self, args: Sequence[str]) -> list[str]:
        many = {name: one for one in self.params if isinstance(one, Option) and one.many for name in one.opts}
        left = list(args)
        spread: list[str] = []
        while left:
            word = left.pop(0)
            if word == "--":
                return [*spread, word, *left]
            name, equals, value = word.partition("=")
            if name in many and equals:
                for each in many[name].split_words([value]):
                    spread += [name, each]
                continue
            if word not in many:
                spread.append(word)
                continue
            words = list(takewhile(lambda each: not each.startswith("-") or _NEGATIVE.match(each), left))
            del left[: len(words)]
            for each in many[word].split_words(words) or ([""] if many[word].none else []):
                spread += [word, each]
            if not words and not many[word].none:
                spread.append(word)  # click reports the missing word
        return spread


class Command(_BaseCommand):
    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params.append(_verbose_option())


class CommandGroup(_BaseCommand, click.Group):
    """Verb with verbs of its own. Unknown ones raise an error with the nearest name."""

    command_class = Command

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, subcommand_metavar="VERB ...", **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Without a verb, click would exit with 0.
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        hidden = args and args[0] in self.commands and args[0] not in known
        if args and args[0] not in known and not hidden and not args[0].startswith("-") and not ctx.resilient_parsing:
            from fedquilt.formats import toml

            ctx.fail(f"there is no verb {args[0]!r}{toml.suggest_nearest(args[0], known)}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def list_commands(self, ctx: click.Context) -> list[str]:
        lacking = () if "jobs.py" in os.listdir(os.path.dirname(__file__)) else OPERATORS.get(self.name or "", ())
        return [name for name in self.commands if name not in lacking]

    def sections(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        return {"Verbs": self.list_commands(ctx)}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        wide = max(map(len, self.list_commands(ctx)))
        for heading, names in self.sections(ctx).items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(wide), self._short_help(ctx, name)) for name in names])

    def _short_help(self, ctx: click.Context, name: str) -> str:
        found = self.get_command(ctx, name)
        return found.get_short_help_str(400) if found is not None else ""


class RootCommand(CommandGroup):
    """The `fedquilt` command with the verbs whose files are installed. A verb's file is imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self.sections(ctx).values() for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in FILES and args[0] not in self.list_commands(ctx):
            ctx.fail(f"the verb {args[0]!r} is not installed: install the package fedquilt, which has all verbs")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        found: click.Command = getattr(importlib.import_module(f"fedquilt.cli.{FILES[name]}"), name)
        return found

    def sections(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        there = os.listdir(os.path.dirname(__file__))
        found = {
            heading: [verb for verb, file in verbs.items() if f"{file}.py" in there]
            for heading, verbs in SECTIONS.items()
        }
        return {heading: verbs for heading, verbs in found.items() if verbs}

    def _short_help(self, ctx: click.Context, name: str) -> str:
        # from the text of the verb's file: imports of all verbs would take twice the time of everything else
        with open(f"{os.path.dirname(__file__)}/{FILES[name]}.py", encoding="utf-8") as file:
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
    said, context = error.format_message(), error.ctx
    if isinstance(error, click.NoSuchOption) and context is not None:
        from fedquilt.formats import toml

        known = [name for one in context.command.get_params(context) for name in one.opts if name != "--help"]
        said = f"no such option: {error.option_name}{toml.suggest_nearest(error.option_name, known)}"
    said = said[:1].lower() + said[1:].rstrip(".")
    return f"{said} (`{context.command_path} --help`)" if context is not None else said


def _verbose_option() -> Option:
    help = "Log more; given twice, log everything."
    return Option(["-v", "--verbose"], count=True, help=help, expose_value=False, callback=_raise_verbosity)


def _raise_verbosity(context: click.Context, parameter: click.Parameter, count: int) -> None:
    if count:
        import logging  # here, as `fedquilt --help` does not log

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
