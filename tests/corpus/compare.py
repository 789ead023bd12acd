"""Comparison of cold and warm runs. No I/O.

Variation between cold runs is no difference: a count must lie in the range of the cold workers, a
value must equal one of theirs. Random values (numbers, identifiers) must differ between the workers
if they do so in cold runs, and must be equal if they are equal there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Record = Mapping[str, Any]

_PAGE = "/dev/zero (deleted)"
"""Name in /proc of memory that is shared with other processes and has no file."""
STAGES = ("imported", "used", "used again")
_COUNTED = (
    "descriptors", "shared maps", "threads", "Python threads", "children",
    "warning filters", "logging",
)  # fmt: skip
_MAPPED = ("environment", "environment in C", "signal handlers", "settings")
_LISTED = ("thread pools", "signal mask", "sys.path", "sys.meta_path", "sys.path_hooks")
_NUMBERS = ("at exit", "finalizers")
# Properties documented in docs/warm-start.md: the aspect, the item's pattern, the property.
DOCUMENTED = (
    ("unseeded", "^hash of a text$", "hash seed"),
    ("identifiers", "^process number", "process number"),
    ("identifiers", r"\._fs_token_$", "addresses"),  # fsspec's key of an object, by its thread
    # uuids that torch uses as keys of attributes in its own process
    ("identifiers", r"^torch\.distributed\._composable\.contract\.", "keys"),
    ("environment", "^TORCHELASTIC_USE_AGENT_STORE$", "store"),
    ("output", "^in the standby's log: ", "import output"),
    ("sys.meta_path", "^order$", "order of imports"),
    ("threads", "^jemalloc_bg_thd$", "background thread of jemalloc"),
)

_TIME = "TIME"
"""Time of day to the second in a file's name; files made within one second share the name."""
_PATTERNS = (
    (r"(?<!\d)20\d{6}[-_T]?\d{6}(?!\d)", _TIME),
    (r"elasticjob-snapshots-[-\w]+", "elasticjob-snapshots-ID"),
    (r"(offline-run-TIME)-[a-z0-9]{8}\b", r"\1-ID"),  # of wandb
    (r"\brun-[a-z0-9]{8}(?=\.wandb)", "run-ID"),
    (r"\b\d+-\d+-unix-(\S*/wandb-)[-\d]+", r"N-N-unix-\1N"),  # its service, by process numbers
    (r"\d+%\|.*", "PROGRESS"),  # a bar is drawn again at intervals
    (r"tmp[a-z0-9_]{8}", "TMP"),  # before addresses: such a name may have "0x" in it
    (r"0x[0-9a-fA-F]+", "ADDRESS"),
    (r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", "ID"),
    (r"(/memfd:[\w-]+)-\w{8}\b", r"\1-ID"),
    (r"\bsem\.\w{4,}", "sem.TMP"),
    (r"\b(pymp|psm|mp|listener|pym-\d+)[-_][a-z0-9_]{8}\b", "TMP"),
    (r"\b(?=\w*\d)(?=\w*[a-zA-Z])\w{8,}\b", "ID"),
)  # fmt: skip
_PER_RUN = re.compile(r"^(MASTER_|TORCHELASTIC_|ELASTICJOB_)|RANK$")
"""Variables whose numbers differ between runs, rounds or workers."""
_GROWING = re.compile("^event_engine$")
"""Threads of pools that grow while the machine is busy: gRPC's."""
_UNSTEADY = 2
"""Factor on the maximum of a count that varies between cold workers, allowed in a warm one."""
_NUMBER = r"\d+(\.\d+)*"


@dataclass(frozen=True)
class Difference:
    """Difference in one aspect between warm and cold runs; `documented` names a property."""

    aspect: str
    where: str
    item: str
    cold: str
    warm: str
    documented: str = ""

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.aspect}{where}: {self.item}: cold {self.cold}, warm {self.warm}"


def differences(colds: Sequence[Record], warm: Record) -> list[Difference]:
    """Return all differences of a warm run from one or more cold runs of the same package."""
    found = [
        *_ends(colds, warm),
        *_files(colds, warm),
        *_output(colds, warm),
        *_drawn(colds, warm),
        *_identifiers(colds, warm),
    ]
    for stage in STAGES:
        found += _stage(stage, colds, warm)
    return list(dict.fromkeys(_with_property(one) for one in found))


def exact(text: str, folder: str = "") -> str:
    """Return the text without addresses, temporary names and identifiers, unique to each run."""
    if folder:
        text = text.replace(folder, "JOB")
    for pattern, word in _PATTERNS:
        text = re.sub(pattern, word, text)
    return text


def normalised(text: str, folder: str = "") -> str:
    """Return the text without the parts that `exact` removes and without numbers."""
    return re.sub(_NUMBER, "N", exact(text, folder))


def _with_property(one: Difference) -> Difference:
    for aspect, pattern, name in DOCUMENTED:
        if one.aspect == aspect and re.search(pattern, one.item):
            return Difference(one.aspect, one.where, one.item, one.cold, one.warm, name)
    return one


# --- the run


