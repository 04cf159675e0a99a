"""Entry point of the command line, which converts errors to messages and exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import fedquilt
from fedquilt.host import process_resources

COMPLETION_VARIABLE = "_FEDQUILT_COMPLETE"  # click's variable: a shell that asks for completions sets it

VERBOSE: Final = ("-v", "--verbose")
ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
# Imported on first use: by tasks and errors, and urllib.request by paho for web sockets behind a proxy.
DEFERRED_IMPORTS: Final = ("json", "shutil", "subprocess", "tempfile", "traceback", "urllib.request")


class TerminatedError(KeyboardInterrupt):
    """Exception raised when a signal ends the process. `number` is the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, or the process's own arguments if None.

    Returns:
        The exit code, as listed by `fedquilt --help`.
    """
    for name, value in process_resources.LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # before a verb imports numpy
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a letter that the terminal lacks becomes "?"
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        _require_unicode(arguments)
        with _raise_on_signals():
            match [word for word in arguments if word not in VERBOSE]:
                case ["agent", file] if not file.startswith("-") and COMPLETION_VARIABLE not in os.environ:
                    run_agent(Path(file), verbose=len(arguments) > 3)
                    return 0
            return _run_command(arguments)
    except SystemExit:  # before the next line, which imports fedquilt's errors: --help needs none
        raise
    except fedquilt.FedquiltError as error:
        print(f"fedquilt: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        from fedquilt import extras

        print(f"fedquilt: {extras.missing_message(error.name or '')}", file=sys.stderr)
        return fedquilt.JobError.exit_code
    except BrokenPipeError:  # the reader has ended: drop the buffer silently
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        location = f": {error.filename}" if error.filename else ""
        from fedquilt.host import disk

        fix = f"; {disk.describe_fix(error)}" if error.filename else ""
        print(f"fedquilt: {error.strerror}{location}{fix}", file=sys.stderr)
        return fedquilt.StoreError.exit_code
    except MemoryError as error:
        detail = f": {error}" if str(error) else ""
        print(
            f"fedquilt: this machine has too little memory{detail}: use a smaller network or less data", file=sys.stderr
        )
        return fedquilt.MemoryBudgetError.exit_code
    except TerminatedError as ended:  # the sender of the signal sees that this process ended by it
        sys.stdout.flush()
        os.kill(os.getpid(), ended.number)
        return 128 + ended.number


def run_agent(settings: Path, *, verbose: bool = False, json_logs: bool = False) -> None:
    """Run a device's agent until SIGTERM or SIGINT, without importing click and rarely used modules."""
    import logging

    from fedquilt.host import logs, process_resources

    for name in DEFERRED_IMPORTS:
        process_resources.import_on_use(name)
    from fedquilt.edge_agent import daemon
    from fedquilt.edge_agent import settings as settings_files

    logging.basicConfig(format=logs.PLAIN, stream=sys.stderr)
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if verbose else min(logging.INFO, root.level))  # the log shows normal operation
    agent_settings = settings_files.apply_systemd_credentials(settings_files.load_settings(settings))
    if json_logs:
        logs.use_json_logs(device=agent_settings.device)
    daemon.run_agent(agent_settings)


def _require_unicode(arguments: Sequence[str]) -> None:
    texts = list(arguments)
    with contextlib.suppress(FileNotFoundError):  # the folder was deleted
        texts.append(os.getcwd())
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise fedquilt.JobError(
                f"{text!a} is not UTF-8 text: rename the file or folder, or set LC_ALL=C.UTF-8 if its name is UTF-8"
            ) from None


def _run_command(arguments: list[str]) -> int:
    import click  # imported here, because an agent does not use click

    from fedquilt.cli.commands import explain_usage_error, root_command

    if instruction := os.environ.get(COMPLETION_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(root_command, {}, "fedquilt", COMPLETION_VARIABLE, instruction)
    try:
        with root_command.make_context("fedquilt", arguments) as context:
            code = int(root_command.invoke(context) or 0)
            sys.stdout.flush()
            return code
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except click.UsageError as error:
        print(f"fedquilt: {explain_usage_error(error)}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except click.Abort:  # the end of the input, or Ctrl-C, at a question
        return 130


@contextlib.contextmanager
def _raise_on_signals() -> Iterator[None]:
    """Raise TerminatedError in a `with` block at SIGTERM and SIGHUP, unless they have other handlers."""

    def raise_terminated(number: int, frame: object) -> None:
        raise TerminatedError(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    # Signals with another handler stay: nohup ignores SIGHUP.
    default_signals = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in default_signals:
        signal.signal(number, raise_terminated)
    try:
        yield
    finally:
        for number in default_signals:
            signal.signal(number, signal.SIG_DFL)
