"""Plug-ins: external methods, networks, data sets, losses, transforms, meters, engines, blob backends.

A plug-in is named by an entry point or as `module:name`. A package declares entry points in its `pyproject.toml`:
`mine = "mine:METHOD"` below `[project.entry-points."fedquilt.methods"]`. Entry points are read at each lookup, and a
package is imported only when a job names one of its plug-ins, so a broken package affects no other. The built-in
methods and networks are files in folders: their names are the argument `builtin_names` of each lookup.

On a device, a message alone can never cause an import: `restrict_plugins` limits a process to the packages that
agent.toml allows.
"""

from __future__ import annotations

import contextlib
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

from fedquilt.core import JobError, shorten_error
from fedquilt.formats import toml

Kind: TypeAlias = Literal["method", "network", "data", "loss", "transform", "meter", "engine", "blobs"]
GROUPS: Final[dict[Kind, str]] = {
    "method": "fedquilt.methods",
    "network": "fedquilt.networks",
    "data": "fedquilt.data",
    "loss": "fedquilt.losses",
    "transform": "fedquilt.transforms",
    "meter": "fedquilt.meters",
    "engine": "fedquilt.engines",
    "blobs": "fedquilt.blobs",
}
KIND_TITLES: Final[dict[Kind, str]] = {**{kind: kind for kind in GROUPS}, "data": "data set", "blobs": "blob backend"}
LOCAL_KINDS: Final = ("data", "meter")  # kinds that only agent.toml names
TARGET: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:name
ENTRY_POINT_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # possible names of entry points

_allowed: frozenset[str] | None = None  # packages and `module:name` plug-ins, or None for all installed packages
_allows_targets = True  # whether `module:name` plug-ins outside `_allowed` may be imported


@dataclass(frozen=True)
class Plugin:
    """Reference to an external object that is not imported yet."""

    kind: Kind
    name: str  # name in a job: of an entry point, or module:name
    target: str  # module:name
    package: str  # distribution, or the top-level module of `module:name`
    version: str  # "" without a distribution

    @property
    def module(self) -> str:
        """Name of the top-level module."""
        return self.target.partition(":")[0].partition(".")[0]

    def __str__(self) -> str:
        owner = f"package {self.package} {self.version}".strip() if self.version else f"module {self.module}"
        return f"{KIND_TITLES[self.kind]} {self.name!r} of {owner}" + (
            f" ({self.target})" if self.name != self.target else ""
        )


# -- lookup ---------------------------------------------------------------------------------------


def plugin_names(kind: Kind) -> list[str]:
    """Return the sorted names of a kind's plug-ins that this process may import. Nothing is imported."""
    return sorted({plugin.name for plugin in _list_allowed_plugins(kind)})


def plugin_fingerprints(
    kinds: Collection[Kind] = ("method", "network", "loss", "transform", "engine"),
) -> dict[str, str]:
    """Return the fingerprint of each plug-in by "plugin <module>", as in `Profile.versions`."""
    plugins = [plugin for kind in kinds for plugin in _list_allowed_plugins(kind)]
    plugins += [_plugin_from_target("network", name) for name in sorted(_allowed or ()) if TARGET.fullmatch(name)]
    return {f"plugin {plugin.module}": fingerprint(plugin) for plugin in plugins}


def package_plugins(name: str) -> list[Plugin]:
    """Return all plug-ins of an installed package, or []."""
    plugins = [plugin for kind in GROUPS for plugin in _list_allowed_plugins(kind)]
    return [plugin for plugin in plugins if _normalized_package(plugin.package) == _normalized_package(name)]


def usable_plugins(kind: Kind, builtin_names: Collection[str]) -> list[Plugin]:
    """Return the plug-ins of a kind with unambiguous names (see `name_conflicts`). Nothing is imported."""
    plugins = _list_allowed_plugins(kind)
    return [
        plugin
        for plugin in plugins
        if plugin.name not in builtin_names and sum(plugin.name == other.name for other in plugins) == 1
    ]


def name_conflicts(kind: Kind, builtin_names: Collection[str]) -> list[str]:
    """Return an error message for each name of a kind that several plug-ins or built-ins have."""
    conflicts = []
    for name in plugin_names(kind):
        try:
            find_plugin(kind, name, builtin_names)
        except JobError as error:
            conflicts.append(str(error))
    return conflicts


