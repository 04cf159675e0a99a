"""Mistakes that people make at the command line: each answer names the value, the place and the fix in three lines."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import dashes
import pytest

from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.storage.store import Store

WIDTH, LINES = 80, 3
HEAD = "length,width,colour,kind"
ROWS = [f"{3 + number % 7}.5,{number % 5}.25,{('red', 'blue')[number % 2]},{'abc'[number % 3]}" for number in range(60)]
JOB = """
name = "job"
method = "fedavg"
rounds = 2
engine = "numpy"
[params]
lr = 0.05
batch = 8
[cohort]
quorum = 0.5
[model]
name = "mlp"
inputs = 2
hidden = [4]
classes = 3
[data]
path = "flowers.csv"
x = ["length", "width"]
y = "kind"
labels = ["a", "b", "c"]
partition = "dirichlet"
alpha = 0.5
[fleet]
devices = 3
boards = ["jetson-nano"]
budgets = ["256MB"]
"""
AGENT = 'device = "a"\nhome = "state"\nbudget = "500MB"\n'


def numbered(*labels: str) -> str:
    return "\n".join(["a,b,y", *(f"{n % 9},{n % 7},{labels[n % len(labels)]}" for n in range(50))])


FILES: dict[str, str | bytes] = {
    "flowers.csv": "\n".join([HEAD, *ROWS]),
    "empty.csv": "",
    "head.csv": HEAD,
    "one.csv": numbered("x"),
    "gaps.csv": numbered("x", "", "z"),
    "texts.csv": "\n".join(["a,y", *(f"{n % 9},name{n}" for n in range(50))]),
    "ragged.csv": f"{HEAD}\n1,2,red,a\n1,2\n",
    "nohead.csv": "\n".join(ROWS),
    "twice.csv": "a,a,y\n1,2,x\n2,1,z\n",
    "labels.csv": "y\nx\nz\n",
    "huge.csv": numbered("1000000000000000000", "1000000000000000001"),
    "comma.csv": "\n".join(["a;y", *(f"{n},5;{'xz'[n % 2]}" for n in range(50))]),
    "latin.csv": "\n".join([HEAD, *ROWS]).replace("red", "gr\xfcn").encode("latin-1"),
    "wide.csv": "\n".join([HEAD, *ROWS]).encode("utf-16"),
    "sheet.csv": b"PK\x03\x04" + bytes(range(200)),
    "broken.npz": b"PK\x03\x04" + bytes(range(200)),
    "note.txt": "hello",
    "images/cat/a.png": b"no png",
    "images/dog/b.png": b"no png",
    "job.toml": JOB,
    "words.toml": "hello world\n",
    "bytes.toml": bytes(range(128, 200)),
    "agent.toml": AGENT,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    (made / "nothing").mkdir()
    for name, content in FILES.items():
        file = made / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (made / "lost.csv").symlink_to("nowhere.csv")
    dashes.add_run(made / "runs", dashes.facts(dashes.names(5), ended=True), status="stopped")
    return made


def answer(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, str]:
    try:
        code = main(words)
    except SystemExit as end:
        code = int(str(end.code))
    return code, capsys.readouterr().err


def assert_helpful(answered: tuple[int, str], code: int, *named: str) -> None:
    assert answered[0] == code, answered
    error = answered[1].strip().replace(f"{os.getcwd()}/", "")
    assert error.startswith("fedquilt: ")
    assert "Traceback" not in error
    assert sum(-(-len(line) // WIDTH) for line in error.splitlines()) <= LINES, error
    for each in named:
        assert each in error, error
    if "did you mean" in error:  # the suggestion comes before any list
        assert not re.search(r"(there are|keys of|it has|it knows).*did you mean", error), error


@pytest.mark.parametrize(
    ("line", "code", "named"),
    [
        ("simulate flower.csv --label kind", 3, ("flower.csv", "did you mean 'flowers.csv'?")),
        ("simulate flowers.csv", 3, ("name the column to predict", "--label kind")),
        ("simulate flowers.csv --label Kind", 3, ("'Kind'", "did you mean 'kind'?")),
        ("simulate empty.csv --label y", 3, ("empty.csv is empty", "first line")),
        ("simulate head.csv --label kind", 3, ("head.csv", "no rows", "add a row for each example")),
        ("simulate one.csv --label y", 3, ("one.csv", "all 50 examples have the same label", "--label")),
        ("simulate gaps.csv --label y", 3, ("'y' is missing in 17 of 50 rows", "leave these rows out")),
        ("simulate texts.csv --label y", 3, ("50 different labels in 50 examples", "choose another")),
        ("simulate ragged.csv --label kind", 3, ("ragged.csv, line 3: 2 values", "4 columns")),
        ("simulate nohead.csv --label kind", 3, ("'kind'", "insert a line with column names")),
        ("simulate twice.csv --label y", 3, ("'a'", "rename one")),
        ("simulate labels.csv --label y", 3, ("labels.csv", "y is the only column")),
        ("simulate comma.csv --label y", 3, ("comma.csv", "numbers with a decimal comma: write a point")),
        ("simulate latin.csv --label kind", 3, ("latin.csv", "iconv -f LATIN1 -t UTF-8")),
        ("simulate wide.csv --label kind", 3, ("wide.csv", "iconv -f UTF-16 -t UTF-8")),
        ("simulate sheet.csv --label kind", 3, ("sheet.csv", "Excel", "save the sheet as CSV")),
        ("simulate huge.csv", 3, ("1000000000000000000 and 1000000000000000001", "write large classes as words")),
        ("simulate lost.csv", 3, ("lost.csv is a link to nowhere.csv", "does not exist")),
        ("simulate x\udce9.csv --label kind", 2, ("'x\\udce9.csv' is not UTF-8 text", "rename")),
        ("simulate broken.npz", 3, ("broken.npz", "numpy.savez")),
        ("simulate note.txt", 3, ("note.txt", "a table as .csv")),
        ("simulate nothing", 3, ("nothing has no images", "nothing/<class>/")),
        ("simulate images", 3, ("images/cat/a.png", "remove or replace the file")),
        ("simulate flowers.csv --label kind --devices 0", 2, ("--devices", "0 is below the minimum of 1")),
        (
            "simulate flowers.csv --label kind --out nothing",
            2,
            ("'nothing'", "write nothing.toml"),
        ),
        ("simulate digits --rounds 3", 2, ("no such option: --rounds (",)),
        ("simulate flowers.csv --label kind --out job.toml", 6, ("job.toml exists already", "--force", "--out")),
        ("simulate job.toml --label kind", 2, ("--label", "job.toml")),
        ("simulate job.toml --home note.txt", 6, ("note.txt", "name a folder in place of a file")),
        ("simulate job.toml --engine pol", 2, ("'pol'", "pool")),
        ("report job other", 2, ("extra argument (other)", "write fedquilt report RUN")),
        ("simulate", 2, ("SOURCE", "fedquilt simulate --help")),
        ("simlate job.toml", 2, ("'simlate'", "did you mean 'simulate'?")),
        ("run jbo.toml", 2, ("jbo.toml", "did you mean 'job.toml'?")),
        ("run nothing", 2, ("nothing", "name a TOML file")),
        ("run words.toml", 2, ("words.toml is not TOML", "line 1")),
        ("run bytes.toml", 2, ("bytes.toml", "UTF-8", "name a TOML file")),
        ("run agent.toml", 2, ("agent.toml", "`fedquilt agent` reads them")),
        ("agent job.toml", 2, ("job.toml", "run a job with `fedquilt run`")),
        ("run job.toml --broker 127.0.0.1", 2, ("'127.0.0.1'", "write mqtt[s]://[user@]host[:port]")),
        ("run job.toml --broker mqtt://127.0.0.1:99999", 2, ("99999", "0-65535")),
        ("run job.toml --broker mqtts://127.0.0.1 --ca nope.pem", 2, ("nope.pem", "check its path")),
        ("run job.toml --broker mqtts://127.0.0.1 --ca note.txt", 2, ("note.txt", "PEM")),
        ("run job.toml --broker mqtt://u@127.0.0.1 --password-file nope", 2, ("password file", "nope")),
        ("run job.toml --fleet a/b", 2, ("--fleet", "'a/b'")),
        ("ls --home nothing", 6, ("no runs in nothing", "set --home")),
        ("why digit --home runs", 6, ("'digit'", "did you mean 'digits'?")),
        ("why digits 99 --home runs", 2, ("round 99 does not exist", "1 to 3")),
        ("why digits --device board-0001 --home runs", 2, ("'board-0001'", "did you mean 'board-0000")),
        ("stop digits --home runs", 2, ("already stopped",)),
        ("report digits --home runs --out nothing", 6, ("nothing", "name a file in place of a folder")),
        ("model run nope.onnx flowers.csv", 4, ("nope.onnx", "`fedquilt model export`")),
        ("compare job.toml --methods fedprxo", 2, ("'fedprxo'", "did you mean 'fedprox'?")),
        ("compare job.toml --set fedavg.lrr=1", 2, ("lrr", "did you mean 'lr'?")),
        ("compare job.toml --target 95", 2, ("95", "use 0.95")),
        ("dash --home runs --listen 8080", 2, ("'8080'", "write HOST:PORT")),
        (
            "init --method fedvag --data digits --devices 3 --rounds 2 --out new.toml",
            2,
            ("'fedvag'", "did you mean 'fedavg'?"),
        ),
        ("prune --keep -1 --home runs", 2, ("--keep", "-1 is below the minimum of 0")),
        ("doctor --hom runs", 2, ("--hom", "did you mean '--home'?")),
    ],
)
def test_a_mistake_at_the_command_line_is_answered_with_its_fix(
    line: str,
    code: int,
    named: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Suggestions come before lists, and nothing is longer than three lines of a terminal."""
    monkeypatch.chdir(folder)
    assert_helpful(answer(capsys, line.split()), code, *named)


