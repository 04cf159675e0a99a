"""Requests to the model runners of a demo: what a runner answers is a claim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt.core import Examples
from fedquilt.http_server import Exchange, HttpServer
from fedquilt.tools.demo.streams import BATCH, Streams

IMAGES = Examples(np.zeros((1, 2), np.float32), np.zeros(1, np.int64))
MODEL = "5" * 64
RIGHT = {"model": "m", "answers": [{"class": 0}] * BATCH}


class Runner:
    """A model runner that gives set answers."""

    def __init__(self) -> None:
        self.told: Any = RIGHT
        self.server = HttpServer("127.0.0.1", 0, self._answer)
        self.server.start()

    def _answer(self, exchange: Exchange) -> None:
        exchange.read_body(1 << 20)
        exchange.answer(200, {}, msgspec.json.encode(self.told))


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.server.close()


@pytest.mark.parametrize(
    "told",
    [
        {**RIGHT, "answers": [{"class": 0}] * (BATCH - 1)},
        {**RIGHT, "answers": [{}] * BATCH},
        {**RIGHT, "answers": None},
        {"answers": RIGHT["answers"]},
        {**RIGHT, "model": 3},
        [],
        None,
    ],
)
def test_an_odd_answer_is_noted_and_the_stream_goes_on(runner: Runner, told: Any) -> None:
    """One runner of another version ends no stream."""
    streams = Streams({"a": runner.server.url}, {}, IMAGES)
    runner.told = told
    streams._ask("a")
    assert streams.answers == []
    assert [line.split(":")[0] for line in streams.failed] == ["a"]
    runner.told = RIGHT
    streams._ask("a")
    assert [(each.model, each.right, each.given) for each in streams.answers] == [("m", BATCH, BATCH)]
    streams._links["a"].close()


@pytest.mark.parametrize("text", ["[]", '{"at":"x","model":1,"drift":"y","accuracy":[]}', "{"])
def test_an_odd_note_of_a_runner_is_passed_over(tmp_path: Path, text: str) -> None:
    """It is read again a second later."""
    streams = Streams({}, {"a": tmp_path}, IMAGES)
    (tmp_path / "served.json").write_text(text)
    streams._sample()
    assert streams.said == []
    (tmp_path / "served.json").write_text(f'{{"at":1,"model":"{MODEL}","drift":null,"accuracy":0.5,"more":1}}')
    streams._sample()
    assert [(said.device, said.model, said.accuracy) for said in streams.said] == [("a", MODEL, 0.5)]


def test_a_runner_that_is_not_there_is_noted(runner: Runner) -> None:
    """Its board may be starting."""
    url = runner.server.url
    runner.server.close()
    streams = Streams({"a": url}, {}, IMAGES)
    streams._ask("a")
    assert len(streams.failed) == 1
