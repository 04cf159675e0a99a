"""GENE-FL: devices with similar data share the learnGene, the layers that change least.

Paper: GENE-FL: Gene-Driven Parameter-Efficient Dynamic Federated Learning (arXiv 2504.14628), Eq. 1 to 12,
Algorithms 1 and 2. With theta~ the device's model at the end of its previous round and Theta_k the model of its
cluster, a device computes

    F^   = each tensor of the Fisher diagonal at theta~, scaled to 0..1                      (Eq. 5, 6)
    el_j = theta~_j where F^_j < gamma, else Theta_k,j                                       (Eq. 6)
    L    = CE + lambda1 sum_l a_l |theta^l - Theta_k^l|^2 + lambda2 |theta - el|^2           (Eq. 4, 7, 8)
    S_l  = N_l / sum N * (1 - cos(theta^l, theta~^l)), the L_t lowest layers are sent        (Eq. 9)

The coordinator averages each layer over the devices of the cluster that sent the layer (Eq. 10). A device's first task
is to compute a subspace of its examples, the fingerprint (Eq. 11). The fingerprints of the first rounds are clustered
by K-means, and later devices join the nearest cluster (Eq. 12). A device that appears during a job therefore starts
with its cluster's learnGene, the layers shared at that time, and the job's first weights elsewhere.

Privacy: the first vector of a fingerprint is close to the mean of the device's examples, and a fingerprint of at most
`directions` examples reveals them completely. Layers reveal the examples they were trained on. All layers, as in the
first rounds unless `first_layers` is smaller, reveal as much as FedAvg's model. `fedquilt lab audit` measures both.

Deviations: the paper's sentence on the mask selects the highest scores, its prose the lowest (`gene_order`). A layer is
a weight tensor with its bias and normalisation, and a gain around layers belongs to the first of them. Running
statistics stay on the device. The last layer is not shared without `share_head`, because a head of known classes is a
worse start for unknown classes. Penalties apply to layers that some device of the cluster has sent. Both losses form
one step (the text's "total objective"), not two alternating steps. L_t is one number for all devices, controlled by the
coordinator with the accuracy on all held-out examples of a round. The smallest L_t is a fifth of all layers, because
the paper has no number. A device selected for the first time after the clustering is a newcomer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import core, metrics
from fedquilt.arrays import exact_sums, tensors
from fedquilt.formats import tensor_register
from fedquilt.formats.tensor_register import ATTENTION, TensorRegister
from fedquilt.methods import fedavg
from fedquilt.models import learngene, local_training, subspaces
from fedquilt.models.local_training import NetworkState

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
PREFIX = "layer."  # prefix of bundles: one for each layer, so that only changed layers are sent again


TRAITS = core.Traits(
    prediction_tasks=("classes",),  # L_t follows the devices' accuracy
    exact_updates=True,  # fingerprints are directions of length 1
    per_device_data="every fingerprint of the first round, and the sums of each cluster",
    replaces_private_state=False,  # the own model is what a device trains for
    model_copies=2,
)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and those of clusters, penalties and the learnGene."""

    clusters: Positive = 4  # M
    gather: Positive = 1  # rounds in which fingerprints are collected before they are clustered
    directions: Annotated[int, Meta(ge=1, le=64)] = 5  # p: singular vectors of a fingerprint
    fingerprint_samples: Positive = 512  # of a device's examples, at most
    smooth: Annotated[float, Meta(ge=0)] = 0.5  # lambda_1
    elastic: Annotated[float, Meta(ge=0)] = 0.05  # lambda_2
    gamma: Annotated[float, Meta(ge=0, le=1)] = 0.5  # scaled Fisher value from which the cluster's value is preferred
    strength: Literal["size", "sqrt", "one"] = "size"  # a_l: N_l / max N, 1 / sqrt(N_l) or 1
    fisher_samples: Positive = 256  # of a device's examples, at most
    fisher_group: Positive = 1  # examples whose gradients are averaged before squaring: cheaper, coarser
    gene_order: Literal["lowest", "highest"] = "lowest"  # scores that make the learnGene
    gene_norm: Literal["mul", "div_sqrt", "none"] = "mul"  # times N^, by its root, or as they are; N^ = N_l / sum N
    share_head: bool = False
    first_layers: Natural = 0  # L_t at the beginning; 0: all, which reveal nearly as much as a whole model
    min_layers: Natural = 0  # L_t at the end; 0: a fifth of all
    shrink_every: Positive = 5  # rounds before L_t may shrink again
    tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.005  # how far accuracy may be below its best for L_t to shrink


