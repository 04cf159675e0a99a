"""Structured logs: one JSON object a line, with the ids of run, round and device that a line is about.

A call that knows them names them: `log.warning("...", extra=about(run=..., device=...))`. Lines for people do not show
them, as the sentence does.
"""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Any, Final

import msgspec

IDS: Final = ("run", "round", "device", "fact")


def about(**ids: str | int | None) -> dict[str, str | int]:
    """`extra` of a logging call, for the ids that are known."""
    return {name: value for name, value in ids.items() if value is not None}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    Args:
        ids: of every line that has none of its own, such as the device of an agent.
    """

    def __init__(self, **ids: str) -> None:
        super().__init__()
        self._ids = ids

    def format(self, record: logging.LogRecord) -> str:
        """The line: when (UTC), level, logger, message, ids, and the traceback of an error."""
        told: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._ids,
        }
        told |= {name: value for name in IDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(told).decode()
        except (UnicodeEncodeError, TypeError):  # text that is not Unicode, or an id that is no id
            return msgspec.json.encode({key: _writable(value) for key, value in told.items()}).decode()


def _writable(value: object) -> int | str:
    """A number as it is, anything else as text whose odd characters are escaped."""
    return value if isinstance(value, int) else str(value).encode(errors="backslashreplace").decode()


def as_json(**ids: str) -> None:
    """Have all that this process logs written as JSON; `ids` are of every line."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(**ids))
