"""The `fedquilt` command: what is typed is in `typed`, what is done in `verbs`; errors become sentences and codes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from fedquilt import threads
from fedquilt.core import FedquiltError, JobError, StoreError
from fedquilt.typed import parser

ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """The process was told to end by a signal other than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = parser().parse_args(argv)
    level = logging.DEBUG if options.verbose > 1 else logging.INFO if options.verbose else logging.WARNING
    for name, value in threads.QUIET.items():
        os.environ.setdefault(name, value)  # before a verb imports numpy
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        with _interruptible():
            return int(options.command(options) or 0)
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
    except Ended as ended:  # in good order by now; whoever sent the signal sees that it was followed
        sys.stdout.flush()
        os.kill(os.getpid(), ended.number)
        return 128 + ended.number
    except KeyboardInterrupt:
        return 130


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


def _missing(module: str) -> str:
    extras = {
        "onnx": "onnx",
        "onnxruntime": "onnx",
        "torch": "train",
        "torchvision": "train",
        "amqtt": "demo",
        "matplotlib": "report",
        "jinja2": "report",
        "tomli_w": "report",
        "cryptography": "identity",
        "packaging": "flash",
    }
    extra = extras.get(module.split(".")[0], "images" if module.startswith("PIL") else "")
    return f"this needs {module}, which is not installed: pip install 'fedquilt{f'[{extra}]' if extra else ''}'"


if __name__ == "__main__":
    sys.exit(main())