@dataclass(frozen=True)
class State(NetworkState):
    """The job's first weights as `model`, clusters of devices, and the layers that each cluster has received."""

    seed: int
    units: dict[str, tuple[str, ...]]  # layer -> names of its tensors
    phase: str = "fingerprint"  # then "collaborate"
    gathered: int = 0  # rounds that brought fingerprints
    fingerprints: dict[str, np.ndarray] = field(default_factory=dict)  # (d, p) of each device, until clustered
    centres: tuple[np.ndarray, ...] = ()  # of each cluster, (d, p): the mean of its members' fingerprints
    members: tuple[int, ...] = ()
    assigned: dict[str, int] = field(default_factory=dict)  # device -> cluster
    clusters: tuple[dict[str, dict[str, np.ndarray]], ...] = ()  # Theta_k: layer -> tensors, those received so far
    genes: tuple[tuple[str, ...], ...] = ()  # layers of the last round, most often sent first
    size: int = 0  # L_t
    shared: tuple[str, ...] = ()  # layers that may be shared
    recent: tuple[float, ...] = ()  # accuracy of each round since L_t changed, where reported
    waited: int = 0  # rounds since then
    best: float = 0.0

    @property
    def initial_layers(self) -> dict[str, dict[str, np.ndarray]]:
        return {layer: {name: self.model[name] for name in names} for layer, names in self.units.items()}

    @property
    def statistics(self) -> dict[str, np.ndarray]:
        """Tensors that belong to no layer, at the job's start."""
        known = {name for names in self.units.values() for name in names}
        return {name: array for name, array in self.model.items() if name not in known}


