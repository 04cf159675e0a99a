"""Losses, optimizers, schedules and augmentations of [params], against plain torch over three rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from fedquilt.arrays import tensors  # noqa: E402
from fedquilt.core import DivergedError, Examples, Fit, JobError  # noqa: E402
from fedquilt.edge_agent.engines import training  # noqa: E402
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine  # noqa: E402
from fedquilt.edge_agent.engines.torch.engine import TorchEngine  # noqa: E402
from fedquilt.formats import training_choices  # noqa: E402
from fedquilt.methods import fedavg  # noqa: E402
from fedquilt.models import local_training  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402

INPUT = {"channels": 1, "size": 8, "mean": [0.5], "std": [0.25]}
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 3},
    "batch norm": {"name": "residual", "channels": 1, "classes": 3, "width": 4, "input": INPUT},
    "recurrent": {"name": "gru", "channels": 3, "steps": 5, "classes": 3, "width": 4},
}
SHAPES = {"mlp": (6,), "batch norm": (8, 8), "recurrent": (5, 3)}
ROUNDS, COUNT, BATCH, RATE, W = 3, 22, 6, 0.05, (1.0, 2.0, 0.5)


def examples(network: str, task: str = "classes", count: int = COUNT) -> Examples:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, *SHAPES[network])).astype(np.float32)
    if network == "batch norm":
        x = rng.integers(0, 256, x.shape).astype(np.uint8)
    if task == "regression":
        return Examples(x, rng.normal(size=(count, 3)).astype(np.float32))
    if task == "labels":
        return Examples(x, rng.integers(0, 2, (count, 3)).astype(np.uint8))
    return Examples(x, rng.integers(0, 3, count))


def fit_of_round(round: int, **params: Any) -> Fit:
    task: Any = SimpleNamespace(params={"epochs": 2, "batch": BATCH, "lr": RATE, **params}, round=round)
    return local_training.fit_from_task(task)


def first_tensors(network: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in registry.load_network(network, seed=3).state_dict().items()}


def play_rounds(network: dict[str, Any], data: Examples, **params: Any) -> dict[str, np.ndarray]:
    engine, model = TorchEngine(1 << 40, base_bytes=0), first_tensors(network)
    for round in range(ROUNDS):
        fit = fit_of_round(round, **params)
        model = dict(engine.train(network, model, data, fit, tensors.seeded_rng(round))[0])
    return model


Loss = Callable[[Any, Any], Any]  # (scores, y) -> mean


def plain_rounds(
    network: dict[str, Any],
    data: Examples,
    loss: Loss = F.cross_entropy,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    rates: Iterator[float] | None = None,
    parts: int = 1,
    ema: float = 0.0,
    view: Callable[[np.ndarray, np.ndarray, int, int], list[tuple[float, Any, Any]]] | None = None,
) -> dict[str, np.ndarray]:
    """The same rounds by torch alone. `view` returns shares, inputs and targets of a mini-batch's losses."""
    module = registry.load_network(network, seed=3).to(memory_format=torch.channels_last)  # as the engine has it
    task = network.get("task", "classes")
    y = torch.from_numpy(data.y.astype(np.int64 if task == "classes" else np.float32))
    for round in range(ROUNDS):
        module.train()
        moves = optimizer(module.parameters(), lr=RATE)
        average = torch.optim.swa_utils.AveragedModel(module, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(ema))
        average.update_parameters(module)
        rng = tensors.seeded_rng(round)
        orders = training.draw_orders(len(data), 2, rng)
        seed, number = int(rng.integers(2**53)), 0
        for order in orders:
            for batch in np.split(order, range(BATCH, len(order), BATCH)):
                if rates is not None:
                    moves.param_groups[0]["lr"] = next(rates)
                moves.zero_grad()
                for rows in np.array_split(batch, min(parts, len(batch))):
                    if view is None:
                        x = torch.from_numpy(training.network_inputs(data.x[rows], network))
                        seen = [(1.0, x, y[rows])]
                    else:
                        seen = view(rows, data.y, seed, number)
                    scores = module(seen[0][1])
                    whole = sum(share * loss(scores, target) for share, _, target in seen)
                    (whole * len(rows) / len(batch)).backward()
                moves.step()
                average.update_parameters(module)
                number += 1
        if ema:
            for value, mean in zip(module.parameters(), average.module.parameters(), strict=True):
                value.data.copy_(mean.data)
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def assert_equal_models(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def focal(scores: Any, y: Any) -> Any:
    shares = torch.softmax(scores, dim=1)[torch.arange(len(y)), y]
    return (torch.tensor(W)[y] * (1 - shares) ** 1.5 * -torch.log(shares)).mean()


def pinball(scores: Any, y: Any) -> Any:
    levels, error = torch.tensor([0.1, 0.5, 0.9]), y - scores
    return torch.where(error > 0, levels * error, (levels - 1) * error).mean()


LOSSES: tuple[tuple[str, Any, Loss], ...] = (
    ("classes", "cross_entropy", F.cross_entropy),
    (
        "classes",
        {"name": "cross_entropy", "smoothing": 0.1, "weights": list(W)},
        lambda scores, y: F.cross_entropy(scores, y, weight=torch.tensor(W), label_smoothing=0.1),
    ),
    ("classes", {"name": "focal", "gamma": 1.5, "weights": list(W)}, focal),
    ("labels", "bce", F.binary_cross_entropy_with_logits),
    (
        "labels",
        {"name": "bce", "weights": list(W)},
        lambda scores, y: F.binary_cross_entropy_with_logits(scores, y, pos_weight=torch.tensor(W)),
    ),
    ("regression", "mse", F.mse_loss),
    ("regression", {"name": "huber", "delta": 0.3}, lambda scores, y: F.huber_loss(scores, y, delta=0.3)),
    ("regression", {"name": "quantile", "quantiles": [0.1, 0.5, 0.9]}, pinball),
    ("regression", "training_choices_own:absolute", F.l1_loss),
)


@pytest.fixture(autouse=True)
def own_code(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's, in the folder in which commands are started."""
    (tmp_path / "training_choices_own.py").write_text(
        "import itertools\n"
        "import torch\n"
        "def absolute(scores, y): return (scores - y).abs().mean(dim=1)\n"
        "def scaled(scores, y, scale): return scale * (scores - y).abs().mean(dim=1)\n"
        "def mean(scores, y): return (scores - y).abs().mean()\n"
        "def nothing(scores, y): return absolute(scores, y) * float('nan')\n"
        "def still(scores, y): return absolute(scores.detach(), y)\n"
        "def brighter(x, by): return (x.int() + by).clamp(max=255).to(x.dtype)\n"
        "def pair(x): return x, 1\n"
        "def cut(x): return x[..., 1:]\n"
        "def floats(x): return x / 255\n"
        "def unseeded(x): return (x + next(calls)).to(x.dtype)\n"
        "calls = itertools.count()\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("task", "choice", "loss"), LOSSES, ids=[str(choice) for _, choice, _ in LOSSES])
def test_losses_equal_those_of_plain_torch(task: str, choice: Any, loss: Loss) -> None:
    table, data = {**NETWORKS["batch norm"], "task": task}, examples("batch norm", task)
    assert_equal_models(play_rounds(table, data, loss=choice), plain_rounds(table, data, loss))


OPTIMIZERS: tuple[tuple[dict[str, Any], Callable[..., Any]], ...] = (
    ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, lambda values, lr: torch.optim.SGD(
        values, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01
    )),
    ({"optimizer": {"name": "adam", "betas": [0.8, 0.95], "eps": 1e-6}}, lambda values, lr: torch.optim.Adam(
        values, lr=lr, betas=(0.8, 0.95), eps=1e-6
    )),
    ({"optimizer": "adamw", "weight_decay": 0.1}, lambda values, lr: torch.optim.AdamW(
        values, lr=lr, weight_decay=0.1
    )),
    ({"optimizer": {"name": "RMSprop", "alpha": 0.9}, "momentum": 0.5}, lambda values, lr: torch.optim.RMSprop(
        values, lr=lr, alpha=0.9, momentum=0.5
    )),
    ({"optimizer": "Adagrad"}, torch.optim.Adagrad),
    ({"optimizer": {"name": "Adafactor"}}, lambda values, lr: torch.optim.Adafactor(values, lr=lr, weight_decay=0.0)),
)  # fmt: skip


@pytest.mark.parametrize(("params", "optimizer"), OPTIMIZERS, ids=[str(params) for params, _ in OPTIMIZERS])
def test_optimizers_equal_those_of_plain_torch(params: dict[str, Any], optimizer: Any) -> None:
    if not hasattr(torch.optim, "Adafactor") and "Adafactor" in str(params):
        pytest.skip("this torch has no Adafactor")
    data, table = examples("recurrent"), NETWORKS["recurrent"]
    assert_equal_models(play_rounds(table, data, **params), plain_rounds(table, data, optimizer=optimizer))


STEPS = 2 * -(-COUNT // BATCH)  # of a round


def scheduled(make: Callable[[Any], Any], each: int) -> Iterator[float]:
    """Rates of torch's scheduler, each for so many steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    scheduler = make(optimizer)
    while True:
        yield from [float(optimizer.param_groups[0]["lr"])] * each
        optimizer.step()
        scheduler.step()


def warm_up(rounds: int, then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(optimizer: Any) -> Any:
        rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / (rounds + 1), total_iters=rounds)
        return lr_scheduler.SequentialLR(optimizer, [rise, then(optimizer)], milestones=[rounds])

    return make


SCHEDULES: tuple[tuple[Any, Callable[[Any], Any], bool], ...] = (
    ({"name": "step", "factor": 0.5, "every": 2}, lambda moves: lr_scheduler.StepLR(moves, 2, 0.5), False),
    ({"name": "step", "over": "steps"}, lambda moves: lr_scheduler.StepLR(moves, STEPS, 0.1), True),
    ({"name": "cosine", "least": 0.1}, lambda moves: lr_scheduler.CosineAnnealingLR(moves, 3, 0.1 * RATE), False),
    ({"name": "cosine", "over": "steps"}, lambda moves: lr_scheduler.CosineAnnealingLR(moves, 3 * STEPS), True),
    (
        {"name": "cosine", "over": "steps", "warm_up": 1},
        warm_up(STEPS, lambda moves: lr_scheduler.CosineAnnealingLR(moves, 2 * STEPS)),
        True,
    ),
    ({"name": "constant", "warm_up": 2}, warm_up(2, lambda moves: lr_scheduler.ConstantLR(moves, 1.0)), False),
    (
        {"name": "one_cycle", "over": "steps"},
        lambda moves: lr_scheduler.OneCycleLR(moves, RATE, 3 * STEPS, cycle_momentum=False),
        True,
    ),
)


@pytest.mark.parametrize(("choice", "make", "by_step"), SCHEDULES, ids=[str(choice) for choice, _, _ in SCHEDULES])
def test_schedules_equal_those_of_plain_torch(choice: Any, make: Any, by_step: bool) -> None:
    data, table, params = examples("mlp"), NETWORKS["mlp"], {"schedule": {**choice, "rounds": ROUNDS}}
    rates = scheduled(make, 1 if by_step else STEPS)
    assert_equal_models(play_rounds(table, data, **params), plain_rounds(table, data, rates=rates))


@pytest.mark.parametrize("network", NETWORKS)
def test_accumulated_gradients_and_averaged_weights_equal_those_of_plain_torch(network: str) -> None:
    data, table = examples(network), NETWORKS[network]
    assert_equal_models(play_rounds(table, data, accumulate=2, ema=0.7), plain_rounds(table, data, parts=2, ema=0.7))


def test_transforms_and_mixup_are_drawn_for_each_example_whatever_the_micro_batches() -> None:
    table, data = NETWORKS["batch norm"], examples("batch norm")
    brighter = {"name": "training_choices_own:brighter", "by": 9}
    choices = [{"name": "RandomHorizontalFlip", "p": 0.5}, brighter, {"name": "mixup", "alpha": 0.4}]

    def view(rows: np.ndarray, y: np.ndarray, seed: int, number: int) -> list[tuple[float, Any, Any]]:
        x = []
        for place, row in enumerate(rows):
            torch.manual_seed(int(np.random.SeedSequence((seed, number, place)).generate_state(1, np.uint64)[0]))
            flipped = data.x[row][:, ::-1] if torch.rand(1) < 0.5 else data.x[row]
            x.append(np.clip(flipped.astype(int) + 9, 0, 255).astype(np.uint8))
        inputs = torch.from_numpy(training.network_inputs(np.stack(x), table))
        rng = np.random.default_rng((seed, number))
        share, others = rng.beta(0.4, 0.4), rng.permutation(len(rows))
        mixed = share * inputs + (1 - share) * inputs[others]
        targets = torch.from_numpy(y[rows])
        return [(share, mixed, targets), (1 - share, mixed, targets[others])]

    assert_equal_models(play_rounds(table, data, augment=choices), plain_rounds(table, data, view=view))
    mlp, points = NETWORKS["mlp"], examples("mlp")
    whole = play_rounds(mlp, points, augment=["mixup"])
    assert_equal_models(play_rounds(mlp, points, augment=["mixup"], accumulate=3), whole)


def test_a_task_repeated_with_its_seed_gives_the_same_bits() -> None:
    table, data = NETWORKS["batch norm"], examples("batch norm")
    params: dict[str, Any] = {
        "augment": ["RandomRotation", "mixup"],
        "loss": "focal",
        "optimizer": "RMSprop",
        "schedule": {"name": "one_cycle", "over": "steps", "rounds": ROUNDS},
        "accumulate": 2,
        "ema": 0.9,
    }
    params["augment"][0] = {"name": "RandomRotation", "degrees": 30}
    one, two = (play_rounds(table, data, **params) for _ in range(2))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_the_plan_knows_what_an_optimizer_keeps() -> None:
    network, data = {"name": "mlp", "inputs": 6, "hidden": [3000, 300], "classes": 3}, examples("mlp")
    size = sum(value.nbytes for value in first_tensors(network).values())

    def planned_bytes(**params: Any) -> int:
        engine = TorchEngine(1 << 40, base_bytes=0)
        engine.train(network, first_tensors(network), data, fit_of_round(0, lr=1e-4, **params), tensors.seeded_rng(0))
        assert engine.planned_bytes is not None
        return engine.planned_bytes

    plain = planned_bytes()
    assert planned_bytes(optimizer="adamw") - plain == 2 * size
    assert planned_bytes(ema=0.9) - plain == size
    assert planned_bytes(optimizer="RMSprop") - plain == 3 * size + 80_000_000
    assert planned_bytes(augment=["RandomHorizontalFlip"]) - plain == 92_000_000
    assert planned_bytes(augment=["RandomHorizontalFlip"], optimizer="RMSprop") - plain == 3 * size + 92_000_000
    for name in ("RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"):
        value = torch.zeros(1000, requires_grad=True)
        made = getattr(torch.optim, name)([value], **({"momentum": 0.9, "centered": True} if name == "RMSprop" else {}))
        value.sum().backward()
        made.step()
        kept = sum(each.nbytes for each in made.state[value].values() if torch.is_tensor(each))
        assert kept <= 3 * value.nbytes + 100, name


OWN = "training_choices_own"
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("classes", {"loss": {"name": "cross_entropy", "weights": [1.0, 2.0]}}, r"weights has 2 numbers.* 3 outputs"),
    ("regression", {"loss": {"name": "quantile", "quantiles": [0.1, 0.9]}}, r"quantiles has 2 numbers.* 3 outputs"),
    ("classes", {"loss": "mse"}, r"loss = 'mse' is for task = 'regression', and the task of the network is 'classes'"),
    ("regression", {"loss": f"{OWN}:mean"}, r"returned \(\) for 6 examples: return one loss for each.* \(6,\)"),
    ("regression", {"loss": f"{OWN}:still"}, r"has no gradient: compute the losses from the scores with torch"),
    ("regression", {"loss": f"{OWN}:number"}, r"is a int instead of a function"),
    ("regression", {"loss": f"{OWN}:absent"}, r"has no 'absent'"),
    (
        "regression",
        {"loss": {"name": f"{OWN}:scaled", "scal": 2.0}},
        r"'scale' .its arguments: scores, y, scale",
    ),
    ("classes", {"optimizer": "RMSProp"}, r"optimizer = 'RMSProp' is not in torch.optim"),
    ("classes", {"optimizer": "LBFGS"}, r"optimizer = 'LBFGS' does not fit the training loop"),
    ("classes", {"optimizer": {"name": "RMSprop", "alfa": 1}}, r"unknown key 'alfa'; did you mean 'alpha'\?"),
    (
        "classes",
        {"optimizer": {"name": "RMSprop", "alpha": -1}},
        r"optimizer 'RMSprop': \{'alpha': -1\}: Invalid alpha",
    ),
    ("classes", {"optimizer": "Adagrad", "momentum": 0.9}, r"momentum = 0.9 does not fit optimizer 'Adagrad'"),
    ("classes", {"augment": ["RandomFlip"]}, r"augment 'RandomFlip' is not in torchvision.transforms.v2"),
    (
        "classes",
        {"augment": [{"name": "RandomCrop", "sise": 8}]},
        r"augment 'RandomCrop': missing .*'size' .its arguments: size, padding",
    ),
    ("classes", {"augment": [{"name": "RandomCrop", "size": 9}]}, r"fails with an example of shape \(1, 8, 8\)"),
    ("classes", {"augment": [{"name": "Resize", "size": 4}]}, r"returned \(1, 4, 4\) of torch.uint8 for an example"),
    ("classes", {"augment": [f"{OWN}:pair"]}, r"returned tuple for an example .*keeps shape and type"),
    ("classes", {"augment": [f"{OWN}:cut"]}, r"returned \(1, 8, 7\) of torch.uint8 for an example \(1, 8, 8\)"),
    ("classes", {"augment": [f"{OWN}:floats"]}, r"returned \(1, 8, 8\) of torch.float32"),
    (
        "classes",
        {"augment": [f"{OWN}:unseeded"]},
        r"gives two results for one seed: draw numbers from torch's generator",
    ),
)


@pytest.mark.parametrize(("task", "params", "message"), REFUSED, ids=[str(params) for _, params, _ in REFUSED])
def test_choices_that_do_not_fit_are_refused_with_value_and_fix(task: str, params: Any, message: str) -> None:
    table = {**NETWORKS["batch norm"], "task": task}
    with pytest.raises(JobError, match=message) as refused:
        play_rounds(table, examples("batch norm", task), **params)
    assert len(str(refused.value)) < 360


def test_a_loss_that_is_no_number_has_diverged() -> None:
    with pytest.raises(DivergedError, match="the loss became NaN at step 1 of 8"):
        play_rounds({**NETWORKS["mlp"], "task": "regression"}, examples("mlp", "regression"), loss=f"{OWN}:nothing")


def test_the_numpy_engine_refuses_what_only_torch_can_train() -> None:
    network, schedule = NETWORKS["mlp"], {"name": "step", "factor": 0.5}
    engine, own = NumpyEngine(1 << 40, base_bytes=0), {"name": "adam", "betas": [0.5, 0.9]}
    for params in ({"loss": "focal"}, {"optimizer": own}, {"ema": 0.5}, {"accumulate": 2}, {"augment": ["mixup"]}):
        with pytest.raises(JobError, match=f"the numpy engine cannot train with {next(iter(params))} = "):
            engine.train(
                network, first_tensors(network), examples("mlp"), fit_of_round(0, **params), tensors.seeded_rng(0)
            )
    fit = fit_of_round(2, schedule=schedule)
    assert fit.lr == pytest.approx(0.25 * RATE)
    engine.train(network, first_tensors(network), examples("mlp"), fit, tensors.seeded_rng(0))


def test_one_cycle_over_steps_has_a_factor_on_devices_with_one_batch_a_round():
    whole = training_choices.schedule_with_rounds({"name": "one_cycle", "over": "steps"}, 3)
    schedule = training_choices.parse_schedule(whole)
    factors = [schedule.step_factor(round, 0, 1) for round in range(3)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(4e-6)


def test_parameters_of_a_method_that_only_share_a_name_are_no_choices():
    @dataclasses.dataclass
    class Own:
        loss: float = 0.5
        schedule: int = 3

    assert training_choices.select_choices(Own, {"loss": 0.5, "schedule": 3}) == {}
    assert training_choices.select_choices(fedavg.Params, {"loss": "focal"}) == {"loss": "focal"}