def find_plugin(kind: Kind, name: str, builtin_names: Collection[str] = ()) -> Plugin | None:
    """Return the plug-in of a name, or None for a built-in name in `builtin_names`. Nothing is imported.

    Raises:
        JobError: If the name is unknown or ambiguous, or the device's agent.toml does not allow the plug-in.
    """
    if ":" in name:
        return _plugin_from_target(kind, name)
    matches = [plugin for plugin in _list_allowed_plugins(kind) if plugin.name == name]
    if name in builtin_names:
        if matches:
            raise JobError(
                f"{matches[0]} has the name of fedquilt's own {KIND_TITLES[kind]} {name!r}: rename its entry point in "
                f"{GROUPS[kind]}, or uninstall {matches[0].package}"
            )
        return None
    if len(matches) > 1:
        owners = " and ".join(f"{plugin.package} {plugin.version}" for plugin in matches)
        raise JobError(
            f"{KIND_TITLES[kind]} {name!r} is ambiguous, {owners} have one: uninstall one package, or write "
            f"{matches[0].target!r}"
        )
    if matches:
        return matches[0]
    names = [*sorted(builtin_names), *plugin_names(kind)]
    forbidden = [plugin for plugin in _list_installed_plugins(kind, tuple(sys.path)) if plugin.name == name]
    if forbidden:
        raise JobError(f"{forbidden[0]} is not allowed here: add {forbidden[0].package!r} to `plugins` in agent.toml")
    raise JobError(
        f"{KIND_TITLES[kind]} {name!r} is unknown{toml.describe_choices(name, names)}; "
        "name your own as module:name, or install its package"
    )


def load_plugin(kind: Kind, name: str, builtin_names: Collection[str] = ()) -> Any:
    """Import and return the object of a name, or None for a built-in name. Raise JobError if this fails."""
    plugin = find_plugin(kind, name, builtin_names)
    return None if plugin is None else import_plugin(plugin)


def import_plugin(plugin: Plugin) -> Any:
    """Import and return the object of a plug-in, or raise JobError if it is missing or the import fails."""
    module, _, attribute = plugin.target.partition(":")
    with search_current_folder():
        try:
            imported_module = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and error.name in (module, plugin.module):
                fix = f"start the command in the folder of {plugin.module}.py, or install its package"
                raise JobError(f"{plugin}: module {error.name!r} was not found; {fix}") from None
            fix = "correct the module" + (f", or uninstall {plugin.package}" if plugin.version else "")
            problem = shorten_error(str(error)) or type(error).__name__
            raise JobError(
                f"{plugin} fails at import: {type(error).__name__}: {problem} ({_error_location(error)}); {fix}"
            ) from None
    if not hasattr(imported_module, attribute):
        names = [name for name in vars(imported_module) if not name.startswith("_")]
        raise JobError(
            f"{plugin}: {imported_module.__file__} has no {attribute!r}{toml.suggest_nearest(attribute, names)}"
        )
    return getattr(imported_module, attribute)


def wrong_kind_error(plugin: Plugin, expected: str, actual: Any) -> JobError:
    """Return the error for a plug-in whose object is not of the kind `expected`."""
    return JobError(f"{plugin} is a {type(actual).__name__} instead of {expected}: correct {plugin.target}")


# -- permission -----------------------------------------------------------------------------------


def restrict_plugins(allowed: Collection[str] | None) -> None:
    """Limit this process to the plug-ins that its device allows.

    Agents and their task processes call this once.

    Args:
        allowed: Packages and `module:name` plug-ins. None allows entry points of all packages, and no `module:name`.
    """
    global _allowed, _allows_targets
    _allowed, _allows_targets = None if allowed is None else frozenset(allowed), False


@contextmanager
def restrict_plugins_within(allowed: Collection[str] | None) -> Iterator[None]:
    """Limit this process to the allowed plug-ins within a `with` block."""
    global _allowed, _allows_targets
    previous = _allowed, _allows_targets
    restrict_plugins(allowed)
    try:
        yield
    finally:
        _allowed, _allows_targets = previous


@contextmanager
def search_current_folder() -> Iterator[None]:
    """Add the current folder to `sys.path` within a `with` block, except on a device."""
    if not _allows_targets:
        yield
        return
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


# -- fingerprints ---------------------------------------------------------------------------------


def fingerprint(plugin: Plugin) -> str:
    """Return package, version and sha256 of all files of a plug-in's module, as a `ShortText` in one line.

    Two machines with the same fingerprint run the same code.
    """
    return f"{plugin.package[:90]} {plugin.version[:44] or '-'} {module_digest(plugin.module)}"


def module_digest(module: str) -> str:
    """Return the sha256 of all files of a top-level module, or "unknown" without files.

    Nothing is imported.
    """
    with search_current_folder():
        return _compute_module_digest(module, tuple(sys.path))


def format_fingerprint(fingerprint_text: str) -> str:
    """Return version and short digest of a fingerprint, "1.0 (3fa1b2c4)", or "" if invalid."""
    _, _, digest = fingerprint_text.partition(" ")
    version, _, content = digest.partition(" ")
    return f"{'without version' if version == '-' else version} ({content[:8]})" if content else ""