def _ends(colds: Sequence[Record], warm: Record) -> Iterator[Difference]:
    if warm["trouble"] and not any(cold["trouble"] for cold in colds):
        yield Difference("exit", "", "job", "went as expected", warm["trouble"].splitlines()[0])
    if warm["exits"] not in [cold["exits"] for cold in colds]:
        yield Difference("exit", "", "agents", str(colds[0]["exits"]), str(warm["exits"]))
    here = sorted(warm["workers"])
    if here not in [sorted(cold["workers"]) for cold in colds]:
        missing = sorted(set(colds[0]["workers"]) - set(here))
        more = sorted(set(here) - set(colds[0]["workers"]))
        yield Difference(
            "exit", "", "what workers did", ", ".join(missing) or "-", ", ".join(more) or "-"
        )
    counts = [_counted(cold["processes"], cold["folder"]) for cold in colds]
    yield from _outside("processes left", "", counts, [_counted(warm["processes"], warm["folder"])])


def _files(colds: Sequence[Record], warm: Record) -> Iterator[Difference]:
    for moment in sorted(warm["files"]):
        counts = [_named(cold["files"].get(moment, ()), cold["folder"]) for cold in colds]
        here = [_named(warm["files"][moment], warm["folder"])]
        told: list[str] = []
        for one in _outside("files", moment, counts, here):
            if not one.item.startswith(tuple(told)):  # the contents of such a folder add nothing
                yield one
            if one.item.endswith("/"):
                told.append(one.item)


def _named(paths: Iterable[str], folder: str) -> Counter[str]:
    """Count files by name; names that contain a time of day count once, see `_TIME`."""
    counts = _counted(paths, folder)
    return Counter({name: 1 if _TIME in name else number for name, number in counts.items()})


def _output(colds: Sequence[Record], warm: Record) -> Iterator[Difference]:
    there = set().union(*(_lines(cold) for cold in colds))
    always = set.intersection(*(_lines(cold) for cold in colds))
    here = _lines(warm)
    standbys = {normalised(line.strip(), warm["folder"]) for line in warm["standby"].splitlines()}
    for line in sorted(always - here):
        item = f"in the standby's log: {line}" if line in standbys else line
        yield Difference("output", "", item, "there", "missing")
    for line in sorted(here - there):
        yield Difference("output", "", line, "missing", "there")


def _lines(run: Record) -> set[str]:
    """Return the lines of all workers, normalised; stacks differ in frames below the program."""
    found = set()
    for text in run["output"].values():
        for line in text.replace("\r", "\n").splitlines():
            if line.strip():
                found.add(normalised(line.strip(), run["folder"]))
    return found


# --- the workers at a stage


def _stage(stage: str, colds: Sequence[Record], warm: Record) -> Iterator[Difference]:
    there = [one for cold in colds for one in _records(cold, stage)]
    here = _records(warm, stage)
    if not there or not here:
        return
    if stage == "imported":  # a use may import modules that were preloaded, see docs
        there += [one for cold in colds for one in _records(cold, "used")]
    for aspect in _COUNTED:
        counts = [_counted(one[aspect], folder) for one, folder in there]
        yield from _outside(
            aspect, stage, counts, [_counted(_plain(one[aspect]), folder) for one, folder in here]
        )
    for aspect in _MAPPED:
        yield from _mapped(aspect, stage, there, here)
    for aspect in _LISTED:
        values = [(_plain(one[aspect]), folder) for one, folder in there]
        ours = [(_plain(one[aspect]), folder) for one, folder in here]
        found = [*_unlike(aspect, stage, "all of it", values, ours)]
        if found and aspect == "sys.meta_path":
            # Packages append their hooks in the order of their imports.
            others = [*_unlike(aspect, stage, "all of it", _sorted(values), _sorted(ours))]
            found = others or [replace(one, item="order") for one in found]
        yield from found
    for aspect in _NUMBERS:
        numbers = [one[aspect] for one, _ in there]
        spread = max(max(numbers) - min(numbers), *(_spread(aspect, s, colds) for s in STAGES))
        for one, _ in here:
            if not max(numbers) - spread <= one[aspect] <= min(numbers) + spread:
                yield Difference(aspect, stage, "count", _range(numbers), str(one[aspect]))


def _spread(aspect: str, stage: str, runs: Sequence[Record]) -> int:
    """Return the difference between the most and the least that a worker has at the stage."""
    numbers = [one[aspect] for run in runs for one, _ in _records(run, stage)]
    return max(numbers) - min(numbers) if numbers else 0


def _records(run: Record, stage: str) -> list[tuple[Record, str]]:
    return [
        (record, run["folder"])
        for name, record in sorted(run["workers"].items())
        if name.split("-", 2)[2] == stage
    ]


def _sorted(values: Sequence[tuple[Any, str]]) -> list[tuple[Any, str]]:
    return [(sorted(value), folder) for value, folder in values]


def _plain(value: Any) -> Any:
    """Return the list without the import listener and its page, which are documented."""
    found = [one for one in value if not str(one).endswith(".ImportRecorder")]
    if _PAGE in found:
        found.remove(_PAGE)
    return found


