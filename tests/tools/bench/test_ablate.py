"""Ablations: which runs there are, that none is played twice, and that the table says who wins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedquilt.cli import main
from fedquilt.coordinator import settings as jobs
from fedquilt.core import JobError
from fedquilt.testing.toy_networks import SMALL, build_donors, image_members, make_job, write_bundle
from fedquilt.tools.experiments.baselines import BaselineSetup, pool_examples
from fedquilt.tools.lab.bench.ablation import searches as ablation_searches
from fedquilt.tools.lab.bench.ablation import table
from fedquilt.tools.lab.bench.ablation.searches import AblationCase, AblationRow, AblationSetting, Finished
from fedquilt.tools.lab.demo import HERE

DEMO = jobs.load_job(HERE / "job.toml")
BUNDLE = HERE / "bundle"


def row(part: str, accuracy: float, seed: int = 0, name: str = "", condition: str = "iid") -> AblationRow:
    return AblationRow(
        condition=condition, seed=seed, part=part, name=name or part, accuracy=accuracy, tested=100, wall_s=1.0 + seed
    )


# -- which runs -----------------------------------------------------------------------------------


def test_there_is_a_run_for_each_partition_seed_and_part() -> None:
    """Two partitions and two seeds of two parts: eight, each with its own key and its own job."""
    found = ablation_searches.create_cases(DEMO, BUNDLE, ["0.1", "iid"], [1, 0], ["heads", "default"])
    assert [(case.condition, case.seed, case.part) for case in found] == [
        (condition, seed, part)
        for condition in ("alpha 0.1", "iid")
        for seed in (0, 1)
        for part in ("default", "heads")
    ]
    assert len({case.key for case in found}) == 8
    job = jobs.parse_job(json.loads(found[2].job))
    assert (job.seed, job.data["seed"], job.data["partition"], job.data["alpha"]) == (1, 1, "dirichlet", 0.1)


def test_the_jobs_own_partition_is_the_default_and_has_the_same_key_by_name() -> None:
    """The demo's is Dirichlet with alpha 0.5."""
    own = ablation_searches.create_cases(DEMO, BUNDLE, (), [0])
    assert {case.condition for case in own} == {"alpha 0.5"}
    assert [case.part for case in own] == list(ablation_searches.PARTS)
    assert [case.key for case in own] == [
        case.key for case in ablation_searches.create_cases(DEMO, BUNDLE, ["0.5"], [0])
    ]


def test_a_key_changes_with_whatever_the_run_depends_on(tmp_path: Path) -> None:
    """The parameters and the donors; not the place of the bundle."""
    (case,) = ablation_searches.create_cases(DEMO, BUNDLE, (), [0], ["default"])
    other = msgspec.structs.replace(DEMO, params={**DEMO.params, "k": 2})
    assert ablation_searches.create_cases(other, BUNDLE, (), [0], ["default"])[0].key != case.key
    index = (BUNDLE / "bundle.json").read_bytes()
    shutil.copytree(BUNDLE, tmp_path, dirs_exist_ok=True)
    moved = msgspec.structs.replace(case, folder=str(tmp_path))
    assert moved.key == case.key
    changed = msgspec.json.decode(index)
    changed["meta"]["other"] = 1
    (tmp_path / "bundle.json").write_bytes(msgspec.json.encode(changed))
    assert moved.key != case.key


