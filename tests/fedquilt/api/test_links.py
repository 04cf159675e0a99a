"""Links of simulated boards: what transfers take, on virtual time, with and without messages."""

from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.core import JobError
from fedquilt.costs.cost_model import LinkCost
from fedquilt.transport.memory_link import MemoryBroker


def rounds_of(job: fq.Job, links: list[str], home: Path) -> list[float]:
    fleet = fq.Fleet(4, boards=["jetson-tx2"], links=links)
    return list(fq.simulate(job.replace(fleet=fleet), evaluate=False, home=home).rounds()["seconds"])


def test_links_change_no_bit_where_nobody_is_late(job, tmp_path):
    fleet = fq.Fleet(4, boards=["jetson-tx2"], links=["1MB/s", "3kB/s 1s"])
    with_links = fq.simulate(job.replace(fleet=fleet), evaluate=False, home=tmp_path / "with")
    without = fq.simulate(
        job.replace(fleet=fq.Fleet(4, boards=["jetson-tx2"])), evaluate=False, home=tmp_path / "without"
    )
    assert [tensor.tobytes() for tensor in with_links.weights().values()] == [
        tensor.tobytes() for tensor in without.weights().values()
    ]


def test_with_messages_a_round_takes_about_as_long(job, tmp_path):
    job = job.replace(model=fq.models.mlp(64, [512], 10))
    table = job.replace(fleet=fq.Fleet(4, boards=["jetson-tx2"], links=["100kB/s"]))
    file = str(table.write(tmp_path / "job.toml"))
    assert main(["prepare", file]) == 0
    assert main(["simulate", file, "--link", "memory", "--home", str(tmp_path / "fleet")]) == 0
    told = fq.Run.open(tmp_path / "fleet", "job").rounds()["seconds"]
    ours = rounds_of(job, ["100kB/s"], tmp_path / "ours")
    assert ours[1] > 3.0
    assert all(mine < theirs < 1.1 * mine for mine, theirs in zip(ours[1:], told[1:], strict=True))


def test_messages_of_a_slow_client_follow_one_another_both_ways():
    broker = MemoryBroker()
    slow, fast = broker.connect(pace=LinkCost(0.5, 100.0)), broker.connect()
    fast.subscribe(["up"])
    slow.subscribe(["down"])

    def times(link):
        found = []
        while (due_s := broker.next_delivery_s()) is not None:
            broker.now_s = due_s
            if link in broker.deliver_due():
                found.append(round(broker.now_s, 3))
        return found

    slow.publish("up", b"x" * 100)
    slow.publish("up", b"x" * 100)
    assert times(fast) == [1.501, 2.501]
    broker.now_s = 10.0
    fast.publish("down", b"x" * 100)
    fast.publish("down", b"x" * 100)
    assert times(slow) == [11.501, 12.501]


@pytest.mark.parametrize("link", ["2MB", "fast", "0MB/s", "2MB/s soon", "-1kB/s"])
def test_a_text_that_is_no_link_is_refused_with_its_key(job, link):
    with pytest.raises(JobError, match=r"\[fleet\] links: "):
        fq.simulate(job.replace(fleet=fq.Fleet(4, links=[link])))


def test_a_broker_of_its_own_has_no_simulated_links(job, tmp_path, capsys):
    file = str(job.replace(fleet=fq.Fleet(4, links=["2kB/s"])).write(tmp_path / "job.toml"))
    assert main(["prepare", file]) == 0
    assert main(["simulate", file, "--link", "embedded", "--home", str(tmp_path / "fleet")]) == 2
    assert "use --link memory" in capsys.readouterr().err
