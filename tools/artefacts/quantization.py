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


def quantize_block(block: Block, paths: Mapping[str, Path], fed: Iterator[np.ndarray]) -> bytes | None:
    """Return the 8-bit graph of a block, or None if it is a first or divided block or would gain nothing.

    The inputs `fed` determine the ranges of the activations.
    """
    if block.kind == "start" or sum(len(stage) for stage in block.stages) > 1:
        return None
    model = export.load_graph(block.id, paths[block.stages[0][0]])
    add_pre_process_metadata(model)  # what that would do, the exporter has done
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as folder:
        path = Path(folder) / "graph.onnx"
        quantization.quantize_static(
            model,
            path,
            _RangeReader(model.graph.input[0].name, fed),
            quant_format=quantization.QuantFormat.QOperator,
            per_channel=True,
            reduce_range=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        made = onnx.load(path)
    if not any(tensor.data_type == TensorProto.INT8 for tensor in made.graph.initializer):
        return None
    weight_bytes = sum(numpy_helper.to_array(tensor).nbytes for tensor in made.graph.initializer)
    activation_bytes = _measure_activation_bytes(made, block.in_shape)
    if weight_bytes + activation_bytes > block.resident_bytes + block.activation_bytes:
        return None
    del made.metadata_props[:]
    facts = {"activation_bytes": str(activation_bytes), "weight_bytes": str(weight_bytes)}
    helper.set_model_props(made, facts)
    made.producer_name, made.producer_version = "fedquilt", ""
    return bytes(made.SerializeToString(deterministic=True))


def _measure_activation_bytes(model: onnx.ModelProto, shape: Sequence[int]) -> int:
    # float32 sizes: shapes of quantized operators cannot be inferred
    values = [name for node in model.graph.node for name in node.output if name]
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    del seen.graph.output[:]
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = execution_providers.create_session(seen.SerializeToString(), options)
    example = {session.get_inputs()[0].name: np.zeros((1, *shape), np.float32)}
    found = session.run(None, example) + list(example.values())
    sizes = {name: value.nbytes for name, value in zip((*values, *example), found, strict=True)}
    most = memory.peak_buffer_bytes(model.graph, sizes)
    assert most is not None
    return most


IMAGES_MOST = 64  # largest number of images for each of three uses: value ranges, comparison, junctions
INT8_DELTA = 0.01  # smallest change of a CKA or score that excludes a block from int8
LENGTHS = (1, 2)  # numbers of blocks of a donor after which candidates are scored
ENGINE_BYTES = 2 << 30
UNUSED = (  # keys of [data] that are not in [int8]
    *("limit", "per_class", "held", "groups", "partition"),
    *("share", "shares", "alpha", "min_size", "classes", "domains"),
)


@dataclass(frozen=True)
class QuantizedBlock:
    graph: bytes
    delta: float  # largest change of its output's CKA with any block's
    seconds: float  # it took; and the float32 block
    plain_seconds: float


@dataclass(frozen=True)
class QuantizationResult:
    """Blocks of a donor by quantisation result, without its first block."""

    accepted: Mapping[str, QuantizedBlock]
    off: tuple[str, ...] = ()  # a CKA or a score changed by INT8_DELTA or more
    choices: tuple[str, ...] = ()  # came among the best K, or left them
    float_only: tuple[str, ...] = ()  # tiles, nothing that can be quantized, or more memory than in float32

    def __str__(self) -> str:
        blocks = len(self.accepted) + len(self.off) + len(self.choices) + len(self.float_only)
        told = f"{len(self.accepted)} of {blocks} candidates in 8 bits"
        for count, why in (
            (self.off, "too far off"),
            (self.choices, "changed a choice"),
            (self.float_only, "float32 only"),
        ):
            told += f", {len(count)} {why}" if count else ""
        if not self.accepted:
            return told
        delta = max(tried.delta for tried in self.accepted.values())
        times = [sum(getattr(t, name) for t in self.accepted.values()) for name in ("seconds", "plain_seconds")]
        return f"{told}; CKA changes by {delta:.4f} at most; {times[0] / times[1]:.2f} of the float32 time here"


@dataclass(frozen=True)
class QuantizationTrial:
    """Scoring parameters and shuffled images of a quantisation, three times `images` in number."""

    params: SearchSettings
    examples: Examples
    images: int

    def quantize_blocks(
        self, out: Path, meta: Mapping[str, Any], files: Mapping[str, bytes], say: Callable[[str], None]
    ) -> dict[str, bytes]:
        """Return the accepted 8-bit graphs of a bundle, by block."""
        with disk_errors(f"write the bundle {out}"):
            out.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.TemporaryDirectory(prefix="int8-", dir=out)
        with temporary as name:
            folder = Path(name)
            bench = _ScoringDevice(folder, self.examples, self.images)
            plain = job_bundle.write_bundle(folder, meta, files)
            tried = _quantize_suitable_blocks(bench, plain, self.params)
            close = {name: one for name, one in tried.items() if one.delta < INT8_DELTA}
            table = {
                **meta["blocks"],
                **{name: {**meta["blocks"][name], "int8": make_int8_name(name)} for name in close},
            }
            graphs = {make_int8_name(name): one.graph for name, one in close.items()}
            quick = job_bundle.write_bundle(folder, {**meta, "blocks": table}, {**files, **graphs})
            off, moved = find_rejected(
                list(_score_original_and_quantized(bench, plain, quick, self.params)), close, self.params.k
            )
        taken = {name: one for name, one in close.items() if name not in off | moved}
        for donor, facts in meta["donors"].items():
            own = facts["blocks"][1:]
            verdict = QuantizationResult(
                {name: taken[name] for name in own if name in taken},
                tuple(name for name in own if name in off or (name in tried and name not in close)),
                tuple(name for name in own if name in moved),
                tuple(name for name in own if name not in tried),
            )
            say(f"donor {donor}: {verdict}")
        return {name: one.graph for name, one in taken.items()}


def make_trial(job: Mapping[str, Any]) -> QuantizationTrial:
    """Return the quantisation trial for the [int8] table of a job."""
    if not job.get("donors"):
        raise JobError("[int8] is for the blocks of [[donors]], and the job has none: leave it out")
    params = resolve_settings(toml.convert_table(job.get("params") or {}, SearchParams, "[params]"))
    for name, value in (("score_at", "input"), ("expansions", 0)):
        if getattr(params, name) == value:
            raise JobError(f"[params] {name} = {value!r} scores no outputs: leave out [int8], which would do nothing")
    if odd := [key for key in UNUSED if key in job["int8"]]:
        raise JobError(f"[int8] {', '.join(odd)}: images are drawn from all of the split; leave it out")
    wanted = DataSpec.parse(job["int8"], "[int8]")
    # a third for the value ranges, a third for the comparison, and a third for the junctions
    found = load_split(msgspec.structs.replace(wanted, limit=3 * IMAGES_MOST))
    images = len(found) // 3
    if images < cka.MIN_IMAGES:
        raise DataError(f"{wanted.source_name} has {len(found)} images: [int8] takes {3 * cka.MIN_IMAGES} or more")
    order = tensors.seeded_rng("int8", wanted.seed).permutation(3 * images)
    return QuantizationTrial(params, Examples(found.x[order], found.y[order]), images)


def make_int8_name(block: str) -> str:
    return f"{block}.int8.onnx"


class _ScoringDevice:
    def __init__(self, folder: Path, examples: Examples, images: int) -> None:
        self.folder, self.examples, self.images = folder, examples, images
        self.engine = OnnxEngine(ENGINE_BYTES)

    def blob_paths(self, made: Bundle) -> dict[str, Path]:
        return {name: self.folder / "blobs" / ref.sha256 for name, ref in made.files.items()}

    def make_device(self) -> DeviceData:
        # the last third of the images is for the ranges
        rest = Examples(self.examples.x[: 2 * self.images], self.examples.y[: 2 * self.images])
        return DeviceData("int8", rest, rest)

    def make_block_runner(self, paths: Mapping[str, Path], stock: DonorPool) -> BlockRunner:
        member, cache = self.make_device(), self.folder / "cache"
        site = ClientContext(
            member.device,
            ENGINE_BYTES,
            self.engine,
            tensors.seeded_rng("int8"),
            member.train,
            member.held,
            {},
            lambda name: {},
            paths.__getitem__,
            cache,
        )
        return BlockRunner(site, stock.blocks.values(), 1.0)


def _quantize_suitable_blocks(
    bench: _ScoringDevice, plain: Bundle, params: SearchSettings
) -> dict[str, QuantizedBlock]:
    stock, paths, n = stitched_network.load_donor_pool(plain.meta), bench.blob_paths(plain), bench.images
    run = bench.make_block_runner(paths, stock)
    graphs: dict[str, bytes] = {}
    seconds: dict[str, tuple[float, float]] = {}
    grams: dict[str, np.ndarray] = {}
    grams8: dict[str, np.ndarray] = {}
    shown = block_runner.PreparedExamples(bench.examples.x[n:], stock.input)  # n to compare on, and n for the ranges
    begun = _run_first_blocks(run, stock, SourceSlice(shown, n, 2 * n))
    for donor in stock.donors.values():
        maps: ActivationSource = shown
        for block in (stock.blocks[name] for name in donor.blocks):
            outputs, plain_s = _time_block(run, block, maps, n)
            grams[block.id] = scoring.stack_gram(outputs, n)
            graph = quantize_block(
                block, paths, _yield_calibration_inputs(SourceSlice(maps, n, 2 * n), begun, block, params)
            )
            if graph is not None:
                path = bench.folder / make_int8_name(block.id)
                path.write_bytes(graph)
                paths[path.name] = path
                outputs8, quick_s = _time_block(run, replace(block, int8=path.name).scoring_variant, maps, n)
                graphs[block.id], seconds[block.id] = graph, (quick_s, plain_s)
                grams8[block.id] = scoring.stack_gram(outputs8, n)
            maps = run.run_block(block, maps, n, 2 * n, outputs)

    def compute_largest_change(name: str) -> float:
        others = [gram for gram in grams.values() if gram.shape == grams[name].shape]
        return max(
            abs(
                cka.cka(grams8[name], gram, params.estimator).value - cka.cka(grams[name], gram, params.estimator).value
            )
            for gram in others
        )

    return {name: QuantizedBlock(graph, compute_largest_change(name), *seconds[name]) for name, graph in graphs.items()}


def _time_block(run: BlockRunner, block: Block, maps: ActivationSource, n: int) -> tuple[ActivationStack, float]:
    # the first call loads the graphs
    run.run_block(block, SourceSlice(maps, 0, 1))
    start = time.perf_counter()
    outputs = run.run_block(block, maps, 0, n)
    return outputs, time.perf_counter() - start


def _run_first_blocks(
    run: BlockRunner, stock: DonorPool, shown: ActivationSource
) -> list[tuple[Block, ActivationSource]]:
    found: list[tuple[Block, ActivationSource]] = []
    for donor in stock.donors.values():
        maps = shown
        for block in (stock.blocks[name] for name in donor.blocks[: max(LENGTHS)]):
            maps = run.run_block(block, maps)
            found.append((block, maps))
    return found


def _yield_calibration_inputs(
    own: ActivationSource, begun: Iterable[tuple[Block, ActivationSource]], block: Block, params: SearchSettings
) -> Iterator[np.ndarray]:
    # from the block's own donor, and from junctions fitted to that donor
    yield from (part for _, part in block_runner.iterate_pieces(own))
    for before, maps in begun:
        if not stitched_network.can_connect(before, block, params.max_upsampling) or stitched_network.is_continuation(
            before, block
        ):
            continue
        places = block_runner.draw_positions(own.shape[0], block.in_shape, params.positions)
        x = block_runner.sample_vectors(block_runner.resize_maps(maps, *block.in_shape[1:]), places)
        weights, bias = least_squares.RidgeFit(x, params.ridge, params.bias).solve_weights(
            block_runner.sample_vectors(own, places)
        )
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
        yield from (
            part for _, part in block_runner.iterate_pieces(block_runner.apply_junction_lazily(maps, junction, block))
        )


class QuantizationChoice(NamedTuple):
    pool: tuple[str, ...]
    plain: np.ndarray
    quick: np.ndarray


def _score_original_and_quantized(
    bench: _ScoringDevice, plain: Bundle, quick: Bundle, params: SearchSettings
) -> Iterator[QuantizationChoice]:
    before, after = (METHOD.init(made, params, 0) for made in (plain, quick))
    everywhere = replace(before.params, score_at="output", early=0, completion=False)
    member = bench.make_device()
    local: Tensors = {}

    def score_pool(state: SearchState, net: ScoredPath, pool: tuple[str, ...]) -> np.ndarray:
        nonlocal local
        order = METHOD.send(replace(state, params=everywhere, current=net, pool=pool), DeviceView("int8", None, ()))
        assert order is not None
        task, site = local_backend.make_task_and_context(
            METHOD,
            order,
            member,
            bench.folder / "sent",
            engine=bench.engine,
            local=local,
            cache=bench.folder / "cache",
            path=lambda ref: bench.folder / "blobs" / ref.sha256,
        )
        answer = METHOD.work(task, site)
        local = answer.private_state
        return answer.bundles["scores"]["score"]

    for begun in steps.starting_networks(before.stock):
        own = before.stock.donors[before.stock.blocks[begun.path[0]].donor].blocks
        for length in LENGTHS:
            net = replace(begun, path=own[:length])
            pool = steps.eligible_blocks(net, before.stock, everywhere)
            if pool and length < len(own):
                yield QuantizationChoice(pool, score_pool(before, net, pool), score_pool(after, net, pool))


def find_rejected(
    choices: Sequence[QuantizationChoice], candidates: Iterable[str], k: int
) -> tuple[set[str], set[str]]:
    """Return the candidates with deviating scores, and those that would change a choice of the best K.

    Candidates that enter or leave the best K are rejected repeatedly until the remaining ones change no choice.
    """
    left = set(candidates)
    off = {
        name
        for pool, plain, quick in choices
        for name, change in zip(pool, np.abs(quick - plain), strict=True)
        if name in left and change >= INT8_DELTA
    }
    left -= off
    moved: set[str] = set()
    while True:
        found: set[str] = set()
        for pool, plain, quick in choices:
            mixed = np.where([name in left for name in pool], quick, plain)
            found |= (_select_best(pool, plain, k) ^ _select_best(pool, mixed, k)) & left
        if not found:
            return off, moved
        left, moved = left - found, moved | found


def _select_best(pool: Sequence[str], scores: np.ndarray, k: int) -> set[str]:
    return {pool[j] for j in vote.rank_blocks(scores, np.ones(len(pool), np.int64), pool)[:k]}
