"""Guarded imports in the zygote: modules that all workers can share, and no others.

All later workers share these modules, so they must not depend on a worker's identity. The guard
refuses the user's own modules and modules that read, while being imported, a rank or a variable
that the user's program sets at an unknown time or to an unknown value.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

from elasticjob_launcher.zygote.analysis.program_imports import WantedImport
from elasticjob_launcher.zygote.effects.identifiers import GENERATORS, RANKED, calling_module
from elasticjob_launcher.zygote.effects.import_effects import Effects, described
from elasticjob_launcher.zygote.effects.kept_values import UNKNOWN_RANK, is_unknown_rank
from elasticjob_launcher.zygote.fork_safety import bad_fork_in_worker, thread_count, unfit_for_fork
from elasticjob_launcher.zygote.worker_environment import RANKS, is_rank

PLUGINS = ("elasticjob_torchrun", "elasticjob_rendezvous")
"""Packages of ours that torch's elastic modules import through entry points: from the folder that
the launcher adds to PYTHONPATH, and from an installation of ElasticJob."""
PLUGIN_VARIABLE = "ELASTICJOB_TORCHRUN"
"""Variable that the plug-in reads then; only the command of a node has it, and no worker."""

MAX_ENTRIES = 10_000
"""Maximum number of entries of a folder among which metadata of packages is searched: a working
folder may have a data set in it."""
MAX_RECORD_BYTES = 8 * 1024 * 1024

# Importing these has visible effects or fails.
NEVER = frozenset({"__main__", "antigravity", "idlelib", "lib2to3", "test", "this", "turtle"})


class ImportRefused(BaseException):
    """Import refused in the zygote. Not an Exception, because libraries catch those."""


class ImportGuard:
    """Import finder ahead of all others, and observer of environment access during imports.

    `refusals` holds the refused items with the reason. After a refusal this process is no longer
    clean: parts of the refused package stay loaded.

    Args:
        sets: variables that the program sets.
        applied: those of them that have, at each import here, the value that they have there.
        startup: True for the code that Python runs at each start, before the program.
    """

    def __init__(
        self,
        sets: Collection[str],
        allowed: Collection[str],
        excluded: Collection[str] = (),
        on_temporary: Callable[[str], object] = lambda path: None,
        applied: Collection[str] = (),
        startup: bool = False,
    ) -> None:
        self._sets = frozenset(sets)
        self._unread = self._uncertain = self._sets - frozenset(applied)
        self._allowed = frozenset([*PLUGINS, *(name.partition(".")[0] for name in allowed)])
        self._excluded = frozenset(excluded)
        self.effects = Effects(on_temporary, startup)
        self._places = _installed_folders()
        self.refusals: dict[str, str] = {}
        self._item = ""
        self._damaged = self._hooked = False
        # Filters show a DeprecationWarning of an import in `__main__` alone.
        self._main: dict[str, Any] = {}

    def exclude(self, names: Collection[str]) -> None:
        """Replace the modules that must not be loaded."""
        self._excluded = frozenset(names)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Guard the imports within the `with` block."""
        both: Any = (os.environ, os.environb)
        plain = both[0]._data
        reporting = _ReportingDict(plain, self._check_read, self._changed)
        for environ in both:
            environ._data = reporting
        sys.meta_path.insert(0, self)
        self.effects.start()
        try:
            yield
        finally:
            self.effects.stop()
            sys.meta_path.remove(self)
            for environ in both:
                environ._data = plain
            reporting.end()

    def load(self, wanted: WantedImport, in_order: bool = True, line: int = 0) -> None:
        """Import a module, or record the refusal. The program itself reports a missing module.

        `in_order` is False if the program may import it before it sets some of its variables.
        `line` is that of the import in `__main__`, which warnings name.
        """
        self._unread = self._uncertain if in_order else self._sets
        code = _import_statement(line) if line else None

        def imports() -> None:
            # Like the import statement, which also imports names that are modules.
            for name in (*wanted.names, "__name__"):
                with suppress(ImportRefused, ImportError):  # the program reports a missing module
                    if code is None:
                        __import__(wanted.module, None, None, (name,))
                    else:
                        exec(code, self._names_of_main(wanted.module, name))

        self.run(wanted.module, imports)

    def _names_of_main(self, module: str, name: str) -> dict[str, Any]:
        """Return the globals of `_import_statement`; `__package__` marks its frames as ours."""
        self._main = self._main or {**vars(sys.modules["__main__"]), "__package__": __package__}
        self._main.update(module=module, name=name)
        return self._main

    def run(self, item: str, action: Callable[[], object]) -> None:
        """Run imports on behalf of `item`, or record the refusal."""
        self._item = item
        fit = thread_count() == 1 and not self._damaged  # otherwise an earlier import is the cause
        hooks = list(sys.meta_path)
        self.effects.begin()
        try:
            action()
        except ImportRefused:
            pass
        except BaseException as error:
            self._refuse(f"it cannot be imported: {type(error).__name__}: {error}")
        effects = self.effects.found()
        trouble = ""
        if fit and thread_count() == 1 and item not in self.refusals:
            trouble = unfit_for_fork() or bad_fork_in_worker()
        if trouble:
            self._refuse(trouble)
            self._damaged = True
        elif any(each.module == item or not (each.module or self._hooked) for each in effects):
            self._refuse(f"it {described(effects)}")
        for reason, module in effects:
            if module:
                self.refusals.setdefault(module, f"it {reason}")
        # Such a hook runs during later imports: the next process, without it, attributes effects.
        self._hooked = self._hooked or (item in self.refusals and sys.meta_path != hooks)

    def admits(self, name: str) -> bool:
        """Return True if the module's top-level package is an installed one."""
        top = name.partition(".")[0]
        module = sys.modules.get(top)
        try:
            spec = importlib.util.find_spec(top) if module is None else module.__spec__
        except (ImportError, ValueError, AttributeError):
            return False
        return spec is not None and self.installed(spec)

    def installed(self, spec: Any) -> bool:
        """Return True if the spec belongs to Python or an installed package, not to the user."""
        if spec.origin in ("built-in", "frozen"):
            return True
        places = list(spec.submodule_search_locations or ())
        if spec.origin and os.path.isabs(spec.origin):  # noqa: PTH117
            places.append(spec.origin)
        # Empty: made by a loaded package.
        return all(self._is_installed(place) or _is_recorded(spec.name, place) for place in places)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a spec through the other finders; refuse to load excluded modules and the user's.

        A library may only look for a module (`importlib.util.find_spec`), as torch._dynamo does for
        pandas: the spec is found, and refused when it is loaded.
        """
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find is not None else None
            if spec is not None:
                if name in self._excluded:
                    return self._refused(spec, _imports(name))
                if path is None and name not in self._allowed and not self.installed(spec):
                    return self._refused(spec, f"it imports {name}, which is your own")
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _LoaderWrapper(
                        spec.loader, self._begins, self._loaded, self._failed
                    )
                return spec
        return None

    def _begins(self, name: str) -> None:
        self.effects.identifiers.attribute(_innermost_module)
        self.effects.settings.module_begins(name, _innermost_module)

    def _failed(self) -> None:
        self.effects.settings.module_failed()

    def _loaded(self, name: str) -> None:
        self.effects.module_loaded(name)
        self.effects.identifiers.attribute(lambda: name)
        if name in GENERATORS:
            self.effects.identifiers.loaded(name)

    def _refused(self, spec: Any, reason: str) -> Any:
        spec.loader = _RefusingLoader(spec.loader, lambda: self._refuse_importers(reason))
        return spec

    def _refuse_importers(self, reason: str) -> None:
        """Refuse the modules that cannot be loaded without that import; none for a direct request.

        A request by this process itself, or by a package that loads its parts when they are used,
        leaves nothing half-loaded: the workers load that part.
        """
        for module in _loading_modules():
            self.refusals.setdefault(module, reason)

    def _is_installed(self, place: str) -> bool:
        for each in (place, os.path.realpath(place)):
            # Includes packages of another environment on this one's path.
            if any(folder in f"{each}/" for folder in ("/site-packages/", "/dist-packages/")):
                return True
            if each.startswith(self._places):
                return True
        return False

    def _check_read(self, name: str, there: bool) -> None:
        if name in self._unread and calling_module():
            self._refuse_reader(f"it reads {name}, which your program sets")
            raise ImportRefused(name)
        if name == PLUGIN_VARIABLE:
            return
        if is_rank(name) and not there and _innermost_module() not in RANKED:
            self._refuse_reader(f"it reads {name} when it is imported")
            raise ImportRefused(name)

    def _refuse_reader(self, reason: str) -> None:
        """Refuse the module being loaded and those that import it, or the item if none is."""
        reader, *importers = _loading_modules() or [self._item]
        self.refusals.setdefault(reader, reason)
        for module in importers:
            self.refusals.setdefault(module, _imports(reader))

    def _changed(self, name: str) -> None:
        if name in self._sets and calling_module():
            self._refuse(f"it changes {name}, which your program sets")

    def _refuse(self, reason: str) -> None:
        self.refusals.setdefault(self._item, reason)


def _import_statement(line: int) -> CodeType:
    """Return code that imports `name` from `module`, as at that line of the program."""
    statement = "__import__(module, None, None, (name,))"
    path = getattr(sys.modules["__main__"], "__file__", None) or "<string>"
    return compile("\n" * (line - 1) + statement, path, "exec", dont_inherit=True)


def _imports(name: str) -> str:
    return f"it imports {name}, which is not preloaded"


def _loading_modules() -> list[str]:
    """Return the modules whose code is on the stack, innermost first."""
    found = []
    frame: Any = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "<module>" and name in sys.modules and name != "__main__":
            found.append(name)
        frame = frame.f_back
    return list(dict.fromkeys(found))


def _innermost_module() -> str:
    """Return the module being loaded; empty if none is."""
    return next(iter(_loading_modules()), "")


class _LoaderWrapper:
    """Loader wrapper that calls back around a module's code and leaves no trace of itself."""

    def __init__(
        self,
        loader: Any,
        before: Callable[[str], object],
        then: Callable[[str], object],
        failed: Callable[[], object],
    ) -> None:
        self._loader = loader
        self._before = before
        self._then = then
        self._failed = failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._before(module.__name__)
        try:
            self._loader.exec_module(module)
        except BaseException:
            self._failed()
            raise
        self._then(module.__name__)

    # `warnings` passes over frames of such a file, and counts `stacklevel` without them.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")


