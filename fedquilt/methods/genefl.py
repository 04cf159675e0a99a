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
    sent_data="a fingerprint of its data, then the learnGene",
    private_data="its model",
    prediction_tasks=("classes",),  # L_t follows the devices' accuracy
    exact_updates=True,  # fingerprints are directions of length 1
    per_device_data="every fingerprint of the first round, and the sums of each cluster",
    replaces_private_state=False,  # a device's own model is the purpose of the training
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
    tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.005  # accuracy below the best at which L_t still shrinks


@dataclass(frozen=True)
class State(NetworkState):
    """The job's initial weights as `model`, clusters of devices, and the layers that each cluster shares."""

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
        """First values of the tensors that belong to no layer."""
        layer_names = {name for names in self.units.values() for name in names}
        return {name: array for name, array in self.model.items() if name not in layer_names}


@dataclass(frozen=True)
class GeneFLSums:
    """Sums of the received layers by cluster, and the fingerprints received in a round."""

    fingerprints: Mapping[str, np.ndarray]
    totals: Mapping[str, Mapping[str, exact_sums.ExactSum]]  # cluster -> tensor -> sum over devices
    counts: Mapping[str, Mapping[str, int]]  # cluster -> layer -> devices that sent it
    held_correct: exact_sums.ExactScalar = exact_sums.ExactScalar()  # of the devices' held-out examples
    held_examples: exact_sums.ExactScalar = exact_sums.ExactScalar()


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, in the fingerprint phase, with all layers but the head to share."""
    initial = fedavg.init(bundle, params, seed)
    units = layer_units(initial.register)
    head = None if params.share_head else initial.register.find_classifier()
    shared = tuple(layer for layer in units if layer != head) or tuple(units)
    size = min(params.first_layers or len(shared), len(shared))
    return State(**vars(initial), seed=seed, units=units, size=size, shared=shared)


def layer_units(register: TensorRegister) -> dict[str, tuple[str, ...]]:
    """Return the parameter names of each layer. Parameters around layers belong to the first layer inside.

    As a layer of its own, a gain of a single number would nearly always have one of the smallest scores.
    """
    parameters = register.parameters_by_layer()
    units = {layer: list(names) for layer, names in parameters.items()}
    for layer in parameters:
        inner_layers = [
            entry for entry in parameters if entry != layer and (not layer or entry.startswith(f"{layer}."))
        ]
        is_attention = any(entry.module == layer and entry.type == ATTENTION for entry in register.tensors)
        if inner_layers and not is_attention:
            units[inner_layers[0]] += units.pop(layer)
    return {layer: tuple(sorted(names)) for layer, names in units.items()}


def send(state: State, device: core.DeviceView) -> core.TaskSpec | None:
    """Return the task spec for a fingerprint (GENE-FL, Eq. 11), or to train with the cluster's layers."""
    cluster = state.assigned.get(device.device)
    if cluster is None:
        if device.device in state.fingerprints:
            return None  # the device has no cluster yet
        fingerprint_params = {key: state.params[key] for key in ("directions", "fingerprint_samples")}
        return core.TaskSpec({**fingerprint_params, "ask": "fingerprint"}, {})
    cluster_layers, is_newcomer = state.clusters[cluster], len(device.rounds) < 2
    received_layers = state.genes[cluster] if is_newcomer else tuple(cluster_layers)
    sent_layers = {
        layer: cluster_layers[layer] if layer in received_layers else initial
        for layer, initial in state.initial_layers.items()
    }
    bundles: dict[str, core.Tensors] = {PREFIX + layer: part for layer, part in sent_layers.items()}
    task_spec = local_training.training_task_spec(state, {**bundles, "statistics": state.statistics}, TRAITS)
    bound = [] if is_newcomer else list(received_layers)
    training_params = {
        "ask": "train",
        "all": list(sent_layers),
        "bound": bound,
        "shared": list(state.shared),
        "layers": state.size,
    }
    samples = state.params["fisher_samples"] if bound and state.params["elastic"] else 0
    work = msgspec.structs.replace(task_spec.work, flops=task_spec.work.flops + 3 * state.flops * samples)
    return replace(task_spec, params={**task_spec.params, **training_params}, work=work)


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Return a fingerprint (GENE-FL, Eq. 11), or the learnGene of a trained model (Eq. 4 to 9)."""
    params = task.params
    if params["ask"] == "fingerprint":
        examples = _sample_examples(site, params["fingerprint_samples"])
        subspace = subspaces.compute_subspace(examples.x, params["directions"])
        return core.ClientResult(
            {"fingerprint": {"u": subspace}}, weight=float(len(site.train)), private_state=site.private_state
        )
    received, parts = _load_received_layers(task, site)
    previous = _load_previous_model(site, received)
    bound_names = [name for layer in params["bound"] for name in parts[layer]]
    elastic = _find_elastic_gene(task, site, previous, received, bound_names)
    strengths = learngene.layer_strengths(params["strength"], parts, received)
    pulled = {name: strengths[name] for name in bound_names}
    penalty = learngene.penalty_hooks(params["smooth"], params["elastic"], previous, received, elastic, pulled)
    client_result = local_training.train_from(task, site, previous, penalty)
    model = client_result.bundles["model"]
    shared = {layer: parts[layer] for layer in params["shared"]}
    order, norm = params["gene_order"], params["gene_norm"]
    gene = learngene.choose_learngene_layers(
        shared, model, previous, count=params["layers"], selection=order, norm=norm
    )
    metrics = {
        **client_result.metrics,
        "smooth": sum(
            strengths[name] * learngene.squared_distance(model[name], received[name]) for name in bound_names
        ),
        "elastic": sum(learngene.squared_distance(model[name], elastic[name]) for name in bound_names),
        **_count_held_correct(task, site, model),
    }
    gene_tensors = {name: model[name] for layer in gene for name in parts[layer]}
    return core.ClientResult({"gene": gene_tensors}, client_result.weight, metrics, private_state=model)


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's model on the held-out examples. Before the clustering, none is evaluated."""
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
            f"{site.device} has no model of job {task.job}: with genefl a device has one after its first training"
        )
    return site.private_state


