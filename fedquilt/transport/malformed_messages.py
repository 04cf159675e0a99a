"""Log of malformed messages: the first are logged, further ones are counted.

No sender can flood a log. Pure: messages and times in, log lines out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST: Final = 3  # messages of one branch that are logged each
EVERY_S: Final = 600.0  # interval at which the number of the others is logged
MOST_BRANCHES: Final = 64  # branches counted separately; a sender with the right to write everywhere cannot add more
OTHERS: Final = "other branches"


@dataclass
class BranchCounter:
    told: int = 0
    more: int = 0  # since the last line about the branch
    last: str = ""
    due_s: float = 0.0


class MalformedMessages:
    def __init__(self) -> None:
        self.dropped = 0
        self._branches: dict[str, BranchCounter] = {}

    def count_message(self, topic: str, error: Exception, retained: bool, now_s: float, kind: str = "") -> str | None:
        """Count a dropped message and return the line to log now, or None.

        Messages of different `kind` are counted separately.
        """
        self.dropped += 1
        name = "/".join(topic.split("/")[:6])[:120] + (f" ({kind})" if kind else "")
        if name not in self._branches and len(self._branches) >= MOST_BRANCHES:
            name = OTHERS
        branch = self._branches.setdefault(name, BranchCounter())
        if branch.told >= FIRST:
            branch.due_s = branch.due_s if branch.more else now_s + EVERY_S
            branch.more, branch.last = branch.more + 1, f"{topic[:120]}: {error}"
            return None
        branch.told += 1
        said = f"dropped a message on {topic[:120]}: {error}"
        if retained:
            said += f"; the broker keeps it until it is cleared: mosquitto_pub -r -n -t '{topic[:120]}'"
        return said if branch.told < FIRST else f"{said} (from here on such messages under {name} are only counted)"

    def take_due_lines(self, now_s: float) -> list[str]:
        """Return the log lines that are due for further dropped messages, and reset their counts."""
        lines = []
        for name, branch in list(self._branches.items()):
            if branch.more and now_s >= branch.due_s:
                lines.append(f"dropped {branch.more} more messages under {name}; the last: {branch.last}")
                branch.more, branch.due_s = 0, now_s + EVERY_S
            elif not branch.more and branch.told >= FIRST and branch.due_s and now_s >= branch.due_s:
                del self._branches[name]
        return lines
