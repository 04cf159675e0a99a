"""Options of the commands that bring something to boards in phases: `deploy`, `upgrade` and `settings`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedquilt import units
from fedquilt.cli import options
from fedquilt.cli.commands import option

if TYPE_CHECKING:
    from fedquilt import wire
    from fedquilt.coordinator.rollouts import Plan, Rollout
    from fedquilt.coordinator.store import Store


def share(text: str) -> float:
    """A share of a whole: 0.05 of "5%"; a number without a sign of percent is one of percent too.

    Raises:
        ValueError: it is none, or not between 0 and 100 %.
    """
    value = units.amount(text if text.endswith("%") else f"{text}%", {"%": 0.01}, "share")
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is not between 0 % and 100 %")
    return round(value, 9)


def points(text: str) -> float:
    """A difference of two accuracies: -0.005 of "-0.5pt".

    Raises:
        ValueError: it is none.
    """
    value = units.amount(text, {"pt": 0.01, "%": 0.01}, "number of points")
    if not -1 <= value <= 1:
        raise ValueError(f"{text} is not between -100pt and 100pt")
    return round(value, 9)


def size(text: str) -> int:
    """A number of bytes: 500_000_000 of "500MB".

    Raises:
        ValueError: it is none.
    """
    from fedquilt.core import JobError
    from fedquilt.edge_agent.settings import size_bytes

    try:
        return size_bytes(text)
    except JobError as error:
        raise ValueError(str(error)) from None


SHARE = options.Checked("share", share)
POINTS = options.Checked("points", points)
SIZE = options.Checked("size", size)
WHEN: Final = "When"
PHASES: Final = (
    option(
        "--to", "select", many=True, metavar="WORD", help="Only boards with this label or group; !WORD: without it."
    ),
    option("--canary", type=SHARE, default="5%", help="Share of the boards that get it first; one at least."),
    option("--phases", type=SHARE, many=True, default=("25%", "100%"), help="Shares that have it after each phase."),
    option("--abort-above", type=SHARE, default="10%", help="Undo it once more than this share of the boards failed."),
    option("--patience", type=options.TIME, default="10min", help="Go on without boards that say nothing for so long."),
)
TIMES: Final = (
    option(
        "--soak",
        type=options.TIME,
        default="60s",
        help="For how long it has to hold before a board keeps it.",
        group=WHEN,
    ),
    option(
        "--window",
        metavar="HH:MM-HH:MM",
        help="Only within this time of the boards' day: 02:00-05:00.",
        group=WHEN,
    ),
    option("--force", is_flag=True, help="Exchange it also while a board carries out a task.", group=WHEN),
)


class Phased:
    """What the options say of a rollout."""

    def __init__(self, **given: Any) -> None:
        self._given = given

    def plan(self, kind: wire.Kind, name: str, **more: Any) -> Plan:
        """The plan of a rollout.

        Raises:
            JobError: it could not be carried out.
        """
        from fedquilt.coordinator.rollouts import Plan

        plan = Plan(kind=kind, name=name[:200], **self._given, **more)
        plan.require()
        return plan


def options_of(*more: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds the options of a rollout; the function gets them as `phased`, a `Phased`.

    Args:
        more: options between those of phases and those of times, which the function gets by their own names.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(**given: Any) -> Any:
            names = ("select", "canary", "phases", "abort_above", "force")
            said = {name: given.pop(name) for name in names}
            said |= {"patience_s": given.pop("patience"), "soak_s": given.pop("soak")}
            return function(phased=Phased(**said, window=given.pop("window") or ""), **given)

        for add in reversed((*PHASES, *more, *TIMES)):
            called = add(called)
        return called

    return decorate


def begin(store: Store, plan: Plan, payload: bytes | None, what: str, home: Path) -> None:
    """Queue a rollout, and say where to look.

    Raises:
        JobError: it cannot be carried out, or one of its kind is under way.
        StoreError: the home cannot be written.
    """
    from fedquilt.coordinator import requests
    from fedquilt.coordinator.views import rollouts as view

    id = requests.queue_rollout(store, plan, payload)
    print(f"{id}: {what}; `fedquilt rollouts {id} --home {home}` shows how far it is")
    around = view.sight(home, store.rollouts)
    if said := view.unchosen(plan, around):
        print(f"it waits for {said}")
    if not around.served:
        print(f"no coordinator serves {home}: `fedquilt serve --home {home}` carries it out")


def latest(store: Store, kind: wire.Kind) -> Rollout:
    """The latest rollout of a kind.

    Raises:
        JobError: there is none.
        StoreError: the home cannot be read.
    """
    from fedquilt.core import JobError

    for kept in reversed(store.rollouts.all()):
        if kept.state.plan.kind == kind:
            return kept.state
    raise JobError(f"no rollout of kind {kind!r} in {store.home}: there is nothing to take back")


def take_back(store: Store, kind: wire.Kind) -> str:
    """Take the latest rollout of a kind back, or end it if it is under way; says what comes of it.

    Raises:
        JobError: there is none, or it was taken back already.
        StoreError: the home cannot be written.
    """
    from fedquilt.coordinator import requests

    found = latest(store, kind)
    return (requests.abort if found.under_way else requests.roll_back)(store, found.id)