def _load_received_layers(
    task: core.Task, site: core.ClientContext
) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
    """Return the received model, and the names of its tensors by layer."""
    model, parts = dict(site.load("statistics")), {}
    for layer in task.params["all"]:
        part = site.load(PREFIX + layer)
        parts[layer] = tuple(sorted(part))
        model.update(part)
    return model, parts


def _load_previous_model(site: core.ClientContext, received: core.Tensors) -> core.Tensors:
    """Return the device's stored model, or the received model before the first training."""
    if not site.private_state:
        return received
    tensors.require_matching(site.private_state, received)
    return site.private_state


def _sample_examples(site: core.ClientContext, max_count: int) -> core.Examples:
    rows = np.sort(site.rng.permutation(len(site.train))[:max_count])
    return core.Examples(site.train.x[rows], site.train.y[rows])


def _find_elastic_gene(
    task: core.Task, site: core.ClientContext, previous: core.Tensors, received: core.Tensors, bound_names: list[str]
) -> dict[str, np.ndarray]:
    """Return the device's values of low Fisher information, else the cluster's (GENE-FL, Eq. 6)."""
    if not (bound_names and task.params["elastic"]):
        return {name: previous[name] for name in bound_names}
    examples = _sample_examples(site, task.params["fisher_samples"])
    fisher = site.engine.fisher(
        task.params["network"], previous, examples, examples_per_gradient=task.params["fisher_group"]
    )
    gamma = task.params["gamma"]
    return {
        name: np.where(learngene.scale_fisher(fisher[name]) < gamma, previous[name], received[name])
        for name in bound_names
    }


def _count_held_correct(task: core.Task, site: core.ClientContext, model: core.Tensors) -> dict[str, float]:
    evaluation = site.engine.evaluate(task.params["network"], model, site.held_out)
    metric = metrics.main_metric(evaluation)
    if metric is None:
        return {}
    return {"held_correct": float(round(metric[1] * evaluation.examples)), "held_examples": float(evaluation.examples)}