@pytest.mark.parametrize(
    ("old", "new", "code", "named"),
    [
        ("rounds = 2", "ruonds = 2", 2, ("'ruonds'", "did you mean 'rounds'?")),
        ("rounds = 2", "rounds = -3", 2, ("rounds = -3", "at least 1")),
        ("rounds = 2", "rounds = ", 2, ("line 4", "'rounds ='")),
        ("rounds = 2", "rounds = 2\nrounds = 3", 2, ("line 5", "'rounds = 3'")),
        ('"fedavg"', "fedavg", 2, ("line 3", "text is written in quotes")),
        ('"fedavg"', '"fedvag"', 2, ("'fedvag'", "did you mean 'fedavg'?")),
        ('"numpy"', '"numpi"', 2, ("'numpi'", "torch or numpy")),
        ("lr = 0.05", "lr = -0.1", 2, ("lr = -0.1", "above 0")),
        ("quorum = 0.5", "quorum = 5", 2, ("quorum = 5", "at most 1")),
        ("quorum = 0.5", "size = 99", 2, ("99", "3 devices", "--devices")),
        ('"mlp"', '"mpl"', 4, ("'mpl'", "did you mean 'mlp'?")),
        ("inputs = 2", "inputs = 7", 3, ("2 values", "takes 7")),
        ("classes = 3", "classes = 2", 3, ("3 classes", "[model] classes = 3")),
        ('"flowers.csv"', '"flwers.csv"', 3, ("flwers.csv", "did you mean 'flowers.csv'?")),
        ('y = "kind"', 'y = "knd"', 3, ("'knd'", "did you mean 'kind'?")),
        ('"a", "b", "c"]', '"a", "b"]', 3, ("line 4", "'c'", "[data] labels")),
        ("alpha = 0.5", "alpha = -1", 2, ("alpha = -1", "above 0")),
        ("devices = 3", "devices = 500", 3, ("500 shares", "60 examples", "simulate fewer devices")),
        ('"256MB"', '"256"', 2, ("job.toml: [fleet]", "'256' has no unit", '"256MB"')),
        ('method = "fedavg"', "lr = 0.1", 2, ("there is no key 'lr'",)),
        ("rounds = 2", "rounds = 2\nlr = 0.1", 2, ("lr = 0.1", "below a line [params]")),
        ("hidden = [4]", "hidden = [0]", 4, ("from inputs = 2, hidden = [0], classes = 3:", "above 0")),
    ],
)
def test_a_mistake_in_a_job_file_is_answered_with_its_fix(
    old: str,
    new: str,
    code: int,
    named: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert JOB.count(old) == 1
    Path("flowers.csv").write_text(str(FILES["flowers.csv"]))
    Path("job.toml").write_text(JOB.replace(old, new))
    assert_helpful(answer(capsys, ["simulate", "job.toml"]), code, *named)
    assert not (old in JOB[JOB.index("[fleet]") :] and new != "devices = 500" and Path("job.bundle").exists())


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("budget = ", "budgt = ", ("'budgt'", "did you mean 'budget'?")),
        ('"500MB"', "500", ("budget = 500", "text in quotes")),
        ('"500MB"', '"500"', ("'500'", "500MB")),
        ('"a"', '"a/b#"', ("'a/b#'", "a-z")),
        ("device = ", 'board = "jetson-nno"\ndevice = ', ("'jetson-nno'", "did you mean 'jetson-nano'?")),
        ("device = ", 'broker = { url = "mqtt://u:pw@h" }\ndevice = ', ("***", "use a password file")),
    ],
)
def test_a_mistake_in_an_agents_settings_is_answered_with_its_fix(
    old: str, new: str, named: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert AGENT.count(old) == 1
    file = tmp_path / "agent.toml"
    file.write_text(AGENT.replace(old, new))
    code, error = answer(capsys, ["agent", str(file)])
    assert_helpful((code, error.replace(str(tmp_path), "")), 2, *named)


def test_a_port_in_use_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        found = answer(capsys, ["dash", "--home", str(folder / "runs"), "--listen", place])
    assert_helpful(found, 2, place, "choose another address")


def test_a_broker_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flowers.csv").write_text(str(FILES["flowers.csv"]))
    Path("job.toml").write_text(JOB)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = answer(capsys, ["run", "job.toml", "--broker", f"mqtt://127.0.0.1:{port}"])
    assert_helpful(found, 5, f"mqtt://127.0.0.1:{port} refused the connection", "start the broker")


def test_a_failed_check_leaves_no_bundle_that_the_next_command_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle of 7 inputs fails its check. After the correction the job is prepared anew."""
    monkeypatch.chdir(tmp_path)
    Path("flowers.csv").write_text(str(FILES["flowers.csv"]))
    Path("job.toml").write_text(JOB.replace("inputs = 2", "inputs = 7"))
    assert answer(capsys, ["simulate", "job.toml"])[0] == 3
    Path("job.toml").write_text(JOB)
    assert answer(capsys, ["simulate", "job.toml"]) == (0, "")


def test_a_run_without_a_round_is_named_by_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(tmp_path) as store:
        run = store.add_job(settings.parse_job({"name": "job", "method": "fedavg"}), tmp_path)
        store.set_status(run, "interrupted")
    assert main(["why", "job", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(run)


def test_a_missing_extra_is_named_before_anything_begins(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["serve", "--home", "new", "--metrics", "127.0.0.1:0"]) == 2
    told = capsys.readouterr()
    said = "fedquilt: this needs prometheus_client, which is not installed: pip install 'fedquilt[metrics]'\n"
    assert (told.out, told.err, Path("new").exists()) == ("", said, False)
