"""Quantisation of donor blocks to 8 bits for scoring, where no choice of the search changes.

ONNX Runtime quantizes weights per channel, and activations by their ranges on some images, fed both by the block's
own donor and by junctions after the first blocks of the donors: ranges of the donor alone cut off what a junction
produces, such as negative values after a ReLU. A block must pass two tests on other images:

- the CKA of its output with the output of every block is within INT8_DELTA of the float32 block's, and
- as a candidate after the first one and two blocks of each donor, its score is within INT8_DELTA, and the best K blocks
  are the same as with float32.

Paths, reference outputs, junctions, heads and the final network are always float32, and so are tiles of a large layer.
Graphs contain integer operators (ONNX Runtime's QOperator format), so that integer execution does not depend on an
engine's optimizations. Weights have 7 bits: with 8, processors without an integer dot product saturate, and scores
would differ there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from fedquilt.arrays import tensors
from fedquilt.core import Bundle, ClientContext, DataError, DeviceView, Examples, JobError, Tensors
from fedquilt.data.examples import load_split
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines import execution_providers
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.formats import job_bundle, toml
from fedquilt.host.disk import disk_errors
from fedquilt.methods.fedstitch import METHOD
from fedquilt.models.stitching import stitched_network, vote
from fedquilt.models.stitching.algebra import cka, least_squares
from fedquilt.models.stitching.device import block_runner, scoring
from fedquilt.models.stitching.device.activations import ActivationSource, ActivationStack, SourceSlice
from fedquilt.models.stitching.device.block_runner import BlockRunner
from fedquilt.models.stitching.onnx import export, memory
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import (
    ScoredPath,
    SearchParams,
    SearchSettings,
    SearchState,
    resolve_settings,
)
from fedquilt.models.stitching.stitched_network import Block, DonorPool
from fedquilt.tools.simulation import DeviceData, local_backend


class _RangeReader(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str, parts: Iterator[np.ndarray]) -> None:
        self._parts = ({name: part} for part in parts)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._parts, None)


def quantize_block(block: Block, paths: Mapping[str, Path], calibration_inputs: Iterator[np.ndarray]) -> bytes | None:
    """Return a block's 8-bit graph, with activation ranges from `calibration_inputs`, or None.

    The result is None for a first block, which is never scored, and for a block without weights or of several graphs.
    It is None too if the 8-bit graph needs more memory.
    """
    if block.kind == "start" or sum(len(stage) for stage in block.stages) > 1:
        return None
    model = export.load_graph(block.id, paths[block.stages[0][0]])
    add_pre_process_metadata(model)  # the exporter has done the preprocessing
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as folder:
        path = Path(folder) / "graph.onnx"
        quantization.quantize_static(
            model,
            path,
            _RangeReader(model.graph.input[0].name, calibration_inputs),
            quant_format=quantization.QuantFormat.QOperator,
            per_channel=True,
            reduce_range=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        quantized = onnx.load(path)
    if not any(tensor.data_type == TensorProto.INT8 for tensor in quantized.graph.initializer):
        return None
    weight_bytes = sum(numpy_helper.to_array(tensor).nbytes for tensor in quantized.graph.initializer)
    activation_bytes = _measure_activation_bytes(quantized, block.in_shape)
    if weight_bytes + activation_bytes > block.resident_bytes + block.activation_bytes:
        return None
    del quantized.metadata_props[:]
    properties = {"activation_bytes": str(activation_bytes), "weight_bytes": str(weight_bytes)}
    helper.set_model_props(quantized, properties)
    quantized.producer_name, quantized.producer_version = "fedquilt", ""
    return bytes(quantized.SerializeToString(deterministic=True))


def _measure_activation_bytes(model: onnx.ModelProto, shape: Sequence[int]) -> int:
    # float32 sizes: shapes of quantized operators cannot be inferred
    values = [name for node in model.graph.node for name in node.output if name]
    model_with_outputs = onnx.ModelProto()
    model_with_outputs.CopyFrom(model)
    del model_with_outputs.graph.output[:]
    model_with_outputs.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = execution_providers.create_session(model_with_outputs.SerializeToString(), options)
    example = {session.get_inputs()[0].name: np.zeros((1, *shape), np.float32)}
    outputs = session.run(None, example) + list(example.values())
    sizes = {name: value.nbytes for name, value in zip((*values, *example), outputs, strict=True)}
    peak_bytes = memory.peak_buffer_bytes(model.graph, sizes)
    assert peak_bytes is not None
    return peak_bytes


MAX_IMAGES = 64  # largest number of images for each of three uses: value ranges, comparison, junctions
INT8_DELTA = 0.01  # smallest change of a CKA or score that excludes a block from int8
PATH_LENGTHS = (1, 2)  # numbers of blocks of a donor after which candidates are scored
ENGINE_BYTES = 2 << 30
UNUSED_KEYS = (  # keys of [data] that are not in [int8]
    *("limit", "per_class", "held", "groups", "partition"),
    *("share", "shares", "alpha", "min_size", "classes", "domains"),
)


@dataclass(frozen=True)
class QuantizedBlock:
    graph: bytes
    max_cka_change: float  # largest change of its output's CKA with any block's
    quantized_s: float  # duration of the 8-bit block
    plain_s: float


@dataclass(frozen=True)
class QuantizationResult:
    """Blocks of a donor by result of the tests. The first block is left out, because it is never scored."""

    accepted: Mapping[str, QuantizedBlock]
    deviating: tuple[str, ...] = ()  # a CKA or a score changed by INT8_DELTA or more
    choice_changing: tuple[str, ...] = ()  # entered or left the best K
    float_only: tuple[str, ...] = ()  # tiled, not quantizable, or larger than in float32

    def __str__(self) -> str:
        block_count = len(self.accepted) + len(self.deviating) + len(self.choice_changing) + len(self.float_only)
        text = f"{len(self.accepted)} of {block_count} candidates in 8 bits"
        for count, reason in (
            (self.deviating, "too far off"),
            (self.choice_changing, "changed a choice"),
            (self.float_only, "float32 only"),
        ):
            text += f", {len(count)} {reason}" if count else ""
        if not self.accepted:
            return text
        delta = max(block.max_cka_change for block in self.accepted.values())
        quantized_s = sum(block.quantized_s for block in self.accepted.values())
        plain_s = sum(block.plain_s for block in self.accepted.values())
        return f"{text}; CKA changes by {delta:.4f} at most; {quantized_s / plain_s:.2f} of the float32 time here"


@dataclass(frozen=True)
class QuantizationTrial:
    """Scoring parameters, and three sets of `images` images: for ranges, comparison and junctions."""

    params: SearchSettings
    examples: Examples
    images: int

    def quantize_blocks(
        self, out: Path, meta: Mapping[str, Any], files: Mapping[str, bytes], print_line: Callable[[str], None]
    ) -> dict[str, bytes]:
        """Return the 8-bit graph of each block that passes all tests."""
        with disk_errors(f"write the bundle {out}"):
            out.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.TemporaryDirectory(prefix="int8-", dir=out)
        with temporary as name:
            folder = Path(name)
            device = _ScoringDevice(folder, self.examples, self.images)
            plain_bundle = job_bundle.write_bundle(folder, meta, files)
            quantized = _quantize_suitable_blocks(device, plain_bundle, self.params)
            close = {name: block for name, block in quantized.items() if block.max_cka_change < INT8_DELTA}
            table = meta["blocks"] | {name: {**meta["blocks"][name], "int8": make_int8_name(name)} for name in close}
            graphs = {make_int8_name(name): block.graph for name, block in close.items()}
            int8_bundle = job_bundle.write_bundle(folder, {**meta, "blocks": table}, {**files, **graphs})
            deviating, changing = find_rejected(
                list(_score_original_and_quantized(device, plain_bundle, int8_bundle, self.params)),
                close,
                self.params.k,
            )
        accepted = {name: block for name, block in close.items() if name not in deviating | changing}
        for donor, donor_meta in meta["donors"].items():
            donor_blocks = donor_meta["blocks"][1:]
            verdict = QuantizationResult(
                {name: accepted[name] for name in donor_blocks if name in accepted},
                tuple(name for name in donor_blocks if name in deviating or (name in quantized and name not in close)),
                tuple(name for name in donor_blocks if name in changing),
                tuple(name for name in donor_blocks if name not in quantized),
            )
            print_line(f"donor {donor}: {verdict}")
        return {name: block.graph for name, block in accepted.items()}


def make_trial(job: Mapping[str, Any]) -> QuantizationTrial:
    """Return the trial for a job's [int8] table, or raise JobError or DataError if it is unusable."""
    if not job.get("donors"):
        raise JobError("[int8] quantizes the blocks of [[donors]], but the job has no donors: remove [int8]")
    params = resolve_settings(toml.convert_table(job.get("params") or {}, SearchParams, "[params]"))
    for name, value in (("score_at", "input"), ("expansions", 0)):
        if getattr(params, name) == value:
            raise JobError(f"[int8] has no effect, as [params] {name} = {value!r} scores no outputs: remove [int8]")
    if unused := [key for key in UNUSED_KEYS if key in job["int8"]]:
        raise JobError(f"[int8] {', '.join(unused)} has no effect, as images are drawn from the whole split: remove it")
    spec = DataSpec.parse(job["int8"], "[int8]")
    # a third for the value ranges, a third for the comparison, and a third for the junctions
    images_found = load_split(msgspec.structs.replace(spec, limit=3 * MAX_IMAGES))
    images = len(images_found) // 3
    if images < cka.MIN_IMAGES:
        raise DataError(f"{spec.source_name} has {len(images_found)} images: [int8] needs {3 * cka.MIN_IMAGES}")
    permutation = tensors.seeded_rng("int8", spec.seed).permutation(3 * images)
    return QuantizationTrial(params, Examples(images_found.x[permutation], images_found.y[permutation]), images)


