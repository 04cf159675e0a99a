"""Board profiles: every number in every file says where it comes from."""

from pathlib import Path

import msgspec
import pytest
from toy_profiles import HEAD

from fedquilt import profiles
from fedquilt.core import JobError, OperatingPoint, Rates, WorkEstimate
from fedquilt.costs import cost_model

BOARDS = ["jetson-agx-orin", "jetson-agx-orin-32gb", "jetson-agx-orin-industrial", "jetson-agx-thor"]
BOARDS += ["jetson-agx-xavier", "jetson-nano", "jetson-orin-nano", "jetson-orin-nano-4gb", "jetson-orin-nano-4gb-super"]
BOARDS += [
    "jetson-orin-nano-super",
    "jetson-orin-nx",
    "jetson-orin-nx-8gb",
    "jetson-orin-nx-super",
    "jetson-tx2",
    "jetson-xavier-nx",
    "raspberry-pi-5",
    "x86-host",
]

SMALL = (
    HEAD
    + """
[[points]]
name = "slow"
cpu_hz = { value = 2, source = "sheet" }
busy_w = { value = 3, source = "guess" }
"""
)

CORES = {"jetson-nano": 128, "jetson-tx2": 256, "jetson-xavier-nx": 384, "jetson-agx-xavier": 512}
CORES |= {"jetson-orin-nano": 1024, "jetson-orin-nano-super": 1024, "jetson-orin-nx": 1024, "jetson-agx-orin": 2048}
CORES |= {"jetson-orin-nano-4gb": 512, "jetson-orin-nano-4gb-super": 512, "jetson-orin-nx-8gb": 1024}
CORES |= {"jetson-orin-nx-super": 1024, "jetson-agx-orin-32gb": 1792, "jetson-agx-orin-industrial": 2048}
CORES |= {"jetson-agx-thor": 2560}
BUS_BYTES = {
    "jetson-nano": 8,
    "jetson-tx2": 16,
    "jetson-xavier-nx": 16,
    "jetson-agx-xavier": 32,
    "jetson-orin-nano": 16,
}
BUS_BYTES |= {"jetson-orin-nano-super": 16, "jetson-orin-nx": 16, "jetson-agx-orin": 32}
BUS_BYTES |= {"jetson-orin-nano-4gb": 8, "jetson-orin-nano-4gb-super": 8, "jetson-orin-nx-8gb": 16}
BUS_BYTES |= {"jetson-orin-nx-super": 16, "jetson-agx-orin-32gb": 32, "jetson-agx-orin-industrial": 32}
BUS_BYTES |= {"jetson-agx-thor": 32}
GRIDDED = [*CORES, "raspberry-pi-5"]
WATTS = {"cpu_w": 0.2, "gpu_w": 0.6, "emc_w": 0.2}  # of what follows clocks

LAW = """
[clocks.cpu_hz]
source = "sheet"
values = [1, 2, 4]

[clocks.gpu_hz]
source = "sheet"
values = [5, 10]

[model]
flop_s = { value = 0.1, source = "guess" }
flop_cpu_cycles = { value = 0.4, source = "guess" }
flop_gpu_cycles = { value = 2, source = "guess" }
base_w = { value = 1, source = "guess" }
cpu_w = { value = 4, source = "guess" }
"""


def test_the_boards_the_brief_names_are_there():
    assert profiles.board_names() == BOARDS


@pytest.mark.parametrize("name", BOARDS)
def test_every_file_loads_and_is_named_after_its_board(name):
    board = profiles.load_board_profile(name)
    assert board.board == name
    assert {figure.source for figure in board.sourced_values()} == set(board.sources)


@pytest.mark.parametrize("name", BOARDS)
def test_what_nobody_measured_is_called_assumed(name):
    board = profiles.load_board_profile(name)
    for point in board.operating_points():
        assert board.provenance(*board.values_behind(point.name, "flops_per_s", "bytes_per_s")) == "assumed"
        assert board.provenance(*board.values_behind(point.name, "busy_w")) == "assumed"