class _RefusingLoader:
    """Loader wrapper of a module that may be looked for but not loaded."""

    def __init__(self, loader: Any, refuse: Callable[[], object]) -> None:
        self._loader = loader
        self._refuse = refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        self._refuse()
        raise ImportRefused(spec.name)

    def exec_module(self, module: Any) -> None:
        raise AssertionError(f"{module.__name__} must not be loaded")  # never created


class _ReportingDict(dict):  # type: ignore[type-arg]
    """Dictionary for `os.environ` that reports each name looked up or changed.

    A package that reads it as a whole finds a worker's ranks too, with the value `UNKNOWN_RANK`.
    """

    def __init__(self, content: Any, read: Any, changed: Any) -> None:
        super().__init__(content)
        self._content = content
        self._read = read
        self._changed = changed
        self._last: Any = None
        self._next: dict[Any, Any] = {}
        self._ended = False

    def end(self) -> None:
        """Be the content from now on: a package may have kept `copy.copy(os.environ)`."""
        self._ended = True

    def __deepcopy__(self, memo: Any) -> Any:
        return {name: self[name] for name in self}

    def __len__(self) -> int:
        return len(self._content)

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            return iter(self._content)
        names = [*super().__iter__()]
        if names and calling_module(unless="subprocess"):  # whose processes have no rank
            ranks = [rank for rank in map(os.fsencode, sorted(RANKS)) if rank not in names]
            names += ranks
            orders = (names, sorted(names))  # of a copy
            self._next = {rank: {each[each.index(rank) - 1] for each in orders} for rank in ranks}
        return iter(names)

    def __contains__(self, key: Any) -> bool:
        if self._ended:
            return key in self._content
        there = super().__contains__(key)
        self._read(os.fsdecode(key), there)
        return there

    def __getitem__(self, key: Any) -> Any:
        if self._ended:
            return self._content[key]
        last, self._last = self._last, key
        there = super().__contains__(key)
        if not there and last is not None and last in self._next.get(key, ()):
            return UNKNOWN_RANK.encode()  # in a copy of the whole environment
        self._read(os.fsdecode(key), there)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if is_unknown_rank(value):  # of a copy that is put back
            os.unsetenv(key)
            return
        if not self._ended:
            self._changed(os.fsdecode(key))
        super().__setitem__(key, value)
        self._content[key] = value

    def __delitem__(self, key: Any) -> None:
        if not self._ended:
            self._changed(os.fsdecode(key))
            super().__delitem__(key)
        del self._content[key]