# -- on the coordinator ---------------------------------------------------------------------------


def fold(state: State, accumulator: GeneFLSums | None, update: core.DeviceUpdate) -> GeneFLSums:
    """Return the sums with an update's learnGene added to its cluster's sum, or its fingerprint stored.

    Raises:
        UpdateError: If the update has a wrong number of layers, wrong tensors or an impossible accuracy.
    """
    accumulator = accumulator or GeneFLSums({}, {}, {})
    cluster = state.assigned.get(update.device)
    if cluster is None:
        bundle = update.bundles.get("fingerprint", {})
        other_fingerprints = (*state.centres, *state.fingerprints.values())
        fingerprint = subspaces.validate_fingerprint(
            bundle, update.device, state.params["directions"], other_fingerprints
        )
        return replace(accumulator, fingerprints={**accumulator.fingerprints, update.device: fingerprint})
    gene, key = update.bundles.get("gene", {}), str(cluster)
    layers = [layer for layer in state.shared if not state.initial_layers[layer].keys().isdisjoint(gene)]
    if len(layers) != state.size:
        raise core.UpdateError(f"{update.device} sent {len(layers)} layers instead of {state.size}")
    reference = {name: array for layer in layers for name, array in state.initial_layers[layer].items()}
    tensors.require_addable(gene, reference)
    correct, examples = (update.metrics.get(name, 0.0) for name in ("held_correct", "held_examples"))
    if not 0 <= correct <= examples < math.inf:
        raise core.UpdateError(f"{update.device} reports {correct:g} of {examples:g} held-out examples as correct")
    values = {name: array.astype(np.float64) for name, array in gene.items()}  # counters are averaged too
    total, count = exact_sums.add_arrays(accumulator.totals.get(key, {}), values), dict(accumulator.counts.get(key, {}))
    for layer in layers:
        count[layer] = count.get(layer, 0) + 1
    return replace(
        accumulator,
        totals={**accumulator.totals, key: total},
        counts={**accumulator.counts, key: count},
        held_correct=accumulator.held_correct.add_numbers(correct),
        held_examples=accumulator.held_examples.add_numbers(examples),
    )


def rebase(state: State, earlier: State, update: core.DeviceUpdate, weight: float) -> core.DeviceUpdate:
    """Mix the layers of a late learnGene into those of its cluster. Its share is `weight`.

    A layer that the cluster lacks is taken unchanged. Layers beyond the present size of learnGenes are dropped.
    Fingerprints are returned unchanged, because they do not depend on the state.
    """
    cluster = state.assigned.get(update.device)
    if "gene" not in update.bundles or cluster is None:
        return update
    gene, rebased = update.bundles["gene"], dict[str, np.ndarray]()
    layers = [layer for layer in state.shared if not state.initial_layers[layer].keys().isdisjoint(gene)]
    for layer in layers[: state.size]:
        present = state.clusters[cluster].get(layer, gene)
        for name in state.initial_layers[layer]:
            start = present[name].astype(np.float64)
            rebased[name] = (start + weight * (gene[name] - start)).astype(gene[name].dtype)
    return replace(update, bundles={**update.bundles, "gene": rebased})


def step(state: State, total: GeneFLSums | None) -> State:
    """Return the state with clusters of devices, or with mean layers by cluster (GENE-FL, Eq. 12 and 10)."""
    if total is None:
        return state
    if state.phase == "fingerprint":
        return _cluster_fingerprints(state, total)
    return _shrink_gene_if_accurate(
        _average_layers_by_cluster(_assign_to_clusters(state, total.fingerprints), total), total
    )


