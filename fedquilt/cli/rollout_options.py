"""Rollout options, shared by `rollout model`, `rollout agent` and `rollout settings`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedquilt.cli import options
from fedquilt.cli.commands import option
from fedquilt.console import units

if TYPE_CHECKING:
    from fedquilt import wire
    from fedquilt.coordinator.rounds.rollout import RolloutPlan
    from fedquilt.coordinator.storage.store import Store


def parse_share(text: str) -> float:
    """Parse a share such as "5%" as 0.05. The percent sign is optional.

    Raises:
        ValueError: If the text is not a share from 0 to 100 %.
    """
    value = units.parse_amount(text if text.endswith("%") else f"{text}%", {"%": 0.01}, "share")
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is not between 0 % and 100 %")
    return round(value, 9)


def parse_points(text: str) -> float:
    """Parse a difference of accuracies such as "-0.5pt" as -0.005.

    Raises:
        ValueError: If the text is not a number of points from -100 to 100.
    """
    value = units.parse_amount(text, {"pt": 0.01, "%": 0.01}, "number of points")
    if not -1 <= value <= 1:
        raise ValueError(f"{text} is not between -100pt and 100pt")
    return round(value, 9)


def parse_size(text: str) -> int:
    from fedquilt.core import JobError
    from fedquilt.edge_agent.settings import parse_size

    try:
        return parse_size(text)
    except JobError as error:
        raise ValueError(str(error)) from None


SHARE = options.ParsedType("share", parse_share)
POINTS = options.ParsedType("points", parse_points)
SIZE = options.ParsedType("size", parse_size)
WHEN: Final = "When"
PHASES: Final = (
    options.label_option("select"),
    option(
        "--phases",
        type=SHARE,
        many=True,
        default=("5%", "25%", "100%"),
        help="Cumulative shares of boards, one for each phase; the first is the canary.",
    ),
    option("--abort-above", type=SHARE, default="10%", help="Roll back if more than this share of the boards failed."),
    option(
        "--patience",
        type=options.TIME,
        default="10min",
        help="Time after which a phase no longer waits for silent boards.",
    ),
)
TIMES: Final = (
    option(
        "--soak",
        type=options.TIME,
        default="60s",
        help="Time without failures before a board commits the release.",
        group=WHEN,
    ),
    option(
        "--window",
        metavar="HH:MM-HH:MM",
        help="Only within this time of the boards' day: 02:00-05:00.",
        group=WHEN,
    ),
    option("--force", is_flag=True, help="Replace the running version also during a task.", group=WHEN),
)


class RolloutOptions:
    def __init__(self, **given: Any) -> None:
        self._given = given

    def make_plan(self, kind: wire.Kind, name: str, **more: Any) -> RolloutPlan:
        from fedquilt.coordinator.rounds.rollout import RolloutPlan

        plan = RolloutPlan(kind=kind, name=name[:200], **self._given, **more)
        plan.require_valid()
        return plan


def rollout_options(*more: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of a rollout to a command.

    The command gets their values as one argument, `phased`.

    Args:
        more: Further options, listed between phases and times, which the function gets by name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**given: Any) -> Any:
            said = {name: given.pop(name) for name in ("select", "abort_above", "force")}
            said["canary"], *rest = given.pop("phases")
            said["phases"] = tuple(rest)
            said |= {"patience_s": given.pop("patience"), "soak_s": given.pop("soak")}
            return function(phased=RolloutOptions(**said, window=given.pop("window") or ""), **given)

        for add in reversed((*PHASES, *more, *TIMES)):
            wrapper = add(wrapper)
        return wrapper

    return decorate


def submit_rollout(store: Store, plan: RolloutPlan, payload: bytes | None, what: str, home: Path) -> None:
    """Queue a rollout, and print its id and what it waits for.

    Raises:
        JobError: If the plan is impossible, or another rollout of its kind is in progress.
        StoreError: If the home cannot be written.
    """
    from fedquilt.coordinator import run_control
    from fedquilt.coordinator.views import rollouts as view

    id = run_control.queue_rollout(store, plan, payload)
    print(f"{id}: {what}; `fedquilt rollout status {id} --home {home}` shows how far it is")
    around = view.load_context(home, store.rollouts)
    if said := view.describe_unmatched_labels(plan, around):
        print(f"it waits for {said}")
    if not around.served:
        print(f"no coordinator serves {home}: `fedquilt serve --home {home}` carries it out")