@pytest.mark.parametrize("name", sorted(CORES))
def test_assumed_speeds_follow_from_the_rule_they_state(name):
    board = profiles.load_board_profile(name)
    top = board.highest_clocks()
    flop_s = board.model.time_law("flop").compute_seconds({}, top)
    assert 1 / flop_s == pytest.approx(0.3 * CORES[name] * 2 * top["gpu_hz"], rel=2e-3)
    byte_s = board.model.time_law("byte").compute_seconds({}, top)
    assert 1 / byte_s == pytest.approx(0.6 * 2 * top["emc_hz"] * BUS_BYTES[name], rel=5e-3)


RATES = Rates(flops_per_s=1.234e10, bytes_per_s=1.234e9, launch_s=1.234e-5, task_s=0.01234)
CYCLES = {"nano": 2.5, "tx2": 2.5, "xavier": 1.6, "orin": 1.5, "thor": 1.0, "raspberry": 1.5}  # times an EPYC core's


@pytest.mark.parametrize("name", GRIDDED)
def test_assumed_launches_follow_the_processor_as_they_state(name):
    times = profiles.load_board_profile(name).model
    more = next(more for key, more in reversed(CYCLES.items()) if key in name)
    assert dict(times.time_law("launch").cycles) == {"cpu_hz": 90_000 * more}
    assert dict(times.time_law("task").cycles) == {"cpu_hz": 15e6 * more}
    assert f"times {more:g}, as a" in profiles.load_board_profile(name).sources["launch"].text


@pytest.mark.parametrize("name", BOARDS)
def test_no_task_of_a_shipped_board_is_free(name):
    work = WorkEstimate(flops=2.6e6, launches=864.0)
    for point in profiles.load_board_profile(name).operating_points():
        assert point.launch_s
        assert point.task_s
        assert cost_model.work_seconds(work, point) > 864 * point.launch_s > 0.01


@pytest.mark.parametrize("name", sorted(set(CORES) - {"jetson-tx2"}))
def test_assumed_time_is_split_as_it_states(name):
    board = profiles.load_board_profile(name)
    law, top = board.model.time_law("flop"), board.highest_clocks()
    whole_s = law.compute_seconds({}, top)
    parts = [law.fixed_s, *(law.cycles[axis] / top[axis] for axis in ("cpu_hz", "gpu_hz", "emc_hz"))]
    assert [part / whole_s for part in parts] == pytest.approx([0.23, 0.05, 0.44, 0.28], rel=2e-3)


def test_the_tx2_moves_as_the_paper_measured():
    board = profiles.load_board_profile("jetson-tx2")
    points = {point.name: point for point in board.operating_points()}
    slow, middle, fast = (points[name] for name in ("MAXQ", "MAXP_CORE_ALL", "MAXN"))
    assert middle.flops_per_s / slow.flops_per_s == pytest.approx(1.21, rel=1e-3)
    assert fast.flops_per_s / slow.flops_per_s == pytest.approx(1.38, rel=1e-3)
    assert middle.busy_w / slow.busy_w == pytest.approx(1.25)
    assert fast.busy_w / slow.busy_w == pytest.approx(1.14)
    for point in (slow, middle, fast):
        clocks = {"cpu_hz": point.cpu_hz, "gpu_hz": point.gpu_hz, "emc_hz": point.emc_hz}
        assert board.model.time_law("flop").compute_seconds(
            clocks, board.highest_clocks()
        ) * point.flops_per_s == pytest.approx(1, rel=2e-3)