def _cluster_fingerprints(state: State, total: GeneFLSums) -> State:
    shapes = [array.shape for array in (*state.fingerprints.values(), *total.fingerprints.values())]
    # Fingerprints of one round were not validated against each other.
    usual_shape = max(sorted(set(shapes)), key=shapes.count)
    fingerprints = {
        k: v for k, v in sorted({**state.fingerprints, **total.fingerprints}.items()) if v.shape == usual_shape
    }
    state = replace(state, fingerprints=fingerprints, gathered=state.gathered + 1)
    if state.gathered < state.params["gather"]:
        return state
    rng = tensors.seeded_rng("genefl clusters", state.seed)
    cluster_of, centres = subspaces.cluster_points(np.stack(list(fingerprints.values())), state.params["clusters"], rng)
    return replace(
        state,
        phase="collaborate",
        fingerprints={},
        centres=tuple(centres),
        members=tuple(int((cluster_of == k).sum()) for k in range(len(centres))),
        assigned={device: int(k) for device, k in zip(fingerprints, cluster_of, strict=True)},
        clusters=({},) * len(centres),
        genes=((),) * len(centres),
    )


def _assign_to_clusters(state: State, fingerprints: Mapping[str, np.ndarray]) -> State:
    centres, members, assigned = list(state.centres), list(state.members), dict(state.assigned)
    for device in sorted(fingerprints):
        assigned[device] = subspaces.assign_to_nearest(fingerprints[device], centres, members)
    return replace(state, centres=tuple(centres), members=tuple(members), assigned=assigned)


def _average_layers_by_cluster(state: State, total: GeneFLSums) -> State:
    clusters, genes = list(state.clusters), list(state.genes)
    for key, counts in total.counts.items():
        k, sums = int(key), total.totals[key]
        layers = {
            layer: {
                name: sums[name].mean(count).astype(initial.dtype)
                for name, initial in state.initial_layers[layer].items()
            }
            for layer, count in counts.items()
        }
        clusters[k] = {**clusters[k], **layers}
        ordered_layers = sorted(counts, key=lambda layer: (-counts[layer], state.shared.index(layer)))
        genes[k] = tuple(ordered_layers[: state.size])
    return replace(state, clusters=tuple(clusters), genes=tuple(genes))


def _shrink_gene_if_accurate(state: State, total: GeneFLSums) -> State:
    """Return the state, with one layer less to send if accuracy has held for `shrink_every` rounds."""
    if not total.counts:
        return state  # no device trained
    examples = float(total.held_examples)
    recent = (*state.recent, float(total.held_correct) / examples) if examples else state.recent
    state = replace(state, recent=recent, waited=state.waited + 1)
    if state.waited < state.params["shrink_every"]:
        return state
    mean = sum(recent) / len(recent) if recent else state.best  # without held-out examples only time counts
    min_size = min(state.params["min_layers"] or math.ceil(len(state.shared) / 5), len(state.shared))
    size = (
        max(state.size - 1, min(min_size, state.size)) if mean >= state.best - state.params["tolerance"] else state.size
    )
    return replace(state, size=size, best=max(mean, state.best), recent=(), waited=0)


def explain(state: State) -> list[str]:
    """Return sentences on the number of fingerprints, or on the size and layers of each cluster."""
    if state.phase == "fingerprint":
        return [f"{len(state.fingerprints)} fingerprints so far"] if state.fingerprints else []
    sizes = f"{len(state.members)} clusters of {', '.join(map(str, state.members))} devices"
    sentences = [f"{sizes}; {state.size} of {len(state.shared)} layers are sent"]
    return sentences + [f"cluster {k}: {', '.join(gene)}" for k, gene in enumerate(state.genes) if gene]


def result(state: State) -> core.Artefact:
    """Return each cluster's shared layers, without a network, as tensors such as "0/conv1.weight"."""
    layer_tensors = {}
    for k, cluster in enumerate(state.clusters):
        layer_tensors.update({f"{k}/{name}": array for part in cluster.values() for name, array in part.items()})
    genes = {str(k): list(gene) for k, gene in enumerate(state.genes)}
    shared = {name for cluster in state.clusters for part in cluster.values() for name in part}
    meta = {
        "network": tensor_register.without_register(state.network),
        "genes": genes,
        "members": list(state.members),
        "untrained": sorted(state.model.keys() - shared),
    }
    return core.Artefact("genes", meta, layer_tensors)


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
    aggregation=core.Aggregation(fold, change=core.StateChange(rebase)),
    step=step,
    result=result,
    explain=explain,
    personal_model=personal,
    traits=TRAITS,
)