def _mapped(
    aspect: str,
    stage: str,
    there: Sequence[tuple[Record, str]],
    here: Sequence[tuple[Record, str]],
) -> Iterator[Difference]:
    names = {name for one, _ in (*there, *here) for name in one[aspect]}
    kind = "environment" if aspect == "environment in C" else aspect
    for name in sorted(names):
        values = [(one[aspect].get(name), folder) for one, folder in there]
        ours = [(one[aspect].get(name), folder) for one, folder in here]
        yield from _unlike(kind, stage, name, values, ours, bool(_PER_RUN.search(name)))


def _unlike(
    aspect: str,
    where: str,
    item: str,
    there: Sequence[tuple[Any, str]],
    here: Sequence[tuple[Any, str]],
    varies: bool = False,
) -> Iterator[Difference]:
    """Yield warm values equal to no cold value; numbers are ignored if cold values vary."""
    varies = varies or len({_text(value, exact, folder) for value, folder in there}) > 1
    form = normalised if varies else exact
    values = {_text(value, form, folder) for value, folder in there}
    for text in sorted({_text(value, form, folder) for value, folder in here} - values):
        yield Difference(aspect, where, item, " or ".join(sorted(values)), text)


def _text(value: Any, form: Callable[[str, str], str], folder: str) -> str:
    return form(value if isinstance(value, str) else json.dumps(value), folder)


def _counted(items: Iterable[str], folder: str) -> Counter[str]:
    return Counter(normalised(item, folder) for item in items)


def _outside(
    aspect: str, where: str, there: Sequence[Counter[str]], here: Sequence[Counter[str]]
) -> Iterator[Difference]:
    """Yield items whose warm count is outside the range expected from the cold runs."""
    for item in sorted(set().union(*there, *here)):
        numbers = [count[item] for count in there]
        low, high = min(numbers), max(numbers)
        depends_on_load = aspect == "threads" and bool(_GROWING.search(item))
        if low < high or depends_on_load:  # depends on timing, such as a pool's threads
            low, high = min(low, 1), high * _UNSTEADY
        wrong = {count[item] for count in here if not low <= count[item] <= high}
        for number in sorted(wrong):
            yield Difference(aspect, where, item, _range(numbers), str(number))


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


# --- random values


def _drawn(colds: Sequence[Record], warm: Record) -> Iterator[Difference]:
    there = [one for cold in colds for one, _ in _records(cold, "imported")]
    here = [one for one, _ in _records(warm, "imported")]
    for aspect in ("unseeded", "seeded"):
        for name in sorted({name for one in there for name in one[aspect]}):
            yield from _pattern(
                aspect, name, [one[aspect].get(name) for one in there],
                [one[aspect].get(name) for one in here],
            )  # fmt: skip


def _pattern(
    aspect: str, name: str, cold: Sequence[Any], warm: Sequence[Any]
) -> Iterator[Difference]:
    """Yield a difference if the warm values are not distinct (or equal) as all cold ones are."""
    if None in cold or None in warm or not warm:
        return  # the library was not loaded everywhere
    if len(set(cold)) == len(cold) > 1:
        if len(set(warm)) < len(warm):
            yield Difference(
                aspect,
                "",
                name,
                "differs in each worker",
                f"{len(set(warm))} of {len(warm)} values",
            )
    elif len(set(cold)) == 1 and set(warm) != set(cold):
        yield Difference(aspect, "", name, str(cold[0]), " or ".join(sorted(map(str, set(warm)))))


def _identifiers(colds: Sequence[Record], warm: Record) -> Iterator[Difference]:
    """Yield differences between the values that modules keep."""
    there = [one for cold in colds for one in _records(cold, "imported")]
    here = _records(warm, "imported")
    if not there or not here:
        return
    names = set.intersection(*(set(one["globals"]) for one, _ in there))
    for name in sorted(names):
        values = [one["globals"][name] for one, _ in there]
        ours = [(one["globals"][name], folder) for one, folder in here if name in one["globals"]]
        plain = {normalised(one["globals"][name], folder) for one, folder in there}
        if not ours or _is_address(values):
            continue
        if len(set(values)) == len(values):
            raw = [value for value, _ in ours]
            if len(set(raw)) < len(raw):
                kind = _kind(values, [one["pid"] for one, _ in there])
                yield Difference(
                    "identifiers", "", f"{kind}{name}", "differs in each worker",
                    f"{len(set(raw))} of {len(raw)} values",
                )  # fmt: skip
        elif len(set(values)) == 1:
            for value in sorted({normalised(value, folder) for value, folder in ours} - plain):
                yield Difference("identifiers", "", name, " or ".join(sorted(plain)), value)


def _kind(values: Sequence[str], pids: Sequence[int]) -> str:
    if all(str(pid) in value for value, pid in zip(values, pids, strict=True)):
        return "process number "
    if all(re.fullmatch(r"1[6-9]\d{8}(\d{3})*(\.\d+)?", value) for value in values):
        return "time of import "
    return ""


def _is_address(values: Sequence[str]) -> bool:
    """Return True for addresses of objects (`id`, a ctypes pointer), which carry no information."""
    return all(re.fullmatch(r"\d{15}", value) or "0x" in value for value in values)
