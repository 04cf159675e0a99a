"""A board with a certificate that lies in every round: nothing that is committed changes, and the log names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_board
from hostile_board import ATTACKS, LIAR
from waiting import LIMIT_S, wait_until

from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, UpdateAccepted, UpdateRejected
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import round_outcomes


def test_a_hostile_board_changes_no_bit_of_the_result_and_is_named(
    tmp_path: Path, mosquitto: Callable[..., Any]
) -> None:
    """Each of its updates is refused, or never comes; every state is that of the three honest boards."""
    with hostile_board.site(tmp_path) as site:
        site.boards()
        site.coordinate()
        liar = site.liar()
        try:
            wait_until(site.ended, "the end of the job")
            assert site.processes.running["coordinator"].wait(timeout=LIMIT_S) == 0
        finally:
            liar.end()
        found, log = site.facts(), site.log.read_text()
        with Store(site.home) as store:
            told = round_outcomes.load_outcomes(store, "digits").by_round
        calm = site.calm()
    assert isinstance(found[-1], JobEnded)
    assert found[-1].status == "done"
    assert liar.done.keys() >= ATTACKS.keys()
    assert [f.state for f in found if isinstance(f, RoundCommitted)] == [
        f.state for f in calm if isinstance(f, RoundCommitted)
    ]
    assert LIAR not in {fact.update.device for fact in found if isinstance(fact, UpdateAccepted)}
    refused = {fact.round for fact in found if isinstance(fact, UpdateRejected) and fact.device == LIAR}
    assert len(refused) == len(ATTACKS) - 1  # all but what was withheld
    assert told[len(ATTACKS) - 1][LIAR].text == "selected; no update before the round closed"
    lines = [line for line in log.splitlines() if LIAR in line]
    for attack, (_, said) in ATTACKS.items():
        assert any(re.search(said, line) for line in lines), (attack, lines)
    for said in ("unsigned: ", "replayed: ", "the message names another device"):
        assert any("up/update" in line and said in line for line in lines), (said, lines)
