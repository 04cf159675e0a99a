"""Plug-ins: methods, networks, data sets, meters and engines from outside, by entry point or `module:name`.

A package declares them in its `pyproject.toml`: `mine = "mine:METHOD"` below
`[project.entry-points."fedquilt.methods"]`. Entry points are read when a name is looked up, and a package is imported
only when something of it is used by name: a broken one disturbs nobody else. Our own are files in folders;
every look-up passes their names.

On a board no message alone can cause an import: `restrict` limits a process to the packages that agent.toml allows.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from fedquilt import config
from fedquilt.core import JobError, shorten_error

Kind: TypeAlias = Literal["method", "network", "data", "meter", "engine"]
GROUPS: Final[dict[Kind, str]] = {
    "method": "fedquilt.methods",
    "network": "fedquilt.networks",
    "data": "fedquilt.data",
    "meter": "fedquilt.meters",
    "engine": "fedquilt.engines",
}
CALLED: Final[dict[Kind, str]] = {
    "method": "method",
    "network": "network",
    "data": "data set",
    "meter": "meter",
    "engine": "engine",
}
OWNERS: Final = ("data", "meter")  # kinds that no message names, only agent.toml
TARGET: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:name
NAMED: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # possible names of entry points

_allowed: frozenset[str] | None = None  # packages and `module:name`; None: every installed package
_by_code = True  # whether other `module:name` than those in `_allowed` may be imported


@dataclass(frozen=True)
class Plugin:
    """Something from outside, not imported yet."""

    kind: Kind
    name: str  # name in a job: of an entry point, or module:name
    target: str  # module:name
    package: str  # distribution, or for `module:name` without one its top-level module
    version: str  # "" without a distribution

    @property
    def module(self) -> str:
        """Name of the top-level module."""
        return self.target.partition(":")[0].partition(".")[0]

    def __str__(self) -> str:
        whose = f"package {self.package} {self.version}".strip() if self.version else f"module {self.module}"
        return f"{CALLED[self.kind]} {self.name!r} of {whose}" + (
            f" ({self.target})" if self.name != self.target else ""
        )


# -- what there is --------------------------------------------------------------------------------


def names(kind: Kind) -> list[str]:
    """Names of a kind that installed packages offer and this process may import, sorted. Imports none."""
    return sorted({plugin.name for plugin in _installed(kind)})


def modules(kinds: Collection[Kind] = ("method", "network", "engine")) -> dict[str, str]:
    """Plug-ins that this process may import, for a device's profile: "plugin <module>" -> `proof`."""
    found = [plugin for kind in kinds for plugin in _installed(kind)]
    found += [_coded("network", name) for name in sorted(_allowed or ()) if TARGET.fullmatch(name)]
    return {f"plugin {plugin.module}": proof(plugin) for plugin in found}


def of_package(name: str) -> list[Plugin]:
    """Everything that an installed package offers; [] if there is no such package, or it offers nothing."""
    found = [plugin for kind in GROUPS for plugin in _installed(kind)]
    return [plugin for plugin in found if _plain(plugin.package) == _plain(name)]


def usable(kind: Kind, ours: Collection[str]) -> list[Plugin]:
    """Plug-ins of a kind with an unambiguous name, sorted; imports none."""
    found = _installed(kind)
    return [each for each in found if each.name not in ours and sum(each.name == one.name for one in found) == 1]


def complaints(kind: Kind, ours: Collection[str]) -> list[str]:
    """Sentence for each name of this kind that cannot be used, as it stands for two things."""
    said = []
    for name in names(kind):
        try:
            find(kind, name, ours)
        except JobError as error:
            said.append(str(error))
    return said


