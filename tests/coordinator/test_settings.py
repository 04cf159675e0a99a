"""A broken job file says what is wrong, where, and what would be right."""

from pathlib import Path

import pytest

from fedquilt import methods
from fedquilt.coordinator import settings
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
    """With every default in the object itself: a method may look at it as at any other."""
    job = settings.parse_job({"name": "a", "method": name})
    assert vars(settings.parse_params(job)) == vars(methods.load(name).params())


def test_paths_are_taken_from_the_job_files_folder(tmp_path):
    """So that a job can be moved together with its data."""
    (tmp_path / "x.npz").touch()
    job = settings.load_job(write(tmp_path, 'name = "j"\nmethod = "fedavg"\n[data]\npath = "x.npz"\n'))
    assert job.data["path"] == str(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "not TOML"),
        ('name = "j"\nmethod = "fedavgg"\n', "did you mean 'fedavg'? There are: afl, depthfl, ditto, fedavg"),
        ('name = "j"\nmethod = "fedavg"\nround = 3\n', "there is no key 'round'"),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nselect = ["Lab"]\n', "[cohort] select: 'Lab' selects no boards"),
        ('name = "j"\nmethod = "fedavg"\n[fleet]\nlabels = ["a", "b="]\n', "[fleet] labels: 'b=' is no label"),
        ('name = "j"\nmethod = "fedavg"\nrounds = "3"\n', "rounds = "),
        ('name = "J/../x"\nmethod = "fedavg"\n', "name = "),
        ('name = "j"\nmethod = "fedavg"\n[params]\nlearning_rate = 1\n', "it has epochs"),
        ('name = "j"\nmethod = "fedavg"\n[params]\nlr = "fast"\n', "[params] of fedavg"),
        ('name = "j"\nmethod = "fedavg"\nengine = "onnx"\n', "runs on torch or numpy"),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nquorum = 2.0\n', "[cohort] quorum = "),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nmin_battery = 20\n', "[cohort] min_battery = "),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nprefer = "mine"\n', "[cohort] prefer = "),
        ('name = "j"\nmethod = "fedavg"\n[wire]\ncodec = "zip"\n', "'zip': there are raw, fp16, int8, topk"),
        ('name = "j"\nmethod = "fedavg"\n[wire]\ncodec = "topk"\nkeep = 0.0\n', "[wire] keep = "),
        ('name = "j"\nmethod = "fedstitch"\n[wire]\ncodec = "fp16"\n', "may not be rounded; leave it 'raw'"),
        ('name = "j"\nmethod = "genefl"\n[wire]\ncodec = "int8"\n', "what genefl's devices send may not"),
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
        ("fedavg", {"batch": 0}, "batch = 0: a whole number of at least 1 is wanted"),
        ("fedprox", {"batch": 10**13}, "batch = 10000000000000: a whole number of at most 1000000000 is wanted"),
        ("fedavg", {"lr": -1.0}, "lr = "),
        ("fedavg", {"lr": float("nan")}, "lr: not a finite number"),
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
    with pytest.raises(JobError, match="these are a board's settings, and a job is wanted"):
        settings.load_job(write(tmp_path, 'device = "a"\nhome = "h"\n'))


def test_a_mistyped_method_or_parameter_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(JobError, match=r"; did you mean 'fedavg'\? There are: afl, "):
        settings.load_job(write(tmp_path, 'name = "j"\nmethod = "fedvag"\n'))
    with pytest.raises(JobError, match=r"did you mean 'scaffold'\?"):
        settings.load_job(write(tmp_path, 'name = "j"\nmethod = "SCAFFOLD"\n'))
    with pytest.raises(JobError, match=r"no such parameter; did you mean 'epochs'\? It has epochs, batch, "):
        settings.load_job(write(tmp_path, 'name = "j"\nmethod = "fedavg"\n[params]\nepoch = 1\n'))


def test_scaffold_refuses_the_codec_that_its_variates_cannot_do_with():
    """At submission, with the reason and what to take instead; codecs that round every entry a little are taken."""
    with pytest.raises(JobError, match=r"codec = 'topk': SCAFFOLD .* take 'int8', 'fp16' or 'raw'"):
        settings.parse_job({"name": "j", "method": "scaffold", "wire": {"codec": "topk"}})
    for codec in ("raw", "fp16", "int8"):
        assert settings.parse_job({"name": "j", "method": "scaffold", "wire": {"codec": codec}}).wire.codec == codec
