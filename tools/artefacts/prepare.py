"""Make a job's bundle on the operator's machine: donors cut into ONNX blocks, or a network's first weights.

What the agents need of torch happens here, once; the coordinator only serves the result. Preparing
the same job twice gives the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fedquilt import bundle, config, footprint, methods, progress, tensors, units
from fedquilt.coordinator import preflight
from fedquilt.coordinator.settings import NOT_NETWORK, Job
from fedquilt.core import Bundle, FedquiltError, JobError, ModelError, Name
from fedquilt.data import examples, fitting, inputs, measured_settings, readers, reading
from fedquilt.data.images import Input
from fedquilt.data.spec import DataSpec
from fedquilt.models.networks import drawn, registry
from fedquilt.models.partial import masks
from fedquilt.tools.artefacts import alignment, dry_run, frozen_part

if TYPE_CHECKING:
    from torch import nn

    from fedquilt.tools.artefacts.quantize import Trial


class Donor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[donors]]` table."""

    name: Name
    network: dict[str, Any]  # see fedquilt.models.networks.registry; of outside too
    weights: str | None = None  # a file, or a name of torchvision's ("DEFAULT"); none: random from `seed`
    seed: int = 0
    cuts: tuple[str, ...] = ()  # modules after which to cut; none: by rule
    align: alignment.Align | None = None  # for each label the donor's classes that mean it: `alignment.groups`
    classes: str | None = None  # with names in `align`: a file of the classes' names, one a line; or "imagenet"


def prepare(job: Mapping[str, Any], out: Path, say: Callable[[str], None] = lambda line: None) -> Bundle:
    """Write the bundle of a job (a job file's table) into the folder `out`.

    From `[model]`: the files "model" and "masks" (`models.partial.masks`), both safetensors, or instead of masks meta
    "untraced", the reason why the network cannot be masked. Meta "network", "flops" and "example_bytes" of one example,
    "register" (`fedquilt.tensor_register`), and "pretrained": whether its weights are a file's; of a network from
    outside "plugins", what a device has to have for it (`fedquilt.plugins.needs`), and "outputs", its scores for one
    example.
    With `weights_classes`, the number of classes that the weights are for, the last layer is a new one.
    From `[schedule]`: meta "schedule", which part of it to train (`fedquilt.tools.artefacts.frozen_part`).
    From `[input]`, `labels` and `[[donors]]`: files "<block>.onnx" and "<block>.data", and meta "input",
    "labels", "donors", "blocks" (`fedquilt.models.stitching.stitched.stock` reads them). A block's id is
    "<donor>.<index>".
    From `[data]`: meta "reading", how its files are read (`fedquilt.data.reading`).
    From `[int8]`: files "<block>.int8.onnx" of the blocks that `fedquilt.tools.artefacts.quantize` accepts.

    Raises:
        JobError: a key that is missing or wrong.
        DataError: the images of `[int8]` cannot be had, or are too few.
        ModelError: a network or its weights cannot be had, or a donor cannot be cut.
        StoreError: the folder cannot be written.
    """
    meta: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    far = _far(job)
    if not job.get("model") and not job.get("donors"):
        raise JobError("the job has neither [model] nor [[donors]]: there is nothing to prepare")
    own = job["model"].get("input") if job.get("model") else None
    given = job.get("input") or (own if isinstance(own, Mapping) and own.get("standardise") else None)
    wanted = inputs.parse(given) if given else None
    if isinstance(wanted, inputs.Values) and wanted.standardise:
        wanted = _measured(job)
    for line in measured_settings.agent_lines(job.get("data") or {}):
        say(f"for [data] of each device's agent.toml: {line}")
    if job.get("data"):
        meta["reading"] = reading.reading_settings(DataSpec.parse(job["data"]))
    trial = _trial(job) if job.get("int8") else None
    if job.get("model"):
        far("the network")
        facts, parts = _parts_of_model(job["model"], wanted)
        meta |= facts
        files |= parts
        say(f"model {facts['network']['name']}: {units.size(len(files['model']))}")
        if job.get("schedule"):
            far("which part of it to train")
            model = tensors.decode(files["model"])
            meta["schedule"] = frozen_part.at_prepare(job["schedule"], facts["network"], model, say)
    if job.get("donors"):
        meta |= _stock(job, wanted, files, say, far)
    if trial is not None:
        far("blocks in 8 bits")
        for name, graph in trial.accepted(out, meta, files, say).items():
            meta["blocks"][name]["int8"] = f"{name}.int8.onnx"
            files[f"{name}.int8.onnx"] = graph
    far("the files")
    return bundle.write(out, meta, files)