def make_int8_name(block: str) -> str:
    return f"{block}.int8.onnx"


class _ScoringDevice:
    def __init__(self, folder: Path, examples: Examples, images: int) -> None:
        self.folder, self.examples, self.images = folder, examples, images
        self.engine = OnnxEngine(ENGINE_BYTES)

    def blob_paths(self, bundle: Bundle) -> dict[str, Path]:
        return {name: self.folder / "blobs" / ref.sha256 for name, ref in bundle.files.items()}

    def make_device(self) -> DeviceData:
        # the last third of the images is for the ranges
        examples = Examples(self.examples.x[: 2 * self.images], self.examples.y[: 2 * self.images])
        return DeviceData("int8", examples, examples)

    def make_block_runner(self, paths: Mapping[str, Path], pool: DonorPool) -> BlockRunner:
        device, cache = self.make_device(), self.folder / "cache"
        context = ClientContext(
            device.device,
            ENGINE_BYTES,
            self.engine,
            tensors.seeded_rng("int8"),
            device.train,
            device.held_out,
            {},
            lambda name: {},
            paths.__getitem__,
            cache,
        )
        return BlockRunner(context, pool.blocks.values(), 1.0)


def _quantize_suitable_blocks(
    device: _ScoringDevice, bundle: Bundle, params: SearchSettings
) -> dict[str, QuantizedBlock]:
    pool, paths, count = stitched_network.load_donor_pool(bundle.meta), device.blob_paths(bundle), device.images
    runner = device.make_block_runner(paths, pool)
    graphs: dict[str, bytes] = {}
    seconds: dict[str, tuple[float, float]] = {}
    grams: dict[str, np.ndarray] = {}
    int8_grams: dict[str, np.ndarray] = {}
    # `count` images for the comparison, then `count` for the ranges
    prepared = block_runner.PreparedExamples(device.examples.x[count:], pool.input)
    starts = _run_first_blocks(runner, pool, SourceSlice(prepared, count, 2 * count))
    for donor in pool.donors.values():
        maps: ActivationSource = prepared
        for block in (pool.blocks[name] for name in donor.blocks):
            outputs, plain_s = _time_block(runner, block, maps, count)
            grams[block.id] = scoring.stack_gram(outputs, count)
            graph = quantize_block(
                block,
                paths,
                _yield_calibration_inputs(SourceSlice(maps, count, 2 * count), starts, block, params),
            )
            if graph is not None:
                path = device.folder / make_int8_name(block.id)
                path.write_bytes(graph)
                paths[path.name] = path
                int8_outputs, int8_s = _time_block(runner, replace(block, int8=path.name).scoring_variant, maps, count)
                graphs[block.id], seconds[block.id] = graph, (int8_s, plain_s)
                int8_grams[block.id] = scoring.stack_gram(int8_outputs, count)
            maps = runner.run_block(block, maps, count, 2 * count, outputs)

    def compute_largest_change(name: str) -> float:
        same_shape_grams = [gram for gram in grams.values() if gram.shape == grams[name].shape]
        return max(
            abs(
                cka.cka(int8_grams[name], gram, params.estimator).value
                - cka.cka(grams[name], gram, params.estimator).value
            )
            for gram in same_shape_grams
        )

    return {name: QuantizedBlock(graph, compute_largest_change(name), *seconds[name]) for name, graph in graphs.items()}


