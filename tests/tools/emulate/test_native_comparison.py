"""Two runs of one search beside each other: a whole toy search, and the same with other numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdateAccepted
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError, Update, Usage
from fedquilt.methods.fedstitch import METHOD, SearchState
from fedquilt.models.stitching.search import ranking
from fedquilt.testing.toy_networks import SMALL, build_donors, image_members, run_method
from fedquilt.tools.emulate import native_comparison

bundle, runner = build_donors()
SEARCH = run_method("fedstitch", bundle, image_members(), SMALL, engine=runner, seed=3, rounds=1000)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    """Writes searches into stores, which are closed at the end."""
    made = Stored(tmp_path)
    yield made
    for store in made.stores:
        store.close()


class Stored:
    def __init__(self, folder: Path) -> None:
        self.folder, self.stores = folder, list[Store]()

    def __call__(self, search: Sequence[SearchState], seconds: Sequence[float] = ()) -> tuple[Store, str]:
        store = Store(self.folder / str(len(self.stores)))
        self.stores.append(store)
        run = store.add_job(JobSettings(name="toy", method="fedstitch"), self.folder)
        for round, wall_s in enumerate(seconds):
            update = Update(
                job=run,
                round=round,
                attempt=0,
                device="a",
                weight=1.0,
                bundles={},
                metrics={},
                usage=Usage(wall_s=wall_s),
            )
            store.append_event(run, UpdateAccepted(round=round, update=update))
        for round, each in enumerate(search):
            ref = store.depot.store_bytes(tensors.pack_state(each))
            store.append_event(run, RoundCommitted(round=round, state=ref, finished=METHOD.done(each), metrics={}))
        return store, run


def test_a_run_beside_itself_differs_in_nothing(stored: Stored) -> None:
    """Every network is common, scores and junctions too, and so is the one chosen."""
    found = native_comparison.compare(stored(SEARCH, [0.5, 2.0]), stored(SEARCH))
    last = SEARCH[-1]
    assert (found.rounds, found.tasks_s) == (len(SEARCH), (0.5, 2.0))
    assert (found.paths, found.only, found.score, found.junction) == (len(native_comparison.scores(last)), 0, 0.0, 0.0)
    assert found.chosen == ranking.candidate_name(last.candidates[last.chosen])
    assert found.same


def test_other_numbers_are_told_by_their_largest_difference(stored: Stored) -> None:
    """A score by 0.25 and a junction's weights by 0.5."""
    last = SEARCH[-1]
    first, *rest = last.finalists
    name, parts = next(iter(last.junctions.items()))
    moved = {**parts, "weights": parts["weights"] + 0.5}
    other = replace(
        last,
        finalists=(replace(first, score=first.score - 0.25), *rest),
        junctions={**last.junctions, name: moved},
        frontier=tuple(net for net in last.frontier if net.path != first.path),
        finished=tuple(net for net in last.finished if net.path != first.path),
    )
    found = native_comparison.compare(stored([last]), stored([other]))
    assert found.score == pytest.approx(0.25)
    assert found.junction == pytest.approx(0.5, abs=1e-6)


def test_another_network_chosen_is_told(stored: Stored) -> None:
    """Networks that one of them alone has are counted."""
    last = SEARCH[-1]
    other = replace(last, chosen=(last.chosen + 1) % len(last.candidates), frontier=(), finished=(), current=None)
    found = native_comparison.compare(stored([last]), stored([other]))
    assert not found.same
    assert found.paths == len({finalist.path for finalist in last.finalists})
    assert found.only == len(native_comparison.scores(last)) - found.paths


def test_a_search_that_is_not_finished_has_chosen_none(stored: Stored) -> None:
    """Its scores are compared all the same."""
    found = native_comparison.compare(stored(SEARCH[:2]), stored(SEARCH[:2]))
    assert (found.chosen, found.same) == ("", True)
    assert found.paths > 0


def test_a_run_without_a_round_cannot_be_compared(stored: Stored) -> None:
    """With what tells why."""
    with pytest.raises(JobError, match=r"has committed no round: `fedquilt logs toy-"):
        native_comparison.compare(stored([]), stored(SEARCH))