def _far(job: Mapping[str, Any]) -> Callable[[str], None]:
    """Tells the line of progress of each part of the work when it begins."""
    network = bool(job.get("model"))
    total = network + (network and bool(job.get("schedule"))) + len(job.get("donors") or ()) + bool(job.get("int8")) + 1
    begun = itertools.count()
    return lambda now: progress.LINE.part(now, next(begun), total)


def _measured(job: Mapping[str, Any]) -> inputs.Values:
    """Mean and deviation of each feature of the training split that [data] names on this machine.

    Raises:
        JobError: the job has no [data].
        DataError: they cannot be read.
    """
    if not job.get("data"):
        raise JobError("[input] standardise = true needs [data]: name a sample of the data here, or give mean and std")
    found = examples.load_all(DataSpec.parse(job["data"]))
    return msgspec.structs.replace(inputs.measured(found.x), standardise=True)


def prepare_and_check(job: Job, out: Path, say: Callable[[str], None] = lambda line: None) -> Bundle:
    """Write the bundle of a job, and check that the job can run with its parameters, network and data.

    A dry run carries out a few rounds of the method on synthetic examples (`fedquilt.tools.artefacts.dry_run`).

    Raises:
        FedquiltError: as `prepare`, or the method cannot train the network, or the network cannot take the data.
    """
    made = prepare(msgspec.to_builtins(job), out, say)
    state = preflight.first_state(job, made)
    if isinstance(plan := getattr(state, "plan", None), masks.Plan) and (why := masks.describe_whole_layers(plan)):
        say(f"{job.method}: {why}")
    if (frozen := methods.load(job.method).frozen) and not made.meta.get("pretrained", True):
        say(
            f"{job.method} keeps {frozen} of the first weights, and these are random: give [model] weights = a file of "
            "a pre-trained network's"
        )
    dry_run.rehearse(job, made, out)
    if job.data:
        spec = DataSpec.parse(job.data)
        if spec.synthetic or all(Path(each.path).exists() for each in spec.sources or (spec,)):  # else boards have it
            for warning in fitting.data_warnings(made.meta, fitting.require_fit(made.meta, spec), spec):
                say(f"warning: {warning}")
            if spec.path:
                readers.require_supported_images(spec)
    return made


