"""Choices of [params] with every method: each is used in a dry run, or refused by name in the job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.core import JobError, ModelError
from fedquilt.formats import training_choices
from fedquilt.tools.artefacts import prepare

pytest.importorskip("torch")

OPTIONS: dict[str, dict[str, Any]] = {
    "loss": {"loss": {"name": "cross_entropy", "smoothing": 0.1, "weights": [1, 2, 0.5]}},
    "adamw": {"optimizer": "adamw"},
    "torch": {"optimizer": {"name": "RMSprop", "alpha": 0.9}},
    "rounds": {"schedule": {"name": "cosine", "warm_up": 1}},
    "steps": {"schedule": {"name": "one_cycle", "over": "steps"}},
    "augment": {"augment": ["mixup"]},
    "accumulate": {"accumulate": 2},
    "ema": {"ema": 0.9},
}
NONE = "has no such parameter"
PLAIN = {
    "adamw": "sgd",
    "torch": "sgd",
    "steps": 'schedule over "steps" is not possible',
    "ema": "ema = 0.9 is not possible",
}
REFUSED: dict[str, dict[str, str]] = {
    **{name: dict.fromkeys(OPTIONS, NONE) for name in ("afl", "fedstitch")},  # which train no network
    **dict.fromkeys(("apfl", "fednova", "fedpews", "perfedavg", "pfedme", "scaffold"), PLAIN),
    **{key: {"augment": "a prototype is that of one class"} for key in ("fedproto", "fedtgp")},
    "fedsdg": {"adamw": NONE, "torch": NONE},  # whose optimizer is Adam
    "fedsq": {"augment": 'augment is not possible while FedSQ caches features of the examples: set cache = "off"'},
}
MORE: dict[str, dict[str, Any]] = {"fedlps": {"encoder": 0.0}}
QUICK = ("fedavg", "scaffold", "depthfl", "fedsdg", "fedpews_fixed", "heterofl", "fedrep")  # in `make test`
REZERO = {"name": "rezero", "inputs": 6, "classes": 3, "width": 8, "blocks": 3}


def job_of(name: str, model: dict[str, Any] = REZERO, **params: Any) -> settings.JobSettings:
    given = {**MORE.get(name, {}), **params}
    return settings.parse_job(
        {"name": "j", "method": name, "params": given, "model": model, "cohort": {"min_devices": 32}}
    )


@pytest.mark.parametrize("name", methods.builtin_names())
def test_every_choice_is_read_or_refused_in_the_job_of_every_method(name: str) -> None:
    for option, params in OPTIONS.items():
        if (reason := REFUSED.get(name, {}).get(option)) is None:
            job_of(name, **params)
        else:
            with pytest.raises(JobError) as refused:
                job_of(name, **params)
            assert reason in str(refused.value), (name, option)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if name in QUICK and len(options) > 1 else pytest.mark.nightly)
        for name in methods.builtin_names()
        if NONE not in REFUSED.get(name, {}).get("ema", "")
        for open in [[option for option in OPTIONS if option not in REFUSED.get(name, {})]]
        for options in [open, *([option] for option in open)]
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_every_choice_is_used_in_a_dry_run(name: str, options: list[str], tmp_path: Path) -> None:
    """All that a method takes together, the later of two optimizers or schedules, and each alone."""
    params = {key: value for option in options for key, value in OPTIONS[option].items()}
    prepare.prepare_and_check(job_of(name, **params), tmp_path / "bundle")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"loss": "crossentropy"}, "loss 'crossentropy' is unknown; did you mean 'cross_entropy'"),
        ({"loss": {"gamma": 1.0}}, "has no name: write"),
        ({"loss": {"name": "focal", "gama": 1.0}}, "there is no key 'gama'; did you mean 'gamma'?"),
        ({"loss": {"name": "cross_entropy", "smoothing": 1.5}}, "smoothing = 1.5: must be a number below 1"),
        ({"loss": {"name": "cross_entropy", "weights": [1, 0, 1]}}, "weights[1] = 0: must be a number above 0"),
        ({"optimizer": "rmsprop"}, "optimizer = 'rmsprop'; there are: sgd, adam, adamw, or a class of torch.optim"),
        ({"optimizer": "AdamW"}, "optimizer = 'AdamW': write 'adamw'"),
        ({"optimizer": {"name": "adam", "lr": 0.1}}, "has lr = 0.1: set [params] lr"),
        ({"optimizer": {"name": "adam", "beta": 0.1}}, "there is no key 'beta'; did you mean 'betas'?"),
        ({"schedule": "cosin"}, "schedule = 'cosin'; did you mean 'cosine'?"),
        ({"schedule": {"name": "step", "every": 0}}, "every = 0: must be a whole number of at least 1"),
        ({"schedule": {"name": "cosine", "warm_up": 10}}, "warm_up = 10 is not below rounds = 10"),
        ({"schedule": {"name": "one_cycle", "rise": 0.1}}, "one_cycle has 10 steps, of which less than 2 rise"),
        ({"augment": ["mixup", "RandomHorizontalFlip"]}, "mixup is not the last transform"),
        ({"augment": [{"name": "mixup", "alpha": 0}]}, "alpha = 0: must be a number above 0"),
        ({"augment": ["flip"]}, "transform 'flip' is unknown"),
        ({"accumulate": 0}, "accumulate = 0: must be a whole number of at least 1"),
        ({"ema": 1.0}, "ema = 1.0: must be a number below 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_choice_that_is_none_is_refused_in_the_job(params: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as refused:
        job_of("fedavg", **params)
    assert message in str(refused.value)
    assert "[params]" in str(refused.value)


def test_a_choice_that_does_not_fit_the_network_is_refused_as_the_job_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_losses.py").write_text(
        "def mean(scores, y): return scores.mean()\ndef nothing(scores, y): return scores.sum(dim=1) * "
        "float('nan')\ndef broken(scores, y): return scores.absent\n"
    )
    monkeypatch.chdir(tmp_path)
    for params, message in (
        ({"loss": {"name": "focal", "weights": [1.0]}}, "weights has 1 numbers for 3 outputs of the network"),
        ({"loss": "odd_losses:mean"}, "returned () for 2 examples: return one loss for each"),
        ({"loss": "odd_losses:nothing"}, "the loss became NaN at step 1 of 2"),
        ({"loss": "absent_losses:mean"}, "module 'absent_losses' was not found; start the command in the folder of"),
        ({"loss": "odd_losses:broken"}, "(odd_losses.py, line 3)"),
        ({"optimizer": "Rmsprop"}, "optimizer = 'Rmsprop' is not in torch.optim"),
    ):
        with pytest.raises(ModelError) as refused:
            prepare.prepare_and_check(job_of("fedavg", **params), tmp_path / "bundle")
        assert message in str(refused.value)


def test_only_torch_does_the_tasks_of_such_a_job() -> None:
    method = methods.load("fedavg")
    assert settings.list_engines(job_of("fedavg"), method) == ("torch", "numpy")
    assert settings.list_engines(job_of("fedavg", schedule="cosine", optimizer="adam"), method) == ("torch", "numpy")
    for option in ("loss", "adamw", "torch", "steps", "augment", "accumulate", "ema"):
        assert settings.list_engines(job_of("fedavg", **OPTIONS[option]), method) == ("torch",), option
    with pytest.raises(JobError, match=r'engine = "numpy" does not support ema = 0\.9: remove the line'):
        settings.parse_job({"name": "j", "method": "fedavg", "engine": "numpy", "params": {"ema": 0.9}})


def test_the_documentation_names_every_choice_with_its_arguments_and_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text().partition("## Loss, optimizer")[2]
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    losses = {name: kind for name, (kind, _) in training_choices.LOSSES.items()}
    tables: dict[str, Mapping[str, type]] = {
        "loss": losses,
        "optimizer": training_choices.OPTIMIZERS,
        "schedule": training_choices.SCHEDULES,
        "augment": {"mixup": training_choices.Mixup},
    }
    assert rows.keys() == {*tables, "accumulate", "ema"}
    for key, table in tables.items():
        for name, kind in table.items():
            assert f"`{name}`" in rows[key]
            for field in msgspec.structs.fields(kind):
                if field.name == "rounds":  # the job's
                    continue
                default = json.dumps(field.default).replace("1e-08", "1e-8").replace("4e-06", "4e-6")
                told = f"`{field.name}`" if default == "[]" else f"`{field.name}` = {default.removesuffix('.0')}"
                assert told in rows[key], (name, told)


def test_transforms_are_tried_on_examples_of_the_jobs_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `mlp` without [input] takes any numbers, and these are stored as bytes."""
    (tmp_path / "odd_transforms.py").write_text("import torch\ndef noisy(x): return x + torch.rand_like(x)\n")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.integers(0, 256, (9, 2, 3)).astype(np.uint8), y=np.arange(9) % 3)
    table = {"name": "j", "method": "fedavg", "model": {"name": "mlp", "inputs": 6, "classes": 3}}
    data = {"data": {"path": str(tmp_path / "data.npz")}}
    params = {"params": {"augment": ["odd_transforms:noisy"]}}
    prepare.prepare_and_check(settings.parse_job({**table, **params}), tmp_path / "bundle")
    with pytest.raises(ModelError, match=r"'odd_transforms:noisy' fails with an example of shape \(1, 2, 3\) and type"):
        prepare.prepare_and_check(settings.parse_job({**table, **data, **params}), tmp_path / "bundle")
