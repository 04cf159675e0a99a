"""Runs a command line: finds its verb; errors become sentences and exit codes here."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import click

from fedquilt import extras, threads
from fedquilt.core import FedquiltError, JobError, MemoryBudgetError, StoreError

COMPLETE = "_FEDQUILT_COMPLETE"  # click's variable: a shell that asks for completions sets it

ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """The process was told to end by a signal other than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; None takes the process's own words.

    Returns:
        The exit code, as `fedquilt --help` lists them.

    Raises:
        SystemExit: 0 after --help and --version, 2 for words that the command line does not take.
        KeyboardInterrupt: Ctrl-C.
    """
    for name, value in threads.QUIET.items():
        os.environ.setdefault(name, value)  # before a verb imports numpy
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a terminal without some letter gets "?", not a traceback
    from fedquilt.cli.commands import explain, top

    if instruction := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(top, {}, "fedquilt", COMPLETE, instruction)
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        with _interruptible(), top.make_context("fedquilt", words) as context:
            code = int(top.invoke(context) or 0)
            sys.stdout.flush()
            return code
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except click.UsageError as error:
        print(f"fedquilt: {explain(error)}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except click.Abort:  # the end of the input, or Ctrl-C, at a question
        return 130
    except FedquiltError as error:
        print(f"fedquilt: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"fedquilt: {extras.missing(error.name or '')}", file=sys.stderr)
        return JobError.exit_code
    except BrokenPipeError:  # nobody reads any more; what is left in the buffer goes nowhere, and without a complaint
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        mend = "; check its folder, its owner and the disk" if error.filename else ""
        print(f"fedquilt: {error.strerror}{where}{mend}", file=sys.stderr)
        return StoreError.exit_code
    except MemoryError as error:
        print(f"fedquilt: this machine's memory is not enough{f': {error}' if str(error) else ''}", file=sys.stderr)
        return MemoryBudgetError.exit_code
    except Ended as ended:  # in good order by now; whoever sent the signal sees that it was followed
        sys.stdout.flush()
        os.kill(os.getpid(), ended.number)
        return 128 + ended.number


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end what follows in the same good order as Ctrl-C, unless it handles them itself."""

    def end(number: int, frame: object) -> None:
        raise Ended(number)

    if threading.current_thread() is not threading.main_thread():  # only the main one may say so
        yield
        return
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
