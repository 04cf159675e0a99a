"""What other packages give, and everything that can be wrong with it: one sentence, and nobody else disturbed."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import sites

from fedquilt import methods, plugins
from fedquilt.core import DataError, JobError, Method, ModelError
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import devices, engines
from fedquilt.models.networks import registry
from fedquilt.testing import conformance
from fedquilt.tools.experiments import method_pages

Install = Callable[..., Path]
METHOD = """
from dataclasses import replace
from fedquilt.methods import fedavg

METHOD = replace(fedavg.METHOD, paper="own")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package for this process; arguments as of `sites.install`."""
    count = 0

    def put(
        name: str, modules: Mapping[str, str], points: Mapping[str, Mapping[str, str]], version: str = "1.0"
    ) -> Path:
        nonlocal count
        count += 1
        site = sites.install(tmp_path / f"site-{count}", name, modules, points, version)
        monkeypatch.syspath_prepend(str(site))
        for file in modules:
            monkeypatch.delitem(sys.modules, file.partition("/")[0].removesuffix(".py"), raising=False)
        return site

    methods.load.cache_clear()
    return put


# -- what is found --------------------------------------------------------------------------------


def test_a_method_of_an_installed_package_is_found_by_its_name(install):
    install("mine-fl", {"mine_one.py": METHOD}, {"fedquilt.methods": {"mine": "mine_one:METHOD"}})
    assert methods.plugin_names() == ["mine"]
    assert "mine_one" not in sys.modules
    assert methods.load("mine").paper == "own"
    assert methods.load("mine_one:METHOD") is methods.load("mine")
    assert isinstance(methods.load("fedavg"), Method)
    assert "mine" not in methods.builtin_names()
    assert any(
        "mine-fl 1.0" in line
        for line in method_pages.format_method_table(["fedavg"], plugins.usable_plugins("method", ["fedavg"]))
    )
    assert method_pages.make_card("mine").paper == "own"


def test_an_engine_of_another_package_is_made_with_its_budget(install):
    text = (
        "class Engine:\n    name = 'mine'\n    def __init__(self, budget_bytes):\n        self.budget = budget_bytes\n"
    )
    install("engine-fl", {"mine_engine.py": text}, {"fedquilt.engines": {"mine": "mine_engine:Engine"}})
    assert engines.available_engines()[-1] == "mine"
    assert engines.create_engine("mine", 5).budget == 5


def test_a_data_set_of_another_package_is_shared_out(install):
    text = "import numpy as np\ndef ten(spec):\n    return np.eye(10, dtype=np.float32), np.arange(10) % 2\n"
    install("data-fl", {"mine_data.py": text}, {"fedquilt.data": {"ten": "mine_data:ten"}})
    train, held = examples.load_share(DataSpec(dataset="ten", partition="iid", shares=2))
    assert len(train) + len(held) == 5
    assert train.x.shape[1:] == (10,)


def test_the_check_of_a_package_imports_losses_too(install):
    losses = {"mean": "loss_fl:mean", "absent": "loss_fl:absent"}
    install("loss-fl", {"loss_fl.py": "def mean(scores, targets): ...\n"}, {"fedquilt.losses": losses})
    assert [passed for passed, _ in conformance.check_package("loss-fl")] == [False, True]


# -- what can be wrong ----------------------------------------------------------------------------


def test_a_package_that_fails_at_import_is_named_and_disturbs_nobody_else(install):
    install("broken-fl", {"broken_fl.py": "\n\nraise RuntimeError('no licence')\n"}, {
        "fedquilt.methods": {"broken": "broken_fl:METHOD"}
    })  # fmt: skip
    with pytest.raises(JobError, match=r"'broken' of package broken-fl 1\.0.*no licence.*\.py, line 3.*uninst"):
        methods.load("broken")
    assert methods.load("fedavg").paper
    assert "broken" in methods.plugin_names()
    assert plugins.plugin_fingerprints()["plugin broken_fl"].startswith("broken-fl 1.0 ")
    assert plugins.name_conflicts("method", methods.builtin_names()) == []


def test_two_packages_with_one_name_are_both_named(install):
    install("one-fl", {"one_fl.py": METHOD}, {"fedquilt.methods": {"twice": "one_fl:METHOD"}})
    install("two-fl", {"two_fl.py": METHOD}, {"fedquilt.methods": {"twice": "two_fl:METHOD"}}, "2.0")
    with pytest.raises(
        JobError, match=r"method 'twice' is ambiguous, one-fl 1\.0 and two-fl 2\.0 have one: uninstall one"
    ):
        methods.load("twice")
    assert methods.load("one_fl:METHOD").paper == "own"
    assert len(plugins.name_conflicts("method", methods.builtin_names())) == 1
    assert plugins.usable_plugins("method", methods.builtin_names()) == []


@pytest.mark.parametrize(
    ("group", "name", "load"),
    [
        ("fedquilt.methods", "fedavg", methods.load),
        ("fedquilt.networks", "mlp", lambda name: registry.build_network({"name": name})),
        ("fedquilt.engines", "numpy", lambda name: engines.create_engine(name, 1)),
    ],
)
def test_a_name_that_hides_one_of_ours_is_refused(install, group, name, load):
    install("hider-fl", {"hider_fl.py": METHOD}, {group: {name: "hider_fl:METHOD"}})
    with pytest.raises(
        (JobError, ModelError), match=rf"hider-fl 1\.0.*fedquilt's own .*'{name}': rename.*or uninstall"
    ):
        load(name)
    assert methods.load("fedprox").paper


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_fl:METHOD", r"module 'nowhere_fl' was not found; start the command in the folder of nowhere_fl\.py"),
        ("odd_fl:METHDO", r"odd_fl\.py has no 'METHDO'; did you mean 'METHOD'"),
        ("odd_fl:TABLE", r"is a dict instead of a fedquilt\.core\.Method"),
        ("odd_fl:LOOSE", r"`params` is <class 'dict'> instead of a frozen dataclass"),
        ("odd_fl:a.b", "write module:name"),
        ("fedavgg", r"did you mean 'fedavg'\? There are: .*module:name"),
    ],
)
def test_module_and_name_that_are_not_there_or_no_method(install, name, said):
    install("odd-fl", {"odd_fl.py": f"{METHOD}TABLE = {{}}\nLOOSE = replace(METHOD, params=dict)\n"}, {})
    with pytest.raises(JobError, match=said):
        methods.load(name)


def test_a_network_that_raises_or_is_none_is_named(install):
    text = "def bad(inputs):\n    raise ValueError('odd width')\ndef none(inputs):\n    return 3\nTABLE = {}\n"
    install("nets-fl", {"nets_fl.py": text}, {"fedquilt.networks": {"bad": "nets_fl:bad"}})
    for name, said in (("bad", "'bad' cannot be built.*odd width"), ("nets_fl:none", "returned a int"), (
        "nets_fl:TABLE", "is a dict, not a function"
    )):  # fmt: skip
        with pytest.raises(ModelError, match=said):
            registry.build_network({"name": name, "inputs": 4})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 3", "returns a int: return inputs and labels"),
        ("return np.zeros((4, 2)), np.zeros(3, int)", r"shape \(4, 2\).*labels of shape \(3,\)"),
        ("raise KeyError('x')", "fails on split 'train': KeyError"),
    ],
)
def test_a_data_set_that_is_none_is_named(install, body, said):
    install("sets-fl", {"sets_fl.py": f"import numpy as np\ndef odd(spec):\n    {body}\n"}, {
        "fedquilt.data": {"odd": "sets_fl:odd"}
    })  # fmt: skip
    with pytest.raises(DataError, match=rf"data set 'odd' of package sets-fl 1\.0.*{said}"):
        examples.open_split(DataSpec(dataset="odd"))


# -- what a board allows --------------------------------------------------------------------------


def test_a_board_imports_what_is_installed_or_what_it_lists_and_never_any_module(install):
    pytest.importorskip("torch")
    install("mine-fl", {"mine_two.py": METHOD}, {"fedquilt.methods": {"mine": "mine_two:METHOD"}})
    with plugins.restrict_plugins_within(None):
        assert plugins.find_plugin("method", "mine") is not None
        with pytest.raises(ModelError, match="is not allowed on this device"):
            registry.build_network({"name": "os:system", "command": "true"})
        with pytest.raises(ModelError, match="is not allowed on this device"):
            registry.build_network({"name": "exits", "of": {"name": "os:system"}, "looks": [], "classes": 2})
    with plugins.restrict_plugins_within([]):
        assert plugins.plugin_fingerprints() == {}
        with pytest.raises(JobError, match="not allowed here: add 'mine-fl' to `plugins`"):
            methods.load("mine")
    with plugins.restrict_plugins_within(["mine_two:METHOD"]):
        assert plugins.find_plugin("method", "mine_two:METHOD") is not None
        assert list(plugins.plugin_fingerprints()) == ["plugin mine_two"]


def test_the_same_files_give_the_same_proof_and_others_another(install):
    points = {"fedquilt.methods": {"mine": "mine_pkg:METHOD"}}
    site = install("mine-fl", {"mine_pkg/__init__.py": METHOD, "mine_pkg/more.py": "A = 1\n"}, points)
    before = plugins.required_modules("method", "mine")
    (site / "mine_pkg/__pycache__").mkdir()
    (site / "mine_pkg/__pycache__/more.pyc").write_bytes(b"x")
    plugins._compute_module_digest.cache_clear()
    assert plugins.required_modules("method", "mine") == before
    (site / "mine_pkg/more.py").write_text("A = 2\n")
    plugins._compute_module_digest.cache_clear()
    assert plugins.required_modules("method", "mine") != before
    assert list(before) == ["mine_pkg"]
    assert before["mine_pkg"].startswith("mine-fl 1.0 ")
    assert "mine_pkg" not in sys.modules


def test_a_long_name_and_version_leave_the_content_of_a_proof_whole(install):
    name, version = "net-" + "f" * 120, "1.0+" + "0" * 80
    install(name, {"long_fl.py": "A = 1\n"}, {"fedquilt.networks": {"long": "long_fl:net"}}, version)
    now = plugins.required_modules("network", "long")
    assert len(now["long_fl"]) == 200
    assert now["long_fl"].endswith(f" {plugins.module_digest('long_fl')}")
    assert plugins.format_fingerprint(now["long_fl"]).startswith("1.0+000")
    plugins.require_unchanged_modules(now)


def test_a_bundle_of_a_network_that_has_changed_since_is_refused(install):
    install("net-fl", {"net_fl.py": "A = 1\n"}, {"fedquilt.networks": {"net": "net_fl:net"}})
    now = plugins.required_modules("network", "net")
    plugins.require_unchanged_modules(now)
    plugins.require_unchanged_modules({"elsewhere_fl": "elsewhere-fl 1.0 abc"})
    with pytest.raises(JobError, match=r"package net-fl 0\.9 \(00000000\).*files here differ.*fedquilt prepare"):
        plugins.require_unchanged_modules({"net_fl": f"net-fl 0.9 {'0' * 64}"})


# -- meters ---------------------------------------------------------------------------------------

PLUG = """
from fedquilt.core import Power