def _parts_of_model(
    table: Mapping[str, Any], wanted: Input | inputs.Values | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the metadata and files of a bundle that follow from the [model] table."""
    network = {key: value for key, value in table.items() if key not in NOT_NETWORK}
    if wanted is not None:
        network["input"] = msgspec.to_builtins(wanted)
    if drawn.can(network, table.get("weights")) and "weights_classes" not in table:
        return _parts_of_numpy_model(network, int(table.get("seed", 0)))
    registry.needs(network)  # refuses an unknown name, also where torch is missing
    import torch

    from fedquilt.models.networks import layer_costs, tensor_register
    from fedquilt.models.partial import trace

    if "weights_classes" in table:
        model = frozen_part.warm(
            network, str(table.get("weights")), int(table["weights_classes"]), int(table.get("seed", 0))
        )
    else:
        model = registry.load(network, table.get("weights"), seed=int(table.get("seed", 0)))
    _require_trainable(model, str(network["name"]))
    flops = registry.cost(model, registry.input_shape(network)).flops
    state = {name: value.detach().numpy() for name, value in tensor_register.state_without_aliases(model).items()}
    parts = {"model": tensors.encode(state)}
    facts: dict[str, Any] = {"network": network, "flops": flops}
    try:
        parts["masks"] = tensors.encode({"json": masks.to_array(trace.trace_plan(model))})
    except ModelError as error:  # methods that need masks refuse the network with this reason
        facts["untraced"] = str(error)
    trained, _ = footprint.weigh(model, torch.zeros(2, *registry.input_shape(network)))  # last: it moves batch norm
    register = tensor_register.trace_register(model, registry.input_shape(network))
    whole = register.is_coupled(state)
    each_bytes = footprint.least_bytes(trained) if whole else footprint.example_bytes(trained)
    facts |= {"example_bytes": each_bytes, "register": register}
    facts["layers"] = layer_costs.trace(model, registry.input_shape(network))
    facts |= {"pretrained": table.get("weights") is not None}
    if registry.outside(network):
        facts |= {"plugins": registry.needs(network), "outputs": _outputs(model, network)}
    return facts, parts


def _require_trainable(model: nn.Module, name: str) -> None:
    """Check that all parameters are float32 and free: methods say what is trained, and engines go by that alone.

    Raises:
        ModelError: some have another type, or requires_grad = False, which training would not heed.
    """
    every = dict(model.named_parameters())
    for path, value in every.items():
        if (kind := str(value.dtype).removeprefix("torch.")) != "float32":
            raise ModelError(
                f"network {name!r}: parameter {path!r} is {kind}, and examples and weights are float32: return "
                "the network's .float(); [params] mixed = true has 16-bit arithmetic where a GPU has it"
            )
    frozen = [path for path, value in every.items() if not value.requires_grad]
    if not frozen:
        return
    what = "all parameters" if len(frozen) == len(every) else f"{len(frozen)} of {len(every)} parameters"
    raise ModelError(
        f"network {name!r}: {what} are frozen (requires_grad = False), {frozen[0]!r} for instance, and fedquilt would "
        "train them all the same: make what never moves a buffer (register_buffer), or leave all free and have the "
        "method train a part of the network, as ft_part does"
    )


def _parts_of_numpy_model(network: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return what `_parts_of_model` does, without torch, for a network that numpy can make."""
    model, plan = drawn.weights(network, seed), masks.to_array(masks.dense(drawn.layers(network)))
    facts = {
        "network": network,
        "flops": drawn.flops(network),
        "example_bytes": footprint.example_bytes(drawn.trained(network)),
        "register": drawn.register(network),
        "layers": drawn.costs(network),
        "pretrained": False,
    }
    return facts, {"model": tensors.encode(model), "masks": tensors.encode({"json": plan})}


def _outputs(model: Any, network: Mapping[str, Any]) -> int:
    """How many scores a network from outside tells for one example.

    Raises:
        ModelError: it tells something else, or other than its table's `classes`.
    """
    import torch

    shape, name = registry.input_shape(network), network["name"]
    with torch.no_grad():
        scores = model.eval()(torch.zeros(2, *shape))
    told = tuple(getattr(scores, "shape", ())) or type(scores).__name__
    if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or len(scores) != 2:
        raise ModelError(
            f"network {name!r} returns {told} for two examples, and scores of shape (2, classes) are wanted"
        )
    if network.get("classes", scores.shape[1]) != scores.shape[1]:
        raise ModelError(
            f"network {name!r} returns {scores.shape[1]} scores for an example, and its [model] table has classes = "
            f"{network['classes']}: mend the network's last layer, or the table"
        )
    return int(scores.shape[1])


def _trial(job: Mapping[str, Any]) -> Trial:
    from fedquilt.tools.artefacts import quantize  # onnxruntime

    return quantize.trial(job)


def _stock(
    job: Mapping[str, Any],
    wanted: Input | inputs.Values | None,
    files: dict[str, bytes],
    say: Callable[[str], None],
    far: Callable[[str], None],
) -> dict[str, Any]:
    labels = [str(label) for label in job.get("labels") or ()]
    if wanted is None or not labels:
        raise JobError(
            "a job with [[donors]] also needs [input] (channels, size, mean and std of images; mean and std, or "
            "standardise, of time series) and labels = [...]"
        )
    donors = [config.convert(table, Donor, f"[[donors]] {i + 1}") for i, table in enumerate(job["donors"])]
    twice = sorted({donor.name for donor in donors if sum(other.name == donor.name for other in donors) > 1})
    if twice:
        raise JobError(f"two donors are called {twice[0]!r}: give each its own name")
    meta: dict[str, Any] = {"input": msgspec.to_builtins(wanted), "labels": labels, "donors": {}, "blocks": {}}
    for donor in donors:
        far(f"donor {donor.name}")
        facts, blocks = _donor(donor, wanted, labels, files, say)
        meta["donors"][donor.name] = facts
        meta["blocks"] |= blocks
        size = sum(block["weight_bytes"] for block in blocks.values())
        say(f"donor {donor.name}: {len(blocks)} blocks, {units.size(size)}")
    shapes = {name: meta["blocks"][facts["blocks"][0]]["in_shape"] for name, facts in meta["donors"].items()}
    first, *others = shapes
    if odd := [name for name in others if shapes[name] != shapes[first]]:
        raise JobError(
            f"donor {odd[0]!r} takes examples of shape {tuple(shapes[odd[0]])}, {first!r} of {tuple(shapes[first])}: "
            "donors are run on the same examples, so give their networks the same steps and channels"
        )
    return meta


def _donor(
    donor: Donor,
    wanted: Input | inputs.Values,
    labels: Sequence[str],
    files: dict[str, bytes],
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    from fedquilt.models.stitching import blocks  # torch and onnx

    if isinstance(wanted, Input):
        shape: tuple[int, ...] = (wanted.channels, wanted.size, wanted.size)
    else:
        shape = registry.input_shape(donor.network)
    model = registry.load(donor.network, donor.weights, seed=donor.seed)
    architecture = str(donor.network.get("name", "")).removeprefix("torchvision/")
    parts = blocks.split(model, donor.name, shape, cuts=donor.cuts, architecture=architecture)
    classes = parts[-1].out_shape[0]
    facts: dict[str, Any] = {"blocks": [part.id for part in parts], "classes": classes}
    if donor.align is not None:
        tell: Callable[[str], None] = lambda line: say(f"donor {donor.name}: {line}")  # noqa: E731
        try:
            facts["align"] = alignment.groups(donor.align, donor.classes, classes, labels, tell)
        except FedquiltError as error:
            raise type(error)(f"donor {donor.name!r}: {error}") from None
    table = {}
    for part in parts:
        stages = blocks.export(part)
        graphs = [graph for stage in stages for graph in stage]
        names = _names(part.id, [len(stage) for stage in stages])
        flat = [name for stage in names for name in stage]
        files |= {f"{name}.onnx": graph.graph for name, graph in zip(flat, graphs, strict=True)}
        data = {f"{name}.data": graph.data for name, graph in zip(flat, graphs, strict=True) if graph.data is not None}
        files |= data
        table[part.id] = {
            "donor": part.donor,
            "index": part.index,
            "kind": part.kind,
            "stages": [[f"{name}.onnx" for name in stage] for stage in names],
            "data": list(data),
            "in_shape": list(part.in_shape),
            "out_shape": list(part.out_shape),
            "flops": part.flops,
            "weight_bytes": sum(graph.weight_bytes for graph in graphs),
            "resident_bytes": max(graph.weight_bytes for graph in graphs),
            "activation_bytes": max(graph.activation_bytes for graph in graphs),
        }
    return facts, table


def _names(block: str, counts: Sequence[int]) -> list[list[str]]:
    """Names of each stage's graphs: "<block>" alone, else "<block>.<stage>", and ".<tile>" of several."""
    if list(counts) == [1]:
        return [[block]]
    return [
        [f"{block}.{stage}"] if count == 1 else [f"{block}.{stage}.{tile}" for tile in range(count)]
        for stage, count in enumerate(counts)
    ]