def find(kind: Kind, name: str, ours: Collection[str] = ()) -> Plugin | None:
    """Find the plug-in of a name; None: it is one of `ours`. Imports nothing.

    Raises:
        JobError: there is none, or two, or one that this board's agent.toml does not allow; names it and the mend.
    """
    if ":" in name:
        return _coded(kind, name)
    claims = [plugin for plugin in _installed(kind) if plugin.name == name]
    if name in ours:
        if claims:
            raise JobError(
                f"{claims[0]} has the name of fedquilt's own {CALLED[kind]} {name!r}: rename its entry point in "
                f"{GROUPS[kind]}, or uninstall {claims[0].package}"
            )
        return None
    if len(claims) > 1:
        whose = " and ".join(f"{plugin.package} {plugin.version}" for plugin in claims)
        raise JobError(
            f"two packages give a {CALLED[kind]} {name!r}: {whose}; uninstall one, or write {claims[0].target!r}"
        )
    if claims:
        return claims[0]
    there = [*sorted(ours), *names(kind)]
    shut = [plugin for plugin in _every(kind, tuple(sys.path)) if plugin.name == name]
    if shut:
        raise JobError(f"{shut[0]} is not allowed here: add {shut[0].package!r} to `plugins` in agent.toml")
    raise JobError(
        f"{CALLED[kind]} {name!r} is unknown; there are: {', '.join(there) or 'none'}{config.nearest(name, there)}; "
        "your own is module:name, or an entry point of an installed package"
    )


def load(kind: Kind, name: str, ours: Collection[str] = ()) -> Any:
    """Import the object of a name; None: it is one of `ours`.

    Raises:
        JobError: as `find`; or it cannot be imported, or does not exist. Names package, place and mend.
    """
    plugin = find(kind, name, ours)
    return None if plugin is None else imported(plugin)


def imported(plugin: Plugin) -> Any:
    """Import the object of a plug-in.

    Raises:
        JobError: the module does not exist, fails at import, or has no such name.
    """
    module, _, attribute = plugin.target.partition(":")
    with own_folder():
        try:
            found = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and error.name in (module, plugin.module):
                mend = f"start the command in the folder of {plugin.module}.py, or install its package"
                raise JobError(f"{plugin}: there is no module {error.name!r}; {mend}") from None
            mend = "mend it" + (f", or uninstall {plugin.package}" if plugin.version else "")
            raise JobError(
                f"{plugin} fails at import: {type(error).__name__}: {_error_line(error)} ({_place(error)}); {mend}"
            ) from None
    if not hasattr(found, attribute):
        there = [name for name in vars(found) if not name.startswith("_")]
        raise JobError(f"{plugin}: {found.__file__} has no {attribute!r}{config.nearest(attribute, there)}")
    return getattr(found, attribute)


def refused(plugin: Plugin, wanted: str, found: Any) -> JobError:
    """Error for a plug-in whose object is of another kind than wanted."""
    return JobError(f"{plugin} is a {type(found).__name__}, and {wanted} is wanted: mend {plugin.target}")


# -- what a board allows --------------------------------------------------------------------------


def restrict(allowed: Collection[str] | None) -> None:
    """Limit this process to the packages that its board allows, from now on: for agents and their tasks' processes.

    Args:
        allowed: packages by name, and `module:name`; None: the entry points of all installed packages, and no
            `module:name`.
    """
    global _allowed, _by_code
    _allowed, _by_code = None if allowed is None else frozenset(allowed), False


@contextmanager
def restricted(allowed: Collection[str] | None) -> Iterator[None]:
    """Apply `restrict` within a `with` block."""
    global _allowed, _by_code
    before = _allowed, _by_code
    restrict(allowed)
    try:
        yield
    finally:
        _allowed, _by_code = before


@contextmanager
def own_folder() -> Iterator[None]:
    """Search the current folder too, for the operator's own code; not on a board."""
    if not _by_code:
        yield
        return
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


# -- which content --------------------------------------------------------------------------------


def proof(plugin: Plugin) -> str:
    """Package, version and sha256 of all files of the plug-in's module, as one text with single spaces.

    Two machines with the same text run the same code. At most 200 characters, as `fedquilt.core.Label` takes.
    """
    return f"{plugin.package[:90]} {plugin.version[:44] or '-'} {content(plugin.module)}"


def content(module: str) -> str:
    """The sha256 of all files of a top-level module, of which nothing is run; "unknown" without files."""
    with own_folder():
        return _content(module, tuple(sys.path))


def short(proof: str) -> str:
    """Proof for people, without its package: "1.0 (3fa1b2c4)"; "" if it is none."""
    _, _, rest = proof.partition(" ")
    version, _, content = rest.partition(" ")
    return f"{'without version' if version == '-' else version} ({content[:8]})" if content else ""