@dataclass(frozen=True)
class GeneFLSums:
    """Sums of a round by cluster, and the fingerprints received."""

    fingerprints: Mapping[str, np.ndarray]
    totals: Mapping[str, Mapping[str, exact_sums.ExactSum]]  # cluster -> tensor -> sum over devices
    counts: Mapping[str, Mapping[str, int]]  # cluster -> layer -> devices that sent it
    held_correct: exact_sums.ExactScalar = exact_sums.ExactScalar()  # of the devices' held-out examples
    held_examples: exact_sums.ExactScalar = exact_sums.ExactScalar()


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, in the fingerprint phase, with all layers but the head to share."""
    begun = fedavg.init(bundle, params, seed)
    units = layer_units(begun.register)
    last = None if params.share_head else begun.register.find_classifier()
    shared = tuple(layer for layer in units if layer != last) or tuple(units)
    size = min(params.first_layers or len(shared), len(shared))
    return State(**vars(begun), seed=seed, units=units, size=size, shared=shared)


def layer_units(register: TensorRegister) -> dict[str, tuple[str, ...]]:
    """Return the parameters of each layer. A module around layers goes with the first layer in it.

    A gain of one number would otherwise always have one of the smallest scores, and would be the last layer shared.
    """
    found = register.parameters_by_layer()
    units = {layer: list(names) for layer, names in found.items()}
    for layer in found:
        inner = [each for each in found if each != layer and (not layer or each.startswith(f"{layer}."))]
        attention = any(each.module == layer and each.type == ATTENTION for each in register.tensors)
        if inner and not attention:
            units[inner[0]] += units.pop(layer)
    return {layer: tuple(sorted(names)) for layer, names in units.items()}


def send(state: State, device: core.DeviceView) -> core.TaskSpec | None:
    """Return the task spec for a fingerprint (Eq. 11), or to train with the cluster's layers."""
    cluster = state.assigned.get(device.device)
    if cluster is None:
        if device.device in state.fingerprints:
            return None  # it waits for the others
        wanted = {key: state.params[key] for key in ("directions", "fingerprint_samples")}
        return core.TaskSpec({**wanted, "ask": "fingerprint"}, {})
    told, newcomer = state.clusters[cluster], len(device.rounds) < 2
    taken = state.genes[cluster] if newcomer else tuple(told)
    parts = {layer: told[layer] if layer in taken else held for layer, held in state.initial_layers.items()}
    bundles: dict[str, core.Tensors] = {PREFIX + layer: part for layer, part in parts.items()}
    order = local_training.training_task_spec(state, {**bundles, "statistics": state.statistics}, TRAITS)
    bound = [] if newcomer else list(taken)
    asked = {"ask": "train", "all": list(parts), "bound": bound, "shared": list(state.shared), "layers": state.size}
    samples = state.params["fisher_samples"] if bound and state.params["elastic"] else 0
    work = msgspec.structs.replace(order.work, flops=order.work.flops + 3 * state.flops * samples)
    return replace(order, params={**order.params, **asked}, work=work)


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Return a fingerprint (Eq. 11), or train the device's model (Eq. 4 to 8) and send its learnGene (Eq. 9)."""
    params = task.params
    if params["ask"] == "fingerprint":
        some = _sample_examples(site, params["fingerprint_samples"])
        found = subspaces.compute_subspace(some.x, params["directions"])
        return core.ClientResult(
            {"fingerprint": {"u": found}}, weight=float(len(site.train)), private_state=site.private_state
        )
    received, parts = _load_received_layers(task, site)
    before = _load_previous_model(site, received)
    bound = [name for layer in params["bound"] for name in parts[layer]]
    elastic = _find_elastic_gene(task, site, before, received, bound)
    strengths = learngene.layer_strengths(params["strength"], parts, received)
    pulled = {name: strengths[name] for name in bound}
    penalty = learngene.penalty_hooks(params["smooth"], params["elastic"], before, received, elastic, pulled)
    answer = local_training.train_from(task, site, before, penalty)
    model = answer.bundles["model"]
    shared = {layer: parts[layer] for layer in params["shared"]}
    order, norm = params["gene_order"], params["gene_norm"]
    gene = learngene.choose_learngene_layers(shared, model, before, count=params["layers"], order=order, norm=norm)
    told = {
        **answer.metrics,
        "smooth": sum(strengths[name] * learngene.squared_distance(model[name], received[name]) for name in bound),
        "elastic": sum(learngene.squared_distance(model[name], elastic[name]) for name in bound),
        **_count_held_correct(task, site, model),
    }
    sent = {name: model[name] for layer in gene for name in parts[layer]}
    return core.ClientResult({"gene": sent}, answer.weight, told, private_state=model)


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's model on the held-out examples, or nothing before the clustering."""
    if task.params["ask"] == "fingerprint":
        return core.EvaluationSums(examples=0)
    return site.engine.evaluate(
        task.params["network"], _load_previous_model(site, _load_received_layers(task, site)[0]), site.held_out
    )


def personal(task: core.Task, site: core.ClientContext) -> core.Tensors:
    """Return the device's model.

    Raises:
        ModelError: If the device has not trained yet.
    """
    if not site.private_state:
        raise core.ModelError(
            f"{site.device} has no model of its own of {task.job}: genefl gives a device one once it has taken part"
        )
    return site.private_state


def _load_received_layers(
    task: core.Task, site: core.ClientContext
) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
    """Return the received model, and the tensor names of each layer in it."""
    model, parts = dict(site.load("statistics")), {}
    for layer in task.params["all"]:
        part = site.load(PREFIX + layer)
        parts[layer] = tuple(sorted(part))
        model.update(part)
    return model, parts


def _load_previous_model(site: core.ClientContext, received: core.Tensors) -> core.Tensors:
    """Return theta~: the device's stored model, or the received model before the first training."""
    if not site.private_state:
        return received
    tensors.require_matching(site.private_state, received)
    return site.private_state


