"""Settings of jobs, and limits of a coordinator."""

from pathlib import Path

import pytest
from stored_job import JOB

from fedquilt import methods
from fedquilt.coordinator import run_control, settings
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.settings import CoordinatorLimits, RetentionSettings, SubmitterLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import Encoding, JobError


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_a_job_file_is_read_with_its_defaults(tmp_path):
    job = settings.load_job(write(tmp_path, 'name = "digits"\nmethod = "fedavg"\n[params]\nlr = 0.1\n'))
    assert (job.rounds, job.cohort.quorum) == (10, 1.0)
    assert settings.parse_params(job).lr == 0.1


@pytest.mark.parametrize("name", methods.builtin_names())
def test_a_methods_parameters_are_what_its_own_class_makes(name):
    job = settings.parse_job({"name": "a", "method": name})
    assert vars(settings.parse_params(job)) == vars(methods.load(name).params())


def test_paths_are_taken_from_the_job_files_folder(tmp_path):
    (tmp_path / "x.npz").touch()
    job = settings.load_job(write(tmp_path, 'name = "j"\nmethod = "fedavg"\n[data]\npath = "x.npz"\n'))
    assert job.data["path"] == str(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "not TOML"),
        ('name = "j"\nmethod = "fedavgg"\n', "did you mean 'fedavg'? There are: afl, apfl, depthfl, ditto"),
        ('name = "j"\nmethod = "fedavg"\nround = 3\n', "there is no key 'round'"),
        (
            'name = "j"\nmethod = "fedavg"\n[cohort]\nselect = ["Lab"]\n',
            "[cohort] select: 'Lab' is not a label or !label",
        ),
        ('name = "j"\nmethod = "fedavg"\n[fleet]\nlabels = ["a", "b="]\n', "[fleet] labels: 'b=' is not a label"),
        ('name = "j"\nmethod = "fedavg"\nrounds = "3"\n', "rounds = "),
        ('name = "J/../x"\nmethod = "fedavg"\n', "name = "),
        ('name = "j"\nmethod = "fedavg"\n[params]\nlearning_rate = 1\n', "it has epochs"),
        ('name = "j"\nmethod = "fedavg"\n[params]\nlr = "fast"\n', "[params] of fedavg"),
        ('name = "j"\nmethod = "fedavg"\nengine = "onnx"\n', "choose torch or numpy"),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nquorum = 2.0\n', "[cohort] quorum = "),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nmin_battery = 20\n', "[cohort] min_battery = "),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nprefer = "mine"\n', "[cohort] prefer = "),
        ('name = "j"\nmethod = "fedavg"\n[wire]\ncodec = "zip"\n', "'zip' is unknown: choose raw, fp16, int8, topk"),
        ('name = "j"\nmethod = "fedavg"\n[wire]\ncodec = "topk"\nkeep = 0.0\n', "[wire] keep = "),
        ('name = "j"\nmethod = "fedstitch"\n[wire]\ncodec = "fp16"\n', "requires exact updates: set 'raw'"),
        ('name = "j"\nmethod = "genefl"\n[wire]\ncodec = "int8"\n', "genefl requires exact updates"),
        ('name = "j"\nmethod = "fedavg"\n[stop]\nmax_joules = 0\n', "[stop] max_joules = "),
        ('name = "j"\nmethod = "fedavg"\n[stop]\nmax_hours = 1\n', "max_hours"),
    ],
)
def test_a_broken_job_file_names_what_is_wrong(tmp_path, text, said):
    path = write(tmp_path, text)
    with pytest.raises(JobError) as caught:
        settings.load_job(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_job_file_is_named(tmp_path):
    with pytest.raises(JobError, match="No such file"):
        settings.load_job(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("method", "params", "said"),
    [
        ("fedavg", {"batch": 0}, "batch = 0: must be a whole number of at least 1"),
        ("fedprox", {"batch": 10**13}, "batch = 10000000000000: must be a whole number of at most 1000000000"),
        ("fedavg", {"lr": -1.0}, "lr = "),
        ("fedavg", {"lr": float("nan")}, "lr: the value is not a finite number"),
        ("fedprox", {"mu": -5.0}, "mu = "),
        ("fedstitch", {"depth": 1}, "depth = "),
    ],
)
def test_a_parameter_out_of_range_is_refused_before_anything_runs(method, params, said):
    with pytest.raises(JobError) as caught:
        settings.parse_job({"name": "j", "method": method, "params": params})
    assert said in str(caught.value)


def test_updates_travel_as_they_are_unless_the_job_says_else():
    assert settings.parse_job({"name": "j", "method": "fedstitch", "wire": {"codec": "raw"}}).wire == Encoding()
    chosen = settings.parse_job({"name": "j", "method": "fedavg", "wire": {"codec": "topk", "keep": 0.01}})
    assert chosen.wire == Encoding(codec="topk", keep=0.01)


def test_a_boards_settings_in_place_of_a_job_are_told(tmp_path):
    with pytest.raises(JobError, match="these are an agent's settings, not a job"):
        settings.load_job(write(tmp_path, 'device = "a"\nhome = "h"\n'))


def test_a_mistyped_method_or_parameter_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(JobError, match=r"; did you mean 'fedavg'\? There are: afl, "):
        settings.load_job(write(tmp_path, 'name = "j"\nmethod = "fedvag"\n'))
    with pytest.raises(JobError, match=r"did you mean 'scaffold'\?"):
        settings.load_job(write(tmp_path, 'name = "j"\nmethod = "SCAFFOLD"\n'))
    with pytest.raises(JobError, match=r"no such parameter; did you mean 'epochs'\? It has epochs, batch, "):
        settings.load_job(write(tmp_path, 'name = "j"\nmethod = "fedavg"\n[params]\nepoch = 1\n'))


def test_scaffold_refuses_the_codec_that_its_variates_cannot_do_with():
    with pytest.raises(JobError, match=r"codec = 'topk': SCAFFOLD .* choose 'int8', 'fp16' or 'raw'"):
        settings.parse_job({"name": "j", "method": "scaffold", "wire": {"codec": "topk"}})
    for codec in ("raw", "fp16", "int8"):
        assert settings.parse_job({"name": "j", "method": "scaffold", "wire": {"codec": codec}}).wire.codec == codec


def test_without_a_file_the_defaults_hold(tmp_path):
    assert settings.load_limits(tmp_path) == CoordinatorLimits()
    assert RetentionSettings().older_than_s is None


def test_what_the_file_says_holds(tmp_path):
    text = 'running = 3\n[submitter]\nrunning = 2\nshare = 0.5\n[retention]\nkeep = 10\nolder_than = "2d"\n'
    (tmp_path / settings.LIMITS_FILE).write_text(text)
    found = settings.load_limits(tmp_path)
    assert found == CoordinatorLimits(3, SubmitterLimits(2, 0.5), RetentionSettings(10, "2d"))
    assert found.retention.older_than_s == 2 * 86400.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("running = 0", "running"),
        ("places = 2", "places"),
        ("[submitter]\nshare = 1.5", "share"),
        ('[retention]\nolder_than = "soon"', "'soon' is not a time"),
        ("running =", "is not TOML"),
        ('[sites.plant]\nboards = ["cam-*"]', "most"),
        ('[sites.plant]\nboards = ["*-cam"]\nmost = 1', "boards"),
        (
            '[sites.plant]\nboards = ["cam-*"]\nmost = 1\n[sites.gate]\nboards = ["cam-1"]\nmost = 1',
            "plant and gate may submit for the same device",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path, text, said):
    (tmp_path / settings.LIMITS_FILE).write_text(text)
    with pytest.raises(JobError, match=said) as raised:
        settings.load_limits(tmp_path)
    assert settings.LIMITS_FILE in str(raised.value)


def test_a_run_that_is_resumed_while_retention_looks_is_kept(tmp_path, monkeypatch):
    with Store(tmp_path) as store, Store(tmp_path) as other:
        ids = [store.add_job(JOB, tmp_path / "bundle") for _ in range(2)]
        for id in ids:
            store.set_status(id, "stopped")

        def old(*args):
            run_control.resume_run(other, ids[0])
            return ids

        monkeypatch.setattr(retention, "select_expired_runs", old)
        assert retention.remove_expired_runs(store, RetentionSettings(keep=0), 0.0) == [ids[1]]
        assert [row.id for row in store.readable_jobs()] == [ids[0]]


@pytest.mark.parametrize("weights", ["x" * 300, ""])
def test_weights_that_are_no_file_stay_a_name(tmp_path, weights):
    assert settings.make_paths_absolute({"weights": weights}, tmp_path) == {"weights": weights}