def require_unchanged_modules(recorded_fingerprints: Mapping[str, str]) -> None:
    """Raise JobError if a module of a bundle's network has changed since `fedquilt prepare`.

    Modules without files on this machine are not checked.
    """
    for module, recorded_fingerprint in recorded_fingerprints.items():
        digest = module_digest(module)
        if digest != "unknown" and not recorded_fingerprint.endswith(f" {digest}"):
            package = recorded_fingerprint.partition(" ")[0]
            raise JobError(
                f"the bundle was prepared with package {package} {format_fingerprint(recorded_fingerprint)}, whose "
                f"files here differ ({digest[:8]}): prepare the bundle again with `fedquilt prepare`"
            )


def required_modules(kind: Kind, name: str, builtin_names: Collection[str] = ()) -> dict[str, str]:
    """Return the module that a device needs for a name, with its fingerprint, or {} if built in."""
    plugin = find_plugin(kind, name, builtin_names)
    return {} if plugin is None else {plugin.module: fingerprint(plugin)}


def allowlist_entries(kind: Kind, name: str, builtin_names: Collection[str] = ()) -> list[str]:
    """Return the entries of `plugins` in agent.toml that allow a name: its package, or `module:name`."""
    plugin = find_plugin(kind, name, builtin_names)
    return [] if plugin is None else [plugin.name if ":" in plugin.name else plugin.package]


@lru_cache(maxsize=64)
def _compute_module_digest(module: str, path: tuple[str, ...]) -> str:
    """Return the sha256 of a module's files, or "unknown" without files. `path` is only a cache key."""
    try:
        spec = util.find_spec(module)
    except (ImportError, ValueError):
        return "unknown"
    if spec is None:
        return "unknown"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]  # a namespace package may have several
    files = sorted((file.relative_to(folder).as_posix(), file) for folder in folders for file in _module_files(folder))
    if not folders and spec.origin and Path(spec.origin).is_file():
        files = [(Path(spec.origin).name, Path(spec.origin))]
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest() if files else "unknown"


def _module_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(root, name) for name in names if not name.endswith((".pyc", ".pyo")))


# -- installed packages ---------------------------------------------------------------------------


def _list_allowed_plugins(kind: Kind) -> list[Plugin]:
    # An ambiguous name is listed for each of its packages.
    plugins = _list_installed_plugins(kind, tuple(sys.path))
    allowed_packages = {_normalized_package(name) for name in _allowed or ()}
    return [
        plugin
        for plugin in plugins
        if kind in LOCAL_KINDS or _allowed is None or _normalized_package(plugin.package) in allowed_packages
    ]


@lru_cache(maxsize=16)  # per kind and search path: reading them takes longer than a small task
def _list_installed_plugins(kind: Kind, path: tuple[str, ...]) -> tuple[Plugin, ...]:
    if not any(_has_plugins(Path(folder)) for folder in path):
        return ()
    from importlib import metadata  # only here, because most devices have no plug-ins and save 1 MB

    plugins: dict[tuple[str, str], Plugin] = {}  # of several packages with one name, the first counts
    for distribution in metadata.distributions():
        try:
            entry_points = [
                entry_point for entry_point in distribution.entry_points if entry_point.group == GROUPS[kind]
            ]
            for entry_point in entry_points:
                if ENTRY_POINT_NAME.fullmatch(entry_point.name) and TARGET.fullmatch(entry_point.value):
                    package = str(distribution.metadata["Name"])
                    plugin = Plugin(kind, entry_point.name, entry_point.value, package, str(distribution.version))
                    plugins.setdefault((package, entry_point.name), plugin)
        except Exception:  # noqa: S112  (a package with damaged metadata has no plug-ins)
            continue
    return tuple(sorted(plugins.values(), key=lambda plugin: (plugin.name, plugin.package)))


def _has_plugins(folder: Path) -> bool:
    for file in folder.glob("*-info/entry_points.txt"):
        with contextlib.suppress(OSError):
            if b"[fedquilt." in file.read_bytes():
                return True
    return False


def _plugin_from_target(kind: Kind, name: str) -> Plugin:
    if not TARGET.fullmatch(name):
        raise JobError(f"{KIND_TITLES[kind]} {name!r} is invalid: write module:name, as in mine.networks:small")
    if kind not in LOCAL_KINDS and not _allows_targets and name not in (_allowed or ()):
        raise JobError(
            f"{KIND_TITLES[kind]} {name!r} is not allowed on this device: install its package here and add {name!r} to "
            "`plugins` in agent.toml"
        )
    from importlib import metadata

    top_module = name.partition(":")[0].partition(".")[0]
    try:
        version = metadata.version(top_module)
    except (metadata.PackageNotFoundError, ValueError):
        version = ""
    return Plugin(kind, name, name, top_module, version)


def _normalized_package(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _error_location(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "unknown line"