def _sample_examples(site: core.ClientContext, most: int) -> core.Examples:
    rows = np.sort(site.rng.permutation(len(site.train))[:most])
    return core.Examples(site.train.x[rows], site.train.y[rows])


def _find_elastic_gene(
    task: core.Task, site: core.ClientContext, before: core.Tensors, received: core.Tensors, bound: list[str]
) -> dict[str, np.ndarray]:
    # Eq. 5 and 6: the device's value where the scaled Fisher value is below gamma, otherwise the cluster's.
    if not (bound and task.params["elastic"]):
        return {name: before[name] for name in bound}
    some = _sample_examples(site, task.params["fisher_samples"])
    found = site.engine.fisher(task.params["network"], before, some, examples_per_gradient=task.params["fisher_group"])
    gamma = task.params["gamma"]
    return {name: np.where(learngene.scale_fisher(found[name]) < gamma, before[name], received[name]) for name in bound}


def _count_held_correct(task: core.Task, site: core.ClientContext, model: core.Tensors) -> dict[str, float]:
    held = site.engine.evaluate(task.params["network"], model, site.held_out)
    rated = metrics.main_metric(held)
    if rated is None:
        return {}
    return {"held_correct": float(round(rated[1] * held.examples)), "held_examples": float(held.examples)}


# -- on the coordinator ---------------------------------------------------------------------------


def fold(state: State, so_far: GeneFLSums | None, update: core.DeviceUpdate) -> GeneFLSums:
    """Add a learnGene to the sums of its cluster, or store a fingerprint.

    Raises:
        UpdateError: If the update has a wrong number of layers, wrong tensors or an impossible accuracy.
    """
    so_far = so_far or GeneFLSums({}, {}, {})
    cluster = state.assigned.get(update.device)
    if cluster is None:
        told, known = update.bundles.get("fingerprint", {}), (*state.centres, *state.fingerprints.values())
        found = subspaces.validate_fingerprint(told, update.device, state.params["directions"], known)
        return replace(so_far, fingerprints={**so_far.fingerprints, update.device: found})
    gene, key = update.bundles.get("gene", {}), str(cluster)
    sent = [layer for layer in state.shared if not state.initial_layers[layer].keys().isdisjoint(gene)]
    if len(sent) != state.size:
        raise core.UpdateError(f"{update.device} sent {len(sent)} layers, {state.size} are wanted")
    like = {name: array for layer in sent for name, array in state.initial_layers[layer].items()}
    tensors.require_addable(gene, like)
    correct, held = (update.metrics.get(name, 0.0) for name in ("held_correct", "held_examples"))
    if not 0 <= correct <= held < math.inf:
        raise core.UpdateError(f"{update.device} says that {correct:g} of {held:g} held-out examples are right")
    values = {name: array.astype(np.float64) for name, array in gene.items()}  # of counters the mean too
    total, count = exact_sums.add_arrays(so_far.totals.get(key, {}), values), dict(so_far.counts.get(key, {}))
    for layer in sent:
        count[layer] = count.get(layer, 0) + 1
    return replace(
        so_far,
        totals={**so_far.totals, key: total},
        counts={**so_far.counts, key: count},
        held_correct=so_far.held_correct.add_numbers(correct),
        held_examples=so_far.held_examples.add_numbers(held),
    )


def step(state: State, total: GeneFLSums | None) -> State:
    """Cluster the fingerprints (Eq. 12), or average layers by cluster (Eq. 10) and adapt L_t."""
    if total is None:
        return state
    if state.phase == "fingerprint":
        return _cluster_fingerprints(state, total)
    return _shrink_gene_if_accurate(
        _average_layers_by_cluster(_assign_to_clusters(state, total.fingerprints), total), total
    )