@pytest.mark.parametrize("name", sorted(CORES))
def test_assumed_power_follows_from_the_rule_it_states(name):
    board = profiles.load_board_profile(name)
    draw, top = board.model.power_model(), board.highest_clocks()
    following = sum(draw.axes_w.values())
    for key, share in WATTS.items():
        assert getattr(board.model, key).value == pytest.approx(share * following, rel=2e-3)
    assert draw.base_w >= (0.0 if board.idle_w is None else board.idle_w.value)
    named = [mode for mode in board.points if mode.busy_w is not None]
    modelled = {m.name: draw.compute_watts(clocks(m), top) for m in named}
    anchor = max(named, key=lambda mode: modelled[mode.name])
    assert modelled[anchor.name] == pytest.approx(anchor.busy_w.value, rel=2e-3)


def clocks(mode: profiles.ProfilePoint) -> dict[str, float]:
    return {axis: getattr(mode, axis).value for axis in ("cpu_hz", "gpu_hz", "emc_hz") if getattr(mode, axis)}


@pytest.mark.parametrize("name", GRIDDED)
def test_more_clock_is_never_slower_and_never_draws_less(name):
    board = profiles.load_board_profile(name)
    modes = {mode.name for mode in board.points}
    grid = [point for point in board.operating_points() if point.name not in modes]
    for low in grid:
        for high in grid:
            if all((getattr(low, a) or 0) <= (getattr(high, a) or 0) for a in ("cpu_hz", "gpu_hz", "emc_hz")):
                assert low.flops_per_s <= high.flops_per_s
                assert low.busy_w <= high.busy_w


@pytest.mark.parametrize("name", BOARDS)
def test_every_point_has_a_name_of_its_own_and_says_what_it_does(name):
    board = profiles.load_board_profile(name)
    points = board.operating_points()
    assert [point.name for point in points[: len(board.points)]] == [mode.name for mode in board.points]
    assert len({point.name for point in points}) == len(points) <= profiles.MAX_POINTS
    assert all(point.flops_per_s and point.bytes_per_s and point.busy_w for point in points)
    assert len(msgspec.json.encode(points)) < 50_000
    rates = dict.fromkeys(("numpy-dense", "torch-dense", "torch-conv", "onnx-score"), RATES)
    recorded = [msgspec.structs.replace(point, rates=rates) for point in points]
    assert len(msgspec.json.encode(recorded)) < 120_000  # below the 128 KiB that brokers take
    assert msgspec.json.decode(msgspec.json.encode(recorded), type=list[OperatingPoint]) == recorded
    if name in GRIDDED:
        lists = board.clocks.frequencies_by_axis()
        for point in points[len(board.points) :]:
            assert all(getattr(point, axis) in values for axis, values in lists.items())


def test_idle_power_names_its_hardware_and_is_absent_where_nobody_measured_it():
    idle = {
        name: profiles.load_board_profile(name)
        for name in BOARDS
        if profiles.load_board_profile(name).idle_w is not None
    }
    for name, board in idle.items():
        text = board.sources[board.idle_w.source].text
        assert any(word in text for word in ("module", "Orin Nano", "board", "developer kit", "processor")), name
    assert not {"jetson-agx-thor", "jetson-agx-orin-industrial", "jetson-orin-nano-4gb", "jetson-orin-nx-8gb"} & set(
        idle
    )
    assert idle["raspberry-pi-5"].idle_w.value == 3.3
    assert "4 GB board" in idle["raspberry-pi-5"].sources["review"].text
    assert idle["jetson-agx-orin-32gb"].idle_w.value == pytest.approx(2.39 + 0.80 + 3.52)


def test_super_modes_have_their_true_tops():
    assert profiles.load_board_profile("jetson-orin-nx-super").highest_clocks()["gpu_hz"] == 1173e6
    for name in ("jetson-orin-nano-super", "jetson-orin-nano-4gb-super"):
        assert (
            profiles.load_board_profile(name).highest_clocks()["gpu_hz"],
            profiles.load_board_profile(name).highest_clocks()["cpu_hz"],
        ) == (1020e6, 1728e6)