def _time_block(runner: BlockRunner, block: Block, maps: ActivationSource, count: int) -> tuple[ActivationStack, float]:
    # the first call loads the graphs
    runner.run_block(block, SourceSlice(maps, 0, 1))
    start = time.perf_counter()
    outputs = runner.run_block(block, maps, 0, count)
    return outputs, time.perf_counter() - start


def _run_first_blocks(
    runner: BlockRunner, pool: DonorPool, prepared: ActivationSource
) -> list[tuple[Block, ActivationSource]]:
    outputs: list[tuple[Block, ActivationSource]] = []
    for donor in pool.donors.values():
        maps = prepared
        for block in (pool.blocks[name] for name in donor.blocks[: max(PATH_LENGTHS)]):
            maps = runner.run_block(block, maps)
            outputs.append((block, maps))
    return outputs


def _yield_calibration_inputs(
    own_inputs: ActivationSource,
    starts: Iterable[tuple[Block, ActivationSource]],
    block: Block,
    params: SearchSettings,
) -> Iterator[np.ndarray]:
    # from the block's own donor, and from junctions fitted to that donor
    yield from (part for _, part in block_runner.iterate_pieces(own_inputs))
    for previous, maps in starts:
        if not stitched_network.can_connect(previous, block, params.max_upsampling) or stitched_network.is_continuation(
            previous, block
        ):
            continue
        positions = block_runner.draw_positions(own_inputs.shape[0], block.in_shape, params.positions)
        x = block_runner.sample_vectors(block_runner.resize_maps_lazily(maps, *block.in_shape[1:]), positions)
        weights, bias = least_squares.RidgeFit(x, params.ridge, params.bias).solve_weights(
            block_runner.sample_vectors(own_inputs, positions)
        )
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
        yield from (
            part for _, part in block_runner.iterate_pieces(block_runner.apply_junction_lazily(maps, junction, block))
        )


