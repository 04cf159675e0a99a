"""The `fedquilt` command: one file per verb in this folder; errors become sentences and exit codes here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from fedquilt import threads
from fedquilt.core import FedquiltError, JobError, StoreError

COMPLETE = "_FEDQUILT_COMPLETE"  # click's variable: a shell that asks for completions sets it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; None takes the process's own words.

    Returns:
        The exit code, as `fedquilt --help` lists them.

    Raises:
        SystemExit: 0 after --help and --version, 2 for words that the command line does not take.
    """
    for name, value in threads.QUIET.items():
        os.environ.setdefault(name, value)  # before a verb imports numpy
    from fedquilt.cli.commands import explain, top

    if instruction := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(top, {}, "fedquilt", COMPLETE, instruction)
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        with top.make_context("fedquilt", words) as context:
            return int(top.invoke(context) or 0)
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
        print(f"fedquilt: {_missing(error.name or '')}", file=sys.stderr)
        return JobError.exit_code
    except BrokenPipeError:
        return 141
    except OSError as error:
        print(f"fedquilt: {error.strerror}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        return StoreError.exit_code
    except KeyboardInterrupt:
        return 130


def _missing(module: str) -> str:
    extras = {
        "onnx": "onnx",
        "onnxruntime": "onnx",
        "torch": "train",
        "torchvision": "train",
        "amqtt": "demo",
        "matplotlib": "plot",
        "cryptography": "identity",
        "packaging": "flash",
    }
    extra = extras.get(module.split(".")[0], "images" if module.startswith("PIL") else "")
    return f"this needs {module}, which is not installed: pip install 'fedquilt{f'[{extra}]' if extra else ''}'"