def _cluster_fingerprints(state: State, total: GeneFLSums) -> State:
    shapes = [array.shape for array in (*state.fingerprints.values(), *total.fingerprints.values())]
    usual = max(sorted(set(shapes)), key=shapes.count)  # devices of one round were not compared with each other
    found = {k: v for k, v in sorted({**state.fingerprints, **total.fingerprints}.items()) if v.shape == usual}
    state = replace(state, fingerprints=found, gathered=state.gathered + 1)
    if state.gathered < state.params["gather"]:
        return state
    rng = tensors.seeded_rng("genefl clusters", state.seed)
    owner, centres = subspaces.cluster_points(np.stack(list(found.values())), state.params["clusters"], rng)
    return replace(
        state,
        phase="collaborate",
        fingerprints={},
        centres=tuple(centres),
        members=tuple(int((owner == k).sum()) for k in range(len(centres))),
        assigned={device: int(k) for device, k in zip(found, owner, strict=True)},
        clusters=({},) * len(centres),
        genes=((),) * len(centres),
    )


def _assign_to_clusters(state: State, found: Mapping[str, np.ndarray]) -> State:
    # Eq. 12. The centre of a cluster is the mean of all its members.
    centres, members, assigned = list(state.centres), list(state.members), dict(state.assigned)
    for device in sorted(found):
        assigned[device] = subspaces.assign_to_nearest(found[device], centres, members)
    return replace(state, centres=tuple(centres), members=tuple(members), assigned=assigned)


def _average_layers_by_cluster(state: State, total: GeneFLSums) -> State:
    # Eq. 10. Layers without senders stay.
    clusters, genes = list(state.clusters), list(state.genes)
    for key, counts in total.counts.items():
        k, sums = int(key), total.totals[key]
        new = {
            layer: {name: sums[name].mean(count).astype(old.dtype) for name, old in state.initial_layers[layer].items()}
            for layer, count in counts.items()
        }
        clusters[k] = {**clusters[k], **new}
        most = sorted(counts, key=lambda layer: (-counts[layer], state.shared.index(layer)))
        genes[k] = tuple(most[: state.size])
    return replace(state, clusters=tuple(clusters), genes=tuple(genes))


def _shrink_gene_if_accurate(state: State, total: GeneFLSums) -> State:
    """Every `shrink_every` rounds, decrease L_t by one unless the accuracy has fallen."""
    if not total.counts:
        return state  # nobody trained
    held = float(total.held_examples)
    recent = (*state.recent, float(total.held_correct) / held) if held else state.recent
    state = replace(state, recent=recent, waited=state.waited + 1)
    if state.waited < state.params["shrink_every"]:
        return state
    mean = sum(recent) / len(recent) if recent else state.best  # nobody has held-out examples: only time counts
    least = min(state.params["min_layers"] or math.ceil(len(state.shared) / 5), len(state.shared))
    size = max(state.size - 1, min(least, state.size)) if mean >= state.best - state.params["tolerance"] else state.size
    return replace(state, size=size, best=max(mean, state.best), recent=(), waited=0)


def explain(state: State) -> list[str]:
    """Return sentences on the fingerprints, or on the clusters and the layers that each shares."""
    if state.phase == "fingerprint":
        return [f"{len(state.fingerprints)} fingerprints so far"] if state.fingerprints else []
    sizes = f"{len(state.members)} clusters of {', '.join(map(str, state.members))} devices"
    told = [f"{sizes}; {state.size} of {len(state.shared)} layers are sent"]
    return told + [f"cluster {k}: {', '.join(gene)}" for k, gene in enumerate(state.genes) if gene]


def result(state: State) -> core.Artefact:
    """Return each cluster's shared layers as tensors "0/conv1.weight" and so on, without a network."""
    held = {}
    for k, cluster in enumerate(state.clusters):
        held.update({f"{k}/{name}": array for part in cluster.values() for name, array in part.items()})
    genes = {str(k): list(gene) for k, gene in enumerate(state.genes)}
    meta = {"network": tensor_register.without_register(state.network), "genes": genes, "members": list(state.members)}
    return core.Artefact("genes", meta, held)


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2504.14628",
    params=Params,
    state=State,
    init=init,
    send=send,
    common_task=False,
    work=work,
    check=check,
    aggregation=core.Aggregation(fold),
    step=step,
    result=result,
    explain=explain,
    personal_model=personal,
    traits=TRAITS,
)