class QuantizationChoice(NamedTuple):
    pool: tuple[str, ...]
    plain_scores: np.ndarray
    quantized_scores: np.ndarray


def _score_original_and_quantized(
    device: _ScoringDevice, plain_bundle: Bundle, int8_bundle: Bundle, params: SearchSettings
) -> Iterator[QuantizationChoice]:
    plain_state, int8_state = (METHOD.init(bundle, params, 0) for bundle in (plain_bundle, int8_bundle))
    scoring_params = replace(plain_state.params, score_at="output", early=0, completion=False)
    device_data = device.make_device()
    local: Tensors = {}

    def score_pool(state: SearchState, network: ScoredPath, pool: tuple[str, ...]) -> np.ndarray:
        nonlocal local
        task_spec = METHOD.send(
            replace(state, params=scoring_params, current=network, pool=pool), DeviceView("int8", None, ())
        )
        assert task_spec is not None
        task, context = local_backend.make_task_and_context(
            METHOD,
            task_spec,
            device_data,
            device.folder / "sent",
            engine=device.engine,
            local=local,
            cache=device.folder / "cache",
            path_of_blob=lambda ref: device.folder / "blobs" / ref.sha256,
        )
        update = METHOD.work(task, context)
        local = update.private_state
        return update.bundles["scores"]["score"]

    for start in steps.starting_networks(plain_state.stock):
        donor_blocks = plain_state.stock.donors[plain_state.stock.blocks[start.path[0]].donor].blocks
        for length in PATH_LENGTHS:
            net = replace(start, path=donor_blocks[:length])
            pool = steps.eligible_blocks(net, plain_state.stock, scoring_params)
            if pool and length < len(donor_blocks):
                yield QuantizationChoice(pool, score_pool(plain_state, net, pool), score_pool(int8_state, net, pool))


def find_rejected(
    choices: Sequence[QuantizationChoice], candidates: Iterable[str], k: int
) -> tuple[set[str], set[str]]:
    """Return the candidates with deviating scores, and those that would change a choice of the best K.

    Candidates that enter or leave the best K are rejected repeatedly until the remaining ones change no choice.
    """
    remaining = set(candidates)
    deviating = {
        name
        for pool, plain_scores, quantized_scores in choices
        for name, change in zip(pool, np.abs(quantized_scores - plain_scores), strict=True)
        if name in remaining and change >= INT8_DELTA
    }
    remaining -= deviating
    choice_changing: set[str] = set()
    while True:
        changed: set[str] = set()
        for pool, plain_scores, quantized_scores in choices:
            mixed = np.where([name in remaining for name in pool], quantized_scores, plain_scores)
            changed |= (_select_best(pool, plain_scores, k) ^ _select_best(pool, mixed, k)) & remaining
        if not changed:
            return deviating, choice_changing
        remaining, choice_changing = remaining - changed, choice_changing | changed


def _select_best(pool: Sequence[str], scores: np.ndarray, k: int) -> set[str]:
    return {pool[j] for j in vote.rank_blocks(scores, np.ones(len(pool), np.int64), pool)[:k]}
