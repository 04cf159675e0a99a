"""Errors that a user can mend: each kind has its exit code."""

from __future__ import annotations

ERROR_MOST_CHARACTERS = 1000  # of a sentence on the wire


def shorten_error(text: str, most_characters: int = ERROR_MOST_CHARACTERS) -> str:
    """Return an error's text in one line of at most `most_characters`, without its middle if it is longer.

    Libraries name the cause at the end of a long text, after the call stack. The beginning names the operation.
    """
    text = " ".join(text.split())
    if len(text) <= most_characters:
        return text
    head = most_characters // 4
    return f"{text[:head]} ... {text[len(text) - (most_characters - head - 5) :]}"


class FedquiltError(Exception):
    """Error that a user can mend. `exit_code` is the exit status of a command that it ends."""

    exit_code = 1


class JobError(FedquiltError):
    """A job file, a setting or a command line that cannot be carried out as written."""

    exit_code = 2


class DataError(FedquiltError):
    """Examples that are absent, unreadable or of the wrong shape."""

    exit_code = 3


class ModelError(FedquiltError):
    """A network, donor, block or weight file that does not fit what is asked of it."""

    exit_code = 4


class LinkError(FedquiltError):
    """A broker that cannot be reached, refuses, or takes no packets of the size needed."""

    exit_code = 5


class StoreError(FedquiltError):
    """A folder or database that cannot be read or written; a full disk."""

    exit_code = 6


class DiskFullError(StoreError):
    """A full disk, or a quota that is used up."""


class MemoryBudgetError(FedquiltError):
    """A task that does not fit the memory it may use."""

    exit_code = 7


class ClockError(FedquiltError):
    """Clocks that cannot be set here, or that did not take what they were set to."""

    exit_code = 8


class UpdateError(FedquiltError):
    """An update that may not be folded: not finite, wrong names or shapes, or inconsistent."""


class DivergedError(UpdateError):
    """Training whose loss, weights or metrics are not finite, or whose loss has exploded."""


class WireError(FedquiltError):
    """Bytes from the network that are not a message of this protocol version."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has no text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
