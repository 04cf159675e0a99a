"""Errors that a user can fix, each kind with an exit code."""

from __future__ import annotations

MAX_ERROR_CHARACTERS = 1000  # limit of `Sentence` fields


def shorten_error(text: str, max_characters: int = MAX_ERROR_CHARACTERS) -> str:
    """Return an error's text in one line of at most `max_characters`, shortened in the middle.

    Libraries name the cause at the end of a long text, after the call stack. The beginning names the operation.
    """
    text = " ".join(text.split())
    if len(text) <= max_characters:
        return text
    head_characters = max_characters // 4
    return f"{text[:head_characters]} ... {text[len(text) - (max_characters - head_characters - 5) :]}"


class FedquiltError(Exception):
    """Base class of errors that a user can fix. `exit_code` is the exit status of a command."""

    exit_code = 1


class JobError(FedquiltError):
    """Error in a job file, a setting or a command line."""

    exit_code = 2


class DataError(FedquiltError):
    """Error in a device's examples: missing, unreadable or of the wrong shape."""

    exit_code = 3


class ModelError(FedquiltError):
    """Error in a network, donor, block or weight file."""

    exit_code = 4


class LinkError(FedquiltError):
    """Error of a broker connection: broker unreachable, client refused or packet too large."""

    exit_code = 5


class StoreError(FedquiltError):
    """Error in reading or writing a folder or database."""

    exit_code = 6


class DiskFullError(StoreError):
    """Error from a full disk or an exhausted quota."""


class MemoryBudgetError(FedquiltError):
    """Error of a task that does not fit its memory budget."""

    exit_code = 7


class ClockError(FedquiltError):
    """Error in setting a device's clocks."""

    exit_code = 8


class UpdateError(FedquiltError):
    """Error in an update that must not be aggregated, such as wrong shapes or values not finite."""


class DivergedError(UpdateError):
    """Error in training: loss, weights or metrics are not finite, or the loss has exploded."""


class WireError(FedquiltError):
    """Error in bytes from the network: not a message of this protocol version."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error text, or the name of the error type if there is no text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