def test_numbers_travel_without_their_sources():
    (sent,) = profiles.parse_board_profile(SMALL, "small").operating_points()
    assert (sent.name, sent.cpu_hz, sent.busy_w, sent.gpu_hz, sent.flops_per_s) == ("slow", 2, 3, None, None)


def test_the_model_fills_in_what_a_mode_does_not_say_and_spans_the_grid():
    board = profiles.parse_board_profile(SMALL.replace("[[points]]", LAW + "[[points]]"), "small")
    mode, *grid = board.operating_points()
    assert (mode.flops_per_s, mode.busy_w, mode.gpu_hz) == (2.0, 3.0, None)
    assert [(point.cpu_hz, point.gpu_hz) for point in grid] == [(4, 10), (4, 5), (2, 10), (2, 5), (1, 10), (1, 5)]
    assert (grid[0].flops_per_s, grid[0].busy_w) == (2.5, 5.0)
    assert (grid[-1].flops_per_s, grid[-1].busy_w) == (1.111, 1.25)
    assert board.provenance(*board.values_behind("slow", "busy_w", "flops_per_s")) == "assumed"
    assert [figure.value for figure in board.values_behind("slow", "busy_w")] == [3]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("values = [1, 2, 4]", "values = [2, 1, 4]", "cpu_hz is not in rising order"),
        ("flop_gpu_cycles", "flop_emc_cycles", "uses emc_hz: list these clocks"),
        ("flop_gpu_cycles", "flop_npu_cycles", "npu"),
        ("values = [5, 10]", "values = []", "gpu_hz"),
        ('name = "slow"', 'name = "slow"\n[[points]]\nname = "slow"', "several points have the name slow"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused(old, new, message):
    text = SMALL.replace("[[points]]", LAW + "[[points]]")
    with pytest.raises(JobError, match=rf"small\.toml.*{message}"):
        profiles.parse_board_profile(text.replace(old, new), "small.toml")


def test_provenance_is_that_of_the_least_sure_number():
    board = profiles.parse_board_profile(SMALL, "small")
    (point,) = board.points
    assert board.provenance(board.memory_bytes, point.cpu_hz) == "datasheet"
    assert board.provenance(point.cpu_hz, None, point.busy_w) == board.provenance() == "assumed"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('busy_w = { value = 3, source = "guess" }', "busy_w = 3", "points"),
        ('source = "guess" }', 'source = "hearsay" }', "hearsay"),
        ("value = 1000", "value = 0", "memory_bytes"),
        ('provenance = "assumed"', 'provenance = "rumour"', "rumour"),
        ("busy_w", "busy_watts", "busy_watts"),
        ("[[points]]", "[[points]", "is not TOML"),
    ],
)
def test_a_number_without_its_source_is_refused(old, new, message):
    with pytest.raises(JobError, match=rf"small\.toml.*{message}"):
        profiles.parse_board_profile(SMALL.replace(old, new), "small.toml")


def test_an_unknown_board_lists_those_there_are():
    with pytest.raises(
        JobError, match=r"'jetson-tx9' is unknown; did you mean 'jetson-tx2'\? There are: jetson-agx-orin, .*auto"
    ):
        profiles.load_board_profile("jetson-tx9")


def test_a_profile_is_found_by_its_file_or_its_name(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text((Path(profiles.__file__).parent / "jetson-tx2.toml").read_text())
    assert (
        profiles.find_board_profile(str(own))
        == profiles.find_board_profile("jetson-tx2")
        == profiles.load_board_profile("jetson-tx2")
    )
    with pytest.raises(JobError, match=r"'jetson-orin-nan' is neither a file .*; did you mean 'jetson-orin-nano'\?"):
        profiles.find_board_profile("jetson-orin-nan")
    with pytest.raises(JobError, match=r"none\.toml cannot be read"):
        profiles.find_board_profile(str(tmp_path / "none.toml"))