def is_excluded(name: str, excluded: Collection[str]) -> bool:
    """Return True if a module or one of its parent packages is excluded."""
    parts = name.split(".")
    packages = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return parts[0] in NEVER or any(package in excluded for package in packages)


def _is_recorded(name: str, place: str) -> bool:
    """Return True if the folder of the top-level module is one of `pip install --target`.

    Such a folder, on PYTHONPATH, has the metadata of its packages beside them. A project that is
    installed as editable has none in its folder.
    """
    folder, entry = os.path.split(place)
    if entry.partition(".")[0] == "__init__":
        folder, entry = os.path.split(folder)
    for _ in range(name.count(".")):
        folder, entry = os.path.split(folder)
    return entry in recorded_entries(folder)


@functools.lru_cache(maxsize=None)
def recorded_entries(folder: str) -> frozenset[str]:
    """Return the files and folders of a folder that the RECORD files of its packages list."""
    found: set[str] = set()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in itertools.islice(entries, MAX_ENTRIES):
            if entry.name.endswith(".dist-info"):
                found.update(_recorded(os.path.join(entry.path, "RECORD")))  # noqa: PTH118
    return frozenset(found - {"", ".", ".."})


def _recorded(record: str) -> Iterator[str]:
    """Yield the first part of each path in a RECORD file, which is relative to its folder."""
    if not os.path.isfile(record):  # noqa: PTH113
        return  # such as a pipe, which nobody may write to
    with suppress(OSError), open(record, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        for line in file.read(MAX_RECORD_BYTES).splitlines():
            path = line[1:].partition('"')[0] if line[:1] == '"' else line.partition(",")[0]
            yield path.partition("/")[0]


def _installed_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and installed packages, with trailing slash."""
    found = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    if hasattr(site, "getsitepackages"):  # missing if an old virtualenv replaced the module
        found += site.getsitepackages()
        if site.ENABLE_USER_SITE:
            found.append(site.getusersitepackages())
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    found += [os.path.join(sys.base_prefix, "lib", version)]  # noqa: PTH118
    real = [os.path.realpath(path) for path in found if path]
    places = (path.rstrip("/") + "/" for path in [*found, *real] if path)
    return tuple(dict.fromkeys(places))
