"""fq.compare: the command's runs and its folder of finished ones, and what its table says."""

import pytest

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.tools.experiments import comparison as experiments_comparison
from fedquilt.tools.experiments.single_run import EvaluationPoint, SeedRun


def mark(rounds: int, accuracy: float) -> EvaluationPoint:
    scores = {"test": accuracy, "held": accuracy / 2, "mean": None, "worst_decile": None}
    costs = {"seconds": 2.0, "down_bytes": 60, "up_bytes": 40, "energy_j": 5.0}
    totals = {name: cost * rounds for name, cost in costs.items()}
    return EvaluationPoint(rounds=rounds, real_s=1.0, **scores, **totals)


def made(method: str, seed: int, *accuracies: float) -> SeedRun:
    marks = tuple(mark(number, value) for number, value in enumerate(accuracies, 1))
    return SeedRun(method=method, seed=seed, params={}, devices=3, tested=100, marks=marks)


def comparison(*jobs: fq.Job) -> fq.Comparison:
    runs = ((made("a", 0, 0.5, 0.6), made("a", 1, 0.4, 0.7)), (made("b", 0, 0.6, 0.7), made("b", 1, 0.6, 0.9)))
    return fq.Comparison(jobs, runs, ())


PROX = fq.Job(method="fedprox", params={"mu": 0.1})


def test_costs_are_counted_to_the_target():
    first, second = comparison(PROX, PROX.replace(method="scaffold")).table(target=0.6)
    assert (first["reached"], first["rounds"], first["joules"]) == (2, 2, 10.0)
    assert (second["reached"], second["rounds"], second["joules"]) == (2, 1, 5.0)
    assert comparison(PROX, PROX.replace(method="scaffold")).table(target=0.99)["rounds"] == [None, None]


def test_jobs_of_one_method_are_called_by_what_differs():
    """Else their rows could not be told apart."""
    stronger = PROX.replace(params={"mu": 1.0})
    assert comparison(PROX, stronger).labels == ["fedprox params.mu=0.1", "fedprox params.mu=1.0"]
    assert comparison(PROX, PROX.replace(method="scaffold")).labels == ["fedprox", "scaffold"]


def test_every_evaluation_is_a_row_of_the_curves():
    found = comparison(PROX, PROX.replace(method="scaffold"))
    assert len(found.curves()) == 8
    pytest.importorskip("pandas")
    assert found.to_pandas().groupby("job")["accuracy"].max().to_dict() == {"fedprox": 0.7, "scaffold": 0.9}


def test_a_comparison_draws_the_mean_of_each_job_with_its_spread():
    """A line and a band for each job, and a name for each line."""
    pytest.importorskip("matplotlib")
    found = comparison(PROX, PROX.replace(method="scaffold"))
    axes = found.plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fedprox", "scaffold"]
    assert len(axes.patches) == 2
    lines = axes.lines[:: len(axes.lines) // 2]  # the others are dots
    for of, line in zip(found.runs, lines, strict=True):
        values = [[100 * (each.value or 0.0) for each in run.marks] for run in of]
        assert list(line.get_ydata()) == pytest.approx([sum(each) / len(of) for each in zip(*values, strict=True)])
    with pytest.raises(fq.JobError, match="there is no plot over 'hours'; there are: rounds, bytes, joules"):
        found.plot("hours")


def test_runs_are_the_commands_and_are_made_once(job, tmp_path, monkeypatch, capsys):
    job = job.replace(method="fedavg", rounds=1)
    found = fq.compare([job, job.replace(method="scaffold")], seeds=range(2), out=tmp_path / "out", workers=1)
    assert [len(of) for of in found.runs] == [2, 2]
    assert None not in found.table()["accuracy"]
    assert capsys.readouterr().err == ""
    file = str(job.write(tmp_path / "job.toml"))
    assert main(["prepare", file]) == 0
    monkeypatch.setattr(experiments_comparison, "run_seed", None)  # nothing is run again
    argv = ["--methods", "fedavg", "scaffold", "--seeds", "0", "1", "--out", str(tmp_path / "out")]
    assert main(["compare", file, *argv]) == 0
    assert "4 of 4 runs are in" in capsys.readouterr().err


def test_networks_that_differ_by_device_are_compared_on_held_out_shares(job, tmp_path):
    """A test set measures what devices share; FedAvg alone is tested."""
    jobs = [job.replace(method=method, rounds=1) for method in ("fedavg", "local")]
    found = fq.compare(jobs, seeds=[0], out=tmp_path, workers=1)
    assert "on held-out shares, because the networks of local differ by device" in repr(found)
    both = found.table()
    assert both["accuracy"] == both["held_accuracy"]
    alone = fq.compare(jobs[:1], seeds=[0], out=tmp_path, workers=1).table()
    assert alone["held_accuracy"] == both["held_accuracy"][:1]
    assert alone["accuracy"] != alone["held_accuracy"]


@pytest.mark.parametrize(("jobs", "seeds"), [([], range(3)), ([PROX], [])])
def test_nothing_to_compare_is_an_error(jobs, seeds):
    with pytest.raises(fq.JobError, match=r"as in fq\.compare\(\[job, other\]"):
        fq.compare(jobs, seeds=seeds)


def test_a_job_that_is_repeated_and_a_target_that_is_no_number_are_refused():
    with pytest.raises(fq.JobError, match=r"the same job \(fedprox\) is in the list twice"):
        fq.compare([PROX, PROX.replace(rounds=9), PROX.replace()], seeds=[0])
    for target in ("x", float("nan")):
        with pytest.raises(fq.JobError, match=r"is not a finite number: give one, as in table\(target=0\.9\)"):
            comparison(PROX).table(target=target)