@pytest.mark.parametrize(
    ("alphas", "only", "said"),
    [
        (["0"], (), "alpha"),
        (["some"], (), "--alpha some"),
        ((), ["defaults"], "no-memo"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(
    alphas: Sequence[str], only: Sequence[str], said: str
) -> None:
    """Each names what is wrong, or what there is."""
    with pytest.raises(JobError, match=said):
        ablation_searches.create_cases(DEMO, BUNDLE, alphas, [0], only)


def test_jobs_of_other_methods_or_without_data_are_refused() -> None:
    """There is nothing to stitch, or nothing to test on."""
    with pytest.raises(JobError, match="fedavg"):
        ablation_searches.create_cases(jobs.parse_job({"name": "other", "method": "fedavg"}), BUNDLE, (), [0])
    with pytest.raises(JobError, match=r"no \[data\]"):
        ablation_searches.create_cases(msgspec.structs.replace(DEMO, data={}), BUNDLE, (), [0])


# -- one run --------------------------------------------------------------------------------------


@pytest.fixture
def setting(tmp_path: Path) -> Callable[..., AblationSetting]:
    """Makes toy donors and devices, with a runner that has run nothing yet; so many devices take part in a round."""

    def make(size: int = 0, **changes: Any) -> AblationSetting:
        bundle, runner = build_donors()
        devices = image_members()
        test = pool_examples([replace(each, train=each.held) for each in devices])
        bench = BaselineSetup(bundle, Path, runner, pool_examples(devices), test)
        params = {**SMALL, **ablation_searches.BASE, **changes}
        searches = make_job("fedstitch", params, seed=3, rounds=1000, cohort={"size": size})
        return AblationSetting(bench, devices, searches, write_bundle(tmp_path, bundle))

    return make


@pytest.mark.parametrize("part", ablation_searches.VARIANTS)
def test_every_variant_is_a_whole_search_with_an_account(part: str, setting: Callable[..., AblationSetting]) -> None:
    """It ends with a tested network, and says what a device's round took."""
    (found,) = ablation_searches.run_search(part, setting(2))
    assert 0.3 < found["accuracy"] <= 1
    assert found["rounds"] >= 4
    least = found["rounds"] / 2
    assert found["scored"] == 0 if part == "no-search" else found["scored"] >= least
    assert min(found["task_s"], found["down_bytes"], found["up_bytes"]) > 0
    assert found["path"].startswith("head on ") == (part != "paper")  # which keeps the donors' own classes


ACCOUNT = ("accuracy", "rounds", "down_bytes", "up_bytes", "scored", "path")


@pytest.mark.parametrize(
    "part",
    ["input", "output", "no-native", "no-join", "no-search", pytest.param("paper", marks=pytest.mark.nightly)],
)
def test_a_variant_is_another_search(part: str, setting: Callable[..., AblationSetting]) -> None:
    """What it changes shows in its account."""
    given = setting(screen=1)
    usual, other = (ablation_searches.run_search(name, given)[0] for name in ("default", part))
    assert [usual[name] for name in ACCOUNT] != [other[name] for name in ACCOUNT]


def test_without_what_is_kept_the_network_is_the_same_and_more_is_run(
    setting: Callable[..., AblationSetting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the time of the search is another; after it every device runs all donors on all of its images."""
    accounts, searching, real = [], [], ablation_searches.iterate_states
    for part in ("default", "no-memo"):
        given = setting()

        def states(*args: Any, given: AblationSetting = given, **options: Any) -> Iterator[Any]:
            for state in real(*args, **options):
                if state.phase == "gather":
                    searching.append(sum(given.bench.engine.runs.values()))
                yield state

        monkeypatch.setattr(ablation_searches, "iterate_states", states)
        accounts.append([ablation_searches.run_search(part, given)[0][name] for name in ACCOUNT])
    assert accounts[0] == accounts[1]
    assert searching[1] > 1.5 * searching[0]


def test_comparisons_name_their_donor(setting: Callable[..., AblationSetting]) -> None:
    """However many devices are asked in a round, a donor's new head is that of all of them."""
    whole, some = setting(), setting(2)
    assert [each["name"] for each in ablation_searches.run_baseline("unmodified", whole)] == [
        "ash, unmodified",
        "elm, unmodified",
    ]
    assert [each["name"] for each in ablation_searches.run_baseline("heads", whole)] == [
        f"{d}, new head" for d in ("ash", "elm", "fir")
    ]
    assert ablation_searches.run_baseline("heads", some) == ablation_searches.run_baseline("heads", whole)
    mean, best = ablation_searches.run_baseline("alone", whole)
    assert (mean["name"], best["name"]) == ("one device alone, mean", "one device alone, best of 4")
    assert mean["accuracy"] <= best["accuracy"]


# -- all runs -------------------------------------------------------------------------------------


class Table:
    """Plays cases by looking them up, and remembers which."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.broken: set[str] = set()

    def __call__(self, todo: Sequence[AblationCase]) -> Iterator[Finished]:
        for case in reversed(todo):  # processes finish in any order
            self.seen.append(case.part)
            error = JobError("it broke")
            yield case, error if case.part in self.broken else [row(case.part, 0.5, case.seed)], 1.0


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    """Only what is new is played; the rows come in the order of the cases."""
    player, said = Table(), []
    first = ablation_searches.create_cases(DEMO, BUNDLE, (), [0], ["default", "heads"])
    ablation_searches.run_cases(first, tmp_path, player, said.append)
    more = ablation_searches.create_cases(DEMO, BUNDLE, (), [0], ["default", "paper", "heads"])
    rows, failed = ablation_searches.run_cases(more, tmp_path, player, said.append)
    assert player.seen == ["heads", "default", "paper"]
    assert [each.part for each in rows] == ["default", "paper", "heads"]
    assert failed == []
    assert any("2 of 3 runs" in line for line in said)


def test_a_run_that_fails_is_told_and_tried_again_next_time(tmp_path: Path) -> None:
    """The others are played all the same, and kept. A file that is damaged is played anew."""
    player = Table()
    player.broken = {"paper"}
    todo = ablation_searches.create_cases(DEMO, BUNDLE, (), [0], ["default", "paper"])
    rows, failed = ablation_searches.run_cases(todo, tmp_path, player, lambda line: None)
    assert [each.part for each in rows] == ["default"]
    assert failed == ["alpha 0.5, seed 0, paper: it broke"]
    (file,) = (tmp_path / "runs").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    player.broken = set()
    rows, failed = ablation_searches.run_cases(todo, tmp_path, player, lambda line: None)
    assert player.seen == ["paper", "default", "paper", "default"]
    assert (len(rows), failed) == (2, [])


# -- the table ------------------------------------------------------------------------------------


def test_the_table_has_means_and_spreads() -> None:
    """0.5 and 0.7: mean 0.6, sd 0.1414; one seed has no spread; what no row knows stays unknown."""
    rows = [row("default", 0.5), row("default", 0.7, seed=1), row("heads", 0.4)]
    one, other = table.summarise_rows(rows)
    assert (one["runs"], one["accuracy"], one["wall_s"]) == (2, pytest.approx(0.6), 1.5)
    assert one["sd"] == pytest.approx(0.02**0.5)
    assert (other["sd"], other["rounds"]) == (None, None)


def test_the_sentences_say_who_wins_either_way() -> None:
    """Differences are of runs with the same seed: 10 and 20 points more than one, 10 less than another."""
    rows = [
        row("default", 0.6),
        row("default", 0.8, seed=1),
        row("alone", 0.5, name="one alone"),
        row("alone", 0.6, seed=1, name="one alone"),
        row("heads", 0.7, name="ash, new head"),
        row("heads", 0.9, seed=1, name="ash, new head"),
    ]
    assert table.format_verdicts(rows) == [
        "Stitching beats, by so many points: one alone 15.0 ± 7.1.",
        "Stitching does not beat, short by so many points: ash, new head 10.0 ± 0.0.",
    ]


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ((0.5, 0.6), "Weighted voting beats plain voting (+15.0 ± 7.1 points)."),
        ((0.7, 0.8), "Weighted voting does not beat plain voting (-5.0 ± 7.1 points, which is within the spread over"),
        ((0.6, 0.8), "Weighted and plain voting come to the same accuracy with every seed."),
    ],
)
def test_the_votes_are_compared_either_way(plain: tuple[float, float], said: str) -> None:
    """Weighted: 0.6 and 0.8."""
    rows = [row("default", 0.6), row("default", 0.8, seed=1)]
    rows += [row("plain-vote", accuracy, seed=seed) for seed, accuracy in enumerate(plain)]
    (found,) = table.format_verdicts(rows)
    assert found.startswith(said)


def test_partitions_are_told_apart() -> None:
    """Under one of them stitching wins, under the other it does not."""
    rows = [row("default", 0.6), row("heads", 0.5)]
    rows += [row("default", 0.6, condition="alpha 0.1"), row("heads", 0.7, condition="alpha 0.1")]
    text = "\n".join(table.format_table(rows))
    assert text.index("iid: accuracy on 100 test images") < text.index("Stitching beats") < text.index("alpha 0.1")
    assert text.index("alpha 0.1") < text.index("Stitching does not beat")


# -- the command ----------------------------------------------------------------------------------


def test_the_command_plays_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo's donors as they are, in a process of their own; the second time nothing is played."""
    pytest.importorskip("onnxruntime", reason="blocks are run by ONNX Runtime")
    pytest.importorskip("matplotlib", reason="the plot takes matplotlib")
    words = ["bench", "stitch", "--ablate", "--only", "unmodified", "--seeds", "0", "--out", str(tmp_path)]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "residual, unmodified" in told.out
    assert "[1/1" in told.err
    drawn = (tmp_path / "ablation.svg").read_text(encoding="utf-8")
    assert drawn.count("<svg") == 1
    assert main([*words, "--format", "json"]) == 0
    again = capsys.readouterr()
    assert "[1/1" not in again.err
    found = json.loads(again.out)
    assert [each["name"] for each in found["runs"]] == [f"{d}, unmodified" for d in ("plain", "residual", "separable")]
    assert 0.8 < found["runs"][1]["accuracy"] < 0.95


@pytest.mark.parametrize(
    "words",
    [
        ["idle", "--size", "64"],
        ["idle", "--ablate"],
        ["stitch", "--seeds", "0"],
        ["stitch", "--only", "default"],
        ["stitch", "--ablate", "--size", "64"],
        ["memory", "--out", "here"],
    ],
    ids=" ".join,
)
def test_an_option_of_another_bench_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence says where it belongs; the exit code is that of a wrong command line."""
    assert main(["bench", *words]) == 2
    option = next(word for word in reversed(words) if word.startswith("--"))
    assert f"{option} is an option of `bench stitch" in capsys.readouterr().err