class Plug:
    coverage = "board"

    def __init__(self, watts=60.0):
        self.watts = watts

    def read(self, now_s):
        return Power(self.watts, "plug")

class Blind:
    def read(self, now_s):
        return Power()
"""


def test_a_meter_of_another_package_is_one_line_of_agent_toml(install):
    install("plug-fl", {"plug_fl.py": PLUG}, {"fedquilt.meters": {"plug": "plug_fl:Plug"}})
    for wanted in ("plug", "plug_fl:Plug", {"name": "plug", "watts": 60.0}):
        made = devices.create_meter(wanted)
        assert made.read(0.0).total_w == 60.0
    with plugins.restrict_plugins_within([]):
        assert devices.create_meter("plug").coverage == "board"  # the board's own settings name it


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("plg", r"meter 'plg' is unknown; did you mean 'plug'\? There are: plug"),
        (
            "plug_fl:Blind",
            r"plug_fl.*is not a meter: define `read\(now_s\)`, and `coverage` as one of board, processor, rail",
        ),
        ({"name": "plug", "host": "x"}, "cannot be created from .*host.*TypeError"),
        ({"watts": 3}, "meter has no name"),
    ],
)
def test_a_meter_that_is_none_is_one_sentence(install, wanted, said):
    install("plug-fl", {"plug_fl.py": PLUG}, {"fedquilt.meters": {"plug": "plug_fl:Plug"}})
    with pytest.raises(JobError, match=said):
        devices.create_meter(wanted)