def require_current(then: Mapping[str, str]) -> None:
    """Check that the packages behind a bundle's network are unchanged, as far as they are installed here.

    Args:
        then: module -> `proof`, as noted by `fedquilt prepare`.

    Raises:
        JobError: one has another content here; names the package and both contents.
    """
    for module, before in then.items():
        now = content(module)
        if now != "unknown" and not before.endswith(f" {now}"):
            package = before.partition(" ")[0]
            raise JobError(
                f"the bundle's network is of package {package} {short(before)}, which has another content here "
                f"({now[:8]}): make the bundle anew with `fedquilt prepare`"
            )


def needs(kind: Kind, name: str, ours: Collection[str] = ()) -> dict[str, str]:
    """Packages a device needs for a name: module -> `proof`; empty if it is one of `ours`.

    Raises:
        JobError: as `find`.
    """
    plugin = find(kind, name, ours)
    return {} if plugin is None else {plugin.module: proof(plugin)}


def allowing(kind: Kind, name: str, ours: Collection[str] = ()) -> list[str]:
    """Entries that a simulated board's `plugins` needs in order to run a name.

    Raises:
        JobError: as `find`.
    """
    plugin = find(kind, name, ours)
    return [] if plugin is None else [plugin.name if ":" in plugin.name else plugin.package]


@lru_cache(maxsize=64)
def _content(module: str, path: tuple[str, ...]) -> str:
    """Digest of a top-level module's files, found without running any of it; "unknown" without files."""
    try:
        spec = util.find_spec(module)
    except (ImportError, ValueError):
        return "unknown"
    if spec is None:
        return "unknown"
    found = [Path(folder) for folder in spec.submodule_search_locations or ()]  # a namespace package may have several
    files = sorted((file.relative_to(folder).as_posix(), file) for folder in found for file in _files(folder))
    if not found and spec.origin and Path(spec.origin).is_file():
        files = [(Path(spec.origin).name, Path(spec.origin))]
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest() if files else "unknown"


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(place, name) for name in names if not name.endswith((".pyc", ".pyo")))


# -- within ---------------------------------------------------------------------------------------


def _installed(kind: Kind) -> list[Plugin]:
    """Entry points that this process may use; of those that two packages claim, both."""
    found = _every(kind, tuple(sys.path))
    allowed = {_plain(name) for name in _allowed or ()}
    return [each for each in found if kind in OWNERS or _allowed is None or _plain(each.package) in allowed]


@lru_cache(maxsize=16)  # per kind and search path: reading them takes longer than a small task
def _every(kind: Kind, path: tuple[str, ...]) -> tuple[Plugin, ...]:
    from importlib import metadata  # here, as most commands look no plug-in up

    found: dict[tuple[str, str], Plugin] = {}  # a package found twice on the path counts once, the first
    for distribution in metadata.distributions():
        try:
            points = [point for point in distribution.entry_points if point.group == GROUPS[kind]]
            for point in points:
                if NAMED.fullmatch(point.name) and TARGET.fullmatch(point.value):
                    package = str(distribution.metadata["Name"])
                    plugin = Plugin(kind, point.name, point.value, package, str(distribution.version))
                    found.setdefault((package, point.name), plugin)
        except Exception:  # noqa: S112  (somebody's damaged metadata: what it would have given is not there)
            continue
    return tuple(sorted(found.values(), key=lambda plugin: (plugin.name, plugin.package)))


def _coded(kind: Kind, name: str) -> Plugin:
    """Plug-in of a `module:name`, if this process may import it."""
    if not TARGET.fullmatch(name):
        raise JobError(f"{CALLED[kind]} {name!r}: write module:name, as in mine.networks:small")
    if kind not in OWNERS and not _by_code and name not in (_allowed or ()):
        raise JobError(
            f"{CALLED[kind]} {name!r} is code, and this board allows none of that name: install its package here and "
            f"add {name!r} to `plugins` in agent.toml"
        )
    from importlib import metadata

    top = name.partition(":")[0].partition(".")[0]
    try:
        version = metadata.version(top)
    except (metadata.PackageNotFoundError, ValueError):
        version = ""
    return Plugin(kind, name, name, top, version)


def _plain(package: str) -> str:
    """Name of a distribution as packaging compares it: "Outside_FL" is "outside-fl"."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _error_line(error: BaseException) -> str:
    """Return an error's text in one line, or the name of its type."""
    return shorten_error(str(error)) or type(error).__name__


def _place(error: BaseException) -> str:
    """File and line that raised the error; of a syntax error those of the text itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "place unknown"
