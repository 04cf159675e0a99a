"""Preparation of a job's bundle: donor blocks in ONNX, or the first weights of a network.

All steps that need torch happen here, once. Preparing the same job twice gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.console import progress, units
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import NOT_NETWORK, JobSettings
from fedquilt.coordinator.views import scores
from fedquilt.core import Bundle, DataError, FedquiltError, JobError, ModelError, Name
from fedquilt.costs import peak_memory
from fedquilt.data import compatibility, examples, inputs, readers, reading_settings
from fedquilt.data.inputs import ImageInput
from fedquilt.data.spec import DataSpec
from fedquilt.formats import job_bundle, toml
from fedquilt.models.networks import numpy_init, registry
from fedquilt.models.partial import masks
from fedquilt.tools.artefacts import dry_run, frozen_part

if TYPE_CHECKING:
    from torch import nn

Groups = tuple[tuple[int, ...], ...]  # classes of each label
Align = str | Groups | dict[str, tuple[int | str, ...]]

# ImageNet-1K has no deer (hartebeest, impala and gazelle stand in) and one horse (sorrel)
_IMAGENET_CIFAR10: Groups = (
    (404, 895),  # airplane
    (436, 468, 511, 609, 627, 656, 661, 751, 817),  # automobile
    (*range(7, 25), *range(80, 101), *range(127, 147)),  # bird
    tuple(range(281, 286)),  # cat
    tuple(range(351, 354)),  # deer
    tuple(range(151, 269)),  # dog
    tuple(range(30, 33)),  # frog
    (339,),  # horse
    (403, 484, 510, 554, 625, 628, 724, 780, 814, 871, 914),  # ship
    (555, 569, 675, 717, 864, 867),  # truck
)

ALIGNMENTS: Mapping[str, Callable[[int], Groups]] = {
    "identity": lambda classes: tuple((i,) for i in range(classes)),  # class i means label i
    "imagenet-cifar10": lambda classes: _IMAGENET_CIFAR10,
}


def align_labels(
    align: Align,
    names: str | None,
    classes: int,
    labels: Sequence[str],
    print_line: Callable[[str], None] = lambda line: None,
) -> list[list[int]]:
    """Return for each label the numbers of the classes that have its meaning.

    `names` is a file with one class per line and commas between synonyms, or "imagenet" for the list of torchvision.
    With the alignment "names" a class belongs to a label if one of its names is the label or ends in the label as
    separate words ("tiger cat" is a cat, "catamaran" is not), in singular or plural. `print_line` gets the classes.
    """
    if align == "names":
        groups = _match_classes_by_name(labels, _read_class_names(names, classes))
    elif isinstance(align, str):
        if align not in ALIGNMENTS:
            names_text = ", ".join([*ALIGNMENTS, "names"])
            raise JobError(f"align {align!r} is unknown: use {names_text}, or a table")
        groups = [list(group) for group in ALIGNMENTS[align](classes)]
    elif isinstance(align, Mapping):
        groups = _match_classes_by_table(align, labels, names, classes)
    else:
        groups = [list(group) for group in align]
    if len(groups) != len(labels):
        raise JobError(f"align has {len(groups)} entries for {len(labels)} labels: write one for each label of the job")
    numbers = [number for group in groups for number in group]
    invalid = [number for number in numbers if not 0 <= number < classes or numbers.count(number) > 1]
    if invalid:
        exists = 0 <= invalid[0] < classes
        label_text = " and ".join(repr(name) for name, group in zip(labels, groups, strict=True) if invalid[0] in group)
        problem = f" twice, for {label_text}" if exists else f", but the donor has {classes} classes"
        raise ModelError(f"align has class {invalid[0]}{problem}: write `align` as a table of classes for each label")
    if align == "names":
        class_names = _read_class_names(names, classes)
        for label, group in zip(labels, groups, strict=True):
            print_line(f"{label}: {'; '.join(f'{number} {class_names[number]}' for number in group)}")
    return groups


def _read_class_names(source: str | None, classes: int) -> list[str]:
    if source is None:
        raise JobError("align needs class names: set `classes` to a file with the names, or to 'imagenet'")
    if source == "imagenet":
        from fedquilt.host.torchvision_compat import import_torchvision

        names = list(import_torchvision().models.ResNet18_Weights.DEFAULT.meta["categories"])
    else:
        try:
            names = Path(source).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"classes = {source!r} cannot be read ({error}): name a text file, or 'imagenet'") from None
    while names and not names[-1].strip():
        names.pop()
    if len(names) != classes:
        raise JobError(
            f"classes = {source!r} has {len(names)} names for {classes} classes of the donor: write one line for each "
            "class, in order"
        )
    return [name.strip() for name in names]


def _match_classes_by_name(labels: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    names_by_class = [[_normalise_words(synonym) for synonym in name.split(",")] for name in names]

    def is_match(label: str, synonyms: Sequence[Sequence[str]]) -> bool:
        label_words = _normalise_words(label)
        return any(label_words and list(synonym[-len(label_words) :]) == label_words for synonym in synonyms)

    groups = [
        [number for number, class_synonyms in enumerate(names_by_class) if is_match(label, class_synonyms)]
        for label in labels
    ]
    unmatched = [repr(label) for label, group in zip(labels, groups, strict=True) if not group]
    if unmatched:
        raise JobError(
            f"align = 'names': no class has the name {', '.join(unmatched)}: write `align` as a table "
            "{ label = [numbers or names of classes] }, with [] for none"
        )
    return groups


def _match_classes_by_table(
    table: Mapping[str, Sequence[int | str]], labels: Sequence[str], names: str | None, classes: int
) -> list[list[int]]:
    missing = [repr(label) for label in labels if label not in table]
    unknown = [repr(label) for label in table if label not in labels]
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)}"] * bool(unknown)
        raise JobError(f"align {' and '.join(parts)}: write one key for each label of the job: {', '.join(labels)}")
    by_name: dict[str, set[int]] = {}
    if any(isinstance(item, str) for group in table.values() for item in group):
        for number, name in enumerate(_read_class_names(names, classes)):
            for synonym in name.split(","):
                by_name.setdefault(" ".join(_normalise_words(synonym)), set()).add(number)

    def find_class_number(label: str, key: int | str) -> int:
        if isinstance(key, int):
            return key
        numbers = sorted(by_name.get(" ".join(_normalise_words(key)), ()))
        if len(numbers) != 1:
            problem = f"is the name of classes {' and '.join(map(str, numbers))}" if numbers else "names no class"
            raise JobError(f"align of {label!r}: {key!r} {problem}: write the number of the class")
        return numbers[0]

    return [[find_class_number(label, key) for key in table[label]] for label in labels]


def _normalise_words(text: str) -> list[str]:
    # lower case, with the last word in singular
    words = re.findall(r"[^\W_]+", text.lower())
    return [*words[:-1], re.sub(r"(?<=[^s])s\Z", "", words[-1])] if words else []


class DonorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    network: dict[str, Any]  # table of `fedquilt.models.networks.registry`
    weights: str | None = None  # a file or torchvision's name ("DEFAULT"), or None for random weights
    seed: int = 0
    cuts: tuple[str, ...] = ()  # modules after which to cut, or () for automatic cuts
    align: Align | None = None  # see `align_labels`
    classes: str | None = None  # file of class names for `align`, or "imagenet"


def prepare_bundle(job: Mapping[str, Any], out: Path, print_line: Callable[[str], None] = lambda line: None) -> Bundle:
    """Write the bundle of a job (the table of a job file) into the folder `out`.

    From `[model]`: the files "model" and "masks" (`models.partial.masks`), or metadata "untraced" with the reason why
    the network cannot be masked. Metadata "network", "flops" and "example_bytes" of one example, "register"
    (`fedquilt.formats.tensor_register`), "layers", and "pretrained". For plug-in networks also "plugins"
    (`fedquilt.plugins.required_modules`) and "outputs". With `weights_classes`, the number of classes of the weights,
    the last layer is replaced.
    From `[model.tier]`: the same files as "<tier>/model", and the same metadata by tier as "tiers".
    From `[public]`: the file "public" with the inputs "x" of its examples, as they are stored.
    From `[schedule]`: metadata "schedule" (`fedquilt.tools.artefacts.frozen_part`).
    From `[input]`, `labels` and `[[donors]]`: files "<block>.onnx" and "<block>.data", and metadata "input", "labels",
    "donors" and "blocks" (read by `fedquilt.models.stitching.stitched_network.load_donor_pool`). A block's id is
    "<donor>.<index>". From `[data]`: metadata "reading" (`fedquilt.data.reading_settings`).
    """
    meta: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    network = bool(job.get("model"))
    start_part = progress.count_parts(
        network + (network and bool(job.get("schedule"))) + len(job.get("donors") or ()) + 1
    )
    if not job.get("model") and not job.get("donors"):
        raise JobError("the job has neither [model] nor [[donors]] to prepare: add one of them")
    network_input = job["model"].get("input") if job.get("model") else None
    input_table = job.get("input") or (
        network_input if isinstance(network_input, Mapping) and network_input.get("standardise") else None
    )
    input_spec = inputs.parse_input_table(input_table) if input_table else None
    if isinstance(input_spec, inputs.ValueInput) and input_spec.standardise:
        if not job.get("data"):
            raise JobError("[input] standardise = true needs [data]: add [data] with a sample, or set mean and std")
        sample = examples.load_split(DataSpec.parse(job["data"]))
        input_spec = msgspec.structs.replace(inputs.measure_scales(sample.x), standardise=True)
    for line in reading_settings.format_agent_settings(job.get("data") or {}):
        print_line(f"for [data] of each device's agent.toml:\n  {line}")
    if job.get("data"):
        meta["reading"] = reading_settings.reading_settings(DataSpec.parse(job["data"]))
    if job.get("model"):
        start_part("the network")
        metadata, parts = _prepare_model(job["model"], input_spec)
        meta |= metadata
        files |= parts
        print_line(f"model {metadata['network']['name']}: {units.format_bytes(len(files['model']))}")
        for tier, table in settings.tier_models(job["model"]).items():
            tier_metadata, parts = _prepare_model(table, input_spec)
            meta.setdefault("tiers", {})[tier] = tier_metadata
            meta["plugins"] = {**meta.get("plugins", {}), **tier_metadata.get("plugins", {})}
            files |= {f"{tier}/{name}": payload for name, payload in parts.items()}
            size = units.format_bytes(len(parts["model"]))
            print_line(f"model of devices from {tier}, {tier_metadata['network']['name']}: {size}")
        if job.get("schedule"):
            start_part("the part to train")
            model = tensors.decode_tensors(files["model"])
            meta["schedule"] = frozen_part.make_schedule(job["schedule"], metadata["network"], model, print_line)
    if job.get("public"):
        public = examples.load_split(DataSpec.parse(job["public"], "[public]"))
        files["public"] = tensors.encode_tensors({"x": public.x})
        print_line(f"public examples: {len(public)}, {units.format_bytes(len(files['public']))}")
    if job.get("donors"):
        meta |= _prepare_donors(job, input_spec, files, print_line, start_part)
    start_part("the files")
    return job_bundle.write_bundle(out, meta, files)


def prepare_and_check(job: JobSettings, out: Path, print_line: Callable[[str], None] = lambda line: None) -> Bundle:
    """Write the bundle of a job, and raise a FedquiltError if its parameters, network and data do not fit.

    A dry run carries out a few rounds of the method on synthetic examples (`dry_run`, `dry_run_donors`).
    """
    bundle = prepare_bundle(msgspec.to_builtins(job), out, print_line)
    try:
        _check_bundle(job, bundle, out, print_line)
    except BaseException:
        (out / "bundle.json").unlink(missing_ok=True)  # without inputs.json, the next command would use the bundle
        raise
    return bundle


def _check_bundle(job: JobSettings, bundle: Bundle, out: Path, print_line: Callable[[str], None]) -> None:
    state = settings.create_initial_state(job, bundle)
    if isinstance(plan := getattr(state, "plan", None), masks.MaskPlan) and (
        reason := masks.describe_unmaskable_layers(plan)
    ):
        print_line(f"{job.method}: {reason}")
    if (frozen := methods.load(job.method).traits.frozen_weights) and not bundle.meta.get("pretrained", True):
        print_line(
            f"{job.method} keeps {frozen} of the first weights, which are random: set [model] weights to a file of "
            "pre-trained weights"
        )
    sample = None
    if job.data:
        spec = DataSpec.parse(job.data)
        if _is_here(spec):  # otherwise only devices have the data
            reader = compatibility.open_compatible_data(bundle.meta, spec)
            sample = reader.take(np.arange(min(len(reader.y), dry_run.EXAMPLES))) if job.params.get("augment") else None
            for warning in compatibility.data_warnings(bundle.meta, reader, spec):
                print_line(f"warning: {warning}")
            if spec.path:
                readers.require_supported_images(spec)
    if job.test and _is_here(spec := DataSpec.parse(scores.make_test_table(job), "[test]")):
        with scores.name_test_table():
            examples.open_split(spec)
    if "onnx" in methods.load(job.method).engines:
        from fedquilt.tools.artefacts import dry_run_donors  # needs the stitching packages

        dry_run_donors.dry_run_job(job, bundle, out)
    else:
        dry_run.dry_run_job(job, bundle, out, sample)


def _is_here(spec: DataSpec) -> bool:
    return spec.is_synthetic or all(Path(source.path).exists() for source in spec.sources or (spec,))


def _prepare_model(
    table: Mapping[str, Any], input_spec: ImageInput | inputs.ValueInput | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    network = {key: value for key, value in table.items() if key not in NOT_NETWORK}
    if input_spec is not None:
        network["input"] = msgspec.to_builtins(input_spec)
    if numpy_init.can_initialise(network, table.get("weights")) and "weights_classes" not in table:
        return _prepare_model_with_numpy(network, int(table.get("seed", 0)))
    registry.required_plugins(network)  # refuses an unknown name, also where torch is missing
    import torch

    from fedquilt.models.networks import traces
    from fedquilt.models.partial import dependency_trace

    if "weights_classes" in table:
        model = frozen_part.load_with_new_head(
            network, str(table.get("weights")), int(table["weights_classes"]), int(table.get("seed", 0))
        )
    else:
        model = registry.load_network(network, table.get("weights"), seed=int(table.get("seed", 0)))
    _require_trainable(model, str(network["name"]))
    flops = registry.measure_cost(model, registry.input_shape(network)).flops
    state = {name: value.detach().numpy() for name, value in traces.state_without_aliases(model).items()}
    parts = {"model": tensors.encode_tensors(state)}
    metadata: dict[str, Any] = {"network": network, "flops": flops}
    try:
        parts["masks"] = tensors.encode_tensors({"json": masks.plan_to_array(dependency_trace.trace_mask_plan(model))})
    except ModelError as error:  # methods that need masks refuse the network with this reason
        metadata["untraced"] = str(error)
    # must come last, as the measurement changes batch norm
    properties, _ = peak_memory.measure_training(model, torch.zeros(2, *registry.input_shape(network)))
    register = traces.trace_register(model, registry.input_shape(network))
    is_coupled = register.is_coupled(state)
    example_bytes = (
        peak_memory.least_bytes_per_example(properties) if is_coupled else peak_memory.bytes_per_example(properties)
    )
    metadata |= {"example_bytes": example_bytes, "register": register}
    metadata["layers"] = traces.trace_layer_costs(model, registry.input_shape(network))
    metadata |= {"pretrained": table.get("weights") is not None}
    if registry.list_plugin_networks(network):
        metadata |= {"plugins": registry.required_plugins(network), "outputs": _count_validated_outputs(model, network)}
    return metadata, parts


def _require_trainable(model: nn.Module, name: str) -> None:
    # engines train all parameters as float32 and ignore requires_grad, so other networks would be trained wrongly
    parameters = dict(model.named_parameters())
    for path, value in parameters.items():
        if (dtype := str(value.dtype).removeprefix("torch.")) != "float32":
            raise ModelError(
                f"network {name!r}: parameter {path!r} is {dtype}, not float32: return network.float(). For 16-bit "
                "arithmetic on GPUs set [params] mixed = true"
            )
    frozen_names = [path for path, value in parameters.items() if not value.requires_grad]
    if not frozen_names:
        return
    description = (
        "all parameters"
        if len(frozen_names) == len(parameters)
        else f"{len(frozen_names)} of {len(parameters)} parameters"
    )
    raise ModelError(
        f"network {name!r}: {description} are frozen (requires_grad = False), such as {frozen_names[0]!r}, but all "
        "parameters are trained: make constants buffers (register_buffer), or use a method that trains a part of the "
        "network, such as ft_part"
    )


def _prepare_model_with_numpy(network: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    model, plan = (
        numpy_init.initial_mlp_weights(network, seed),
        masks.plan_to_array(masks.plan_from_layers(numpy_init.layer_sizes(network))),
    )
    metadata = {
        "network": network,
        "flops": numpy_init.forward_flops(network),
        "example_bytes": peak_memory.bytes_per_example(numpy_init.mlp_training_memory(network)),
        "register": numpy_init.mlp_register(network),
        "layers": numpy_init.mlp_costs_by_layer(network),
        "pretrained": False,
    }
    return metadata, {"model": tensors.encode_tensors(model), "masks": tensors.encode_tensors({"json": plan})}


def _count_validated_outputs(model: Any, network: Mapping[str, Any]) -> int:
    import torch

    shape, name = registry.input_shape(network), network["name"]
    with torch.no_grad():
        scores = model.eval()(torch.zeros(2, *shape))
    shape_text = tuple(getattr(scores, "shape", ())) or type(scores).__name__
    if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or len(scores) != 2:
        raise ModelError(
            f"network {name!r} returns {shape_text} for two examples, not scores of shape (2, classes): correct the "
            "network's forward()"
        )
    if network.get("classes", scores.shape[1]) != scores.shape[1]:
        raise ModelError(
            f"network {name!r} returns {scores.shape[1]} scores for an example, but its [model] table has classes = "
            f"{network['classes']}: correct the network's last layer, or the table"
        )
    return int(scores.shape[1])


def _prepare_donors(
    job: Mapping[str, Any],
    input_spec: ImageInput | inputs.ValueInput | None,
    files: dict[str, bytes],
    print_line: Callable[[str], None],
    start_part: Callable[[str], None],
) -> dict[str, Any]:
    labels = [str(label) for label in job.get("labels") or ()]
    if input_spec is None or not labels:
        raise JobError(
            "the job has [[donors]] but no [input] or labels: add labels = [...] and [input] (channels, size, mean and "
            "std of images, or mean and std, or standardise, of time series)"
        )
    donors = [toml.convert_table(table, DonorSettings, f"[[donors]] {i + 1}") for i, table in enumerate(job["donors"])]
    duplicates = sorted(
        {donor.name for donor in donors if sum(other_donor.name == donor.name for other_donor in donors) > 1}
    )
    if duplicates:
        raise JobError(f"two donors are called {duplicates[0]!r}: give each its own name")
    meta: dict[str, Any] = {"input": msgspec.to_builtins(input_spec), "labels": labels, "donors": {}, "blocks": {}}
    for donor in donors:
        start_part(f"donor {donor.name}")
        prepared = _prepare_donor(donor, input_spec, labels, print_line)
        meta["donors"][donor.name] = prepared.metadata
        meta["blocks"] |= prepared.blocks
        files |= prepared.files
        size = sum(block["weight_bytes"] for block in prepared.blocks.values())
        print_line(f"donor {donor.name}: {len(prepared.blocks)} blocks, {units.format_bytes(size)}")
    shapes = {name: meta["blocks"][donor_meta["blocks"][0]]["in_shape"] for name, donor_meta in meta["donors"].items()}
    first_name, *others = shapes
    if other := [name for name in others if shapes[name] != shapes[first_name]]:
        raise JobError(
            f"donor {other[0]!r} reads examples of shape {tuple(shapes[other[0]])}, but {first_name!r} of "
            f"{tuple(shapes[first_name])}: give their networks the same steps and channels"
        )
    return meta


class _PreparedDonor(NamedTuple):
    metadata: dict[str, Any]  # entry of "donors" in the bundle's metadata
    blocks: dict[str, Any]  # entries of "blocks", by block id
    files: dict[str, bytes]


def _prepare_donor(
    donor: DonorSettings,
    input_spec: ImageInput | inputs.ValueInput,
    labels: Sequence[str],
    print_line: Callable[[str], None],
) -> _PreparedDonor:
    from fedquilt.models.stitching.onnx import blocks  # torch and onnx

    if isinstance(input_spec, ImageInput):
        shape: tuple[int, ...] = (input_spec.channels, input_spec.size, input_spec.size)
    else:
        shape = registry.input_shape(donor.network)
    model = registry.load_network(donor.network, donor.weights, seed=donor.seed)
    architecture = str(donor.network.get("name", "")).removeprefix("torchvision/")
    parts = blocks.split_donor(model, donor.name, shape, cuts=donor.cuts, architecture=architecture)
    classes = parts[-1].out_shape[0]
    metadata: dict[str, Any] = {"blocks": [part.id for part in parts], "classes": classes}
    if donor.align is not None:
        print_donor_line: Callable[[str], None] = lambda line: print_line(f"donor {donor.name}: {line}")  # noqa: E731
        try:
            metadata["align"] = align_labels(donor.align, donor.classes, classes, labels, print_donor_line)
        except FedquiltError as error:
            raise type(error)(f"donor {donor.name!r}: {error}") from None
    table: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for part in parts:
        stages = blocks.export_block(part)
        graphs = [graph for stage in stages for graph in stage]
        names = _make_graph_names(part.id, [len(stage) for stage in stages])
        flat_names = [name for stage in names for name in stage]
        files |= {f"{name}.onnx": graph.graph for name, graph in zip(flat_names, graphs, strict=True)}
        data = {
            f"{name}.data": graph.data for name, graph in zip(flat_names, graphs, strict=True) if graph.data is not None
        }
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
    return _PreparedDonor(metadata, table, files)


def _make_graph_names(block: str, counts: Sequence[int]) -> list[list[str]]:
    # "<block>" if alone, else "<block>.<stage>", and "<block>.<stage>.<tile>" with several tiles
    if list(counts) == [1]:
        return [[block]]
    return [
        [f"{block}.{stage}"] if count == 1 else [f"{block}.{stage}.{tile}" for tile in range(count)]
        for stage, count in enumerate(counts)
    ]
