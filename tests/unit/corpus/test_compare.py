"""Differences between cold and warm runs, and the noise of any two runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.corpus.compare import differences, normalised

FOLDER = "/tmp/corpus-abcdefgh"


def record(seed: int) -> dict[str, Any]:
    """Return the record of a worker that has imported its package."""
    return {
        "pid": 1000 + seed,
        "unseeded": {"random": 0.5 + seed, "uuid": f"id-{seed}", "hash of a text": seed},
        "seeded": {"random": 0.25},
        "globals": {
            "a.token": f"'7d2f{seed}'",
            "a.pid": str(1000 + seed),
            "a.version": "'1.20'",
            "a.generator": "generator 0123",
            "a.object": f"{140000000000000 + seed}",
        },
        "descriptors": ["pipe:[4711] write", f"{FOLDER}/tmp/tmpabcd1234/log both"],
        "shared maps": [],
        "threads": ["main", "pool-1"],
        "Python threads": ["MainThread False"],
        "children": [],
        "thread pools": ["openblas libopenblas 2"],
        "warning filters": ["('ignore', None)"],
        "logging": ["30"],
        "environment": {"RANK": str(seed % 4), "MODE": "fast"},
        "environment in C": {"RANK": str(seed % 4), "MODE": "fast"},
        "signal handlers": {"SIGTERM": "Handlers.SIG_DFL"},
        "settings": {"umask": 18, "folder": f"{FOLDER}/work"},
        "signal mask": [],
        "sys.path": [f"{FOLDER}/code", "/usr/lib"],
        "sys.meta_path": ["importlib.PathFinder"],
        "sys.path_hooks": [],
        "at exit": 2,
        "finalizers": 0,
    }


def run() -> dict[str, Any]:
    """Return a cold run of two rounds with two workers."""
    imported = {f"{number}-{rank}-imported": record(number * 2 + rank)
                for number in (1, 2) for rank in (0, 1)}  # fmt: skip
    used = {name.replace("imported", "used"): copy.deepcopy(one) for name, one in imported.items()}
    return {
        "folder": FOLDER,
        "exits": [0, 0],
        "workers": {**imported, **used},
        "files": {"end": ["tmp/tmpabcd1234/", "tmp/tmpabcd1234/a.txt", "work/run-17/"]},
        "processes": [],
        "output": {"0/stdout.log": "loss 0.25\nready\n"},
        "standby": "",
        "trouble": "",
    }


def other_run() -> dict[str, Any]:
    """Return another run of the same package with all differences that runs always show."""
    text = repr(run()).replace("corpus-abcdefgh", "corpus-zyxwvuts")
    text = (
        text.replace("tmpabcd1234", "tmp_99zz88x")
        .replace("4711", "5822")
        .replace("run-17", "run-8")
    )
    found: dict[str, Any] = eval(text)
    for number, one in enumerate(found["workers"].values()):
        one["pid"] += 100 + number
        one["unseeded"] = {"random": number / 8, "uuid": f"u{number}", "hash of a text": number}
        one["globals"]["a.token"] = f"'88e{number}'"
        one["globals"]["a.pid"] = str(one["pid"])
        one["globals"]["a.object"] = "140000000000009"
        one["sys.meta_path"].insert(0, "elasticjob_launcher.zygote.import_recorder.ImportRecorder")
        one["shared maps"] = ["/dev/zero (deleted)"]
    return found


def test_equal_runs_have_no_difference() -> None:
    assert differences([run()], other_run()) == []


def test_number_that_varies_at_one_stage_may_vary_at_a_later_one() -> None:
    cold, warm = run(), other_run()
    cold["workers"]["1-0-imported"]["at exit"] = 4
    warm["workers"]["2-1-used"]["at exit"] = 4
    assert differences([cold], warm) == []
    warm["workers"]["2-1-used"]["at exit"] = 5
    assert [str(one) for one in differences([cold], warm)] == [
        "at exit (used): count: cold 2, warm 5"
    ]


def each(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Return the change, applied to every worker of a run."""

    def made(found: dict[str, Any]) -> None:
        for one in found["workers"].values():
            change(one)

    return made


def last(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda found: change(found["workers"]["2-1-used"])


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "an agent's exit": ("exit", lambda run: run.update(exits=[0, 1])),
    "a job that did not end": ("exit", lambda run: run.update(trouble="waited in vain\nlog")),
    "a worker that was not there": ("exit", lambda run: run["workers"].pop("2-1-used")),
    "a file that is missing": ("files", lambda run: run["files"]["end"].pop(1)),
    "a second such folder": ("files", lambda run: run["files"]["end"].append("tmp/tmpaaaa1111/")),
    "a process left": ("processes left", lambda run: run.update(processes=["helper"])),
    "a line more": ("output", lambda run: run["output"].update(more="other words")),
    "a line less": ("output", lambda run: run["output"].update({"0/stdout.log": "ready"})),
    "a descriptor": ("descriptors", last(lambda one: one["descriptors"].append("socket:[1] both"))),
    "access": ("descriptors", last(lambda one: one["descriptors"].append("pipe:[1] read"))),
    "a shared map": ("shared maps", last(lambda one: one["shared maps"].append("/dev/shm/sem.1"))),
    "a thread": ("threads", each(lambda one: one["threads"].remove("pool-1"))),
    "a child": ("children", last(lambda one: one["children"].append("helper"))),
    "a variable": ("environment", last(lambda one: one["environment"].update(MODE="slow"))),
    "a variable in C": ("environment", last(lambda one: one["environment in C"].pop("MODE"))),
    "a new variable": ("environment", last(lambda one: one["environment"].update(NEW="1"))),
    "a handler": ("signal handlers", last(lambda one: one["signal handlers"].clear())),
    "a setting": ("settings", last(lambda one: one["settings"].update(umask=True))),
    "a search path": ("sys.path", last(lambda one: one["sys.path"].reverse())),
    "a finder": ("sys.meta_path", last(lambda one: one["sys.meta_path"].append("a.Finder"))),
    "a function at exit": ("at exit", last(lambda one: one.update({"at exit": 1}))),
    "a finalizer": ("finalizers", last(lambda one: one.update(finalizers=1))),
    "a filter": ("warning filters", each(lambda one: one["warning filters"].clear())),
    "one random number": ("unseeded", each(lambda one: one["unseeded"].update(random=0.5))),
    "another seeded number": ("seeded", each(lambda one: one["seeded"].update(random=0.75))),
    "one identifier": ("identifiers", each(lambda one: one["globals"].update({"a.token": "7"}))),
    "a generator's state": (
        "identifiers", each(lambda one: one["globals"].update({"a.generator": "generator ffff"})),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_one_difference_of_its_aspect(name: str) -> None:
    aspect, change = CHANGES[name]
    warm = other_run()
    change(warm)
    found = differences([run()], warm)
    assert {one.aspect for one in found} == {aspect}
    assert not any(one.documented for one in found)


def test_thread_pool_sizes_are_compared_as_numbers() -> None:
    warm = other_run()
    each(lambda one: one.update({"thread pools": ["openblas libopenblas 1"]}))(warm)
    assert {one.aspect for one in differences([run()], warm)} == {"thread pools"}


def test_values_that_vary_between_cold_runs_are_no_difference() -> None:
    warm, second = other_run(), run()
    for found in (warm, second):
        last(lambda one: one["threads"].append("late"))(found)
        found["files"]["end"].append("tmp/cache/")
    assert {one.aspect for one in differences([run()], warm)} == {"files", "threads"}
    assert differences([run(), second], warm) == []


def test_port_is_specific_to_a_run_and_thread_count_is_not() -> None:
    cold, warm = run(), other_run()
    for found, port in ((cold, "4711"), (warm, "5822")):
        for one in found["workers"].values():
            one["environment"].update(MASTER_PORT=port, THREADS="2")
    assert differences([cold], warm) == []
    each(lambda one: one["environment"].update(THREADS="1"))(warm)
    assert [one.item for one in differences([cold], warm) if one.where == "used"] == ["THREADS"]


@pytest.mark.parametrize(("here", "told"), [(0, False), (1, False), (4, False), (5, True)])
def test_varying_count_is_unsteady(here: int, told: bool) -> None:
    cold, warm = run(), other_run()
    last(lambda one: one["threads"].extend(["event"] * 2))(cold)
    last(lambda one: one["threads"].extend(["event"] * here))(warm)
    assert bool(differences([cold], warm)) is told


@pytest.mark.parametrize(("here", "told"), [(0, True), (1, False), (8, False), (9, True)])
def test_pool_that_grows_with_the_load_differs_if_it_is_absent_or_too_large(
    here: int, told: bool
) -> None:
    cold, warm = run(), other_run()
    each(lambda one: one["threads"].extend(["event_engine"] * 4))(cold)
    each(lambda one: one["threads"].extend(["event_engine"] * 4))(warm)
    assert differences([cold], warm) == []
    for _ in range(4):
        last(lambda one: one["threads"].remove("event_engine"))(warm)
    last(lambda one: one["threads"].extend(["event_engine"] * here))(warm)
    assert bool(differences([cold], warm)) is told


def test_import_output_in_zygote_log_is_documented() -> None:
    warm = other_run()
    warm["output"]["0/stdout.log"] = "ready"
    warm["standby"] = "loss 0.5"
    assert [one.documented for one in differences([run()], warm)] == ["import output"]


def test_order_of_import_hooks_is_documented_and_a_missing_one_is_not() -> None:
    cold, warm = run(), other_run()
    for found in (cold, warm):
        each(lambda one: one["sys.meta_path"].append("six.Importer"))(found)
    last(lambda one: one["sys.meta_path"].reverse())(warm)
    assert [one.documented for one in differences([cold], warm)] == ["order of imports"]
    last(lambda one: one["sys.meta_path"].remove("six.Importer"))(warm)
    assert "" in [one.documented for one in differences([cold], warm)]


def test_random_name_of_a_wandb_run_is_no_difference() -> None:
    cold, warm = run(), other_run()
    cold["files"]["end"].append("work/run-hpqqaiot.wandb")
    warm["files"]["end"].append("work/run-ab3qaiot.wandb")
    assert differences([cold], warm) == []


def test_address_of_the_service_of_wandb_is_no_difference() -> None:
    cold, warm = run(), other_run()
    for found, number in ((cold, 1700), (warm, 2900)):
        folder = f"{found['folder']}/tmp/wandb-{number}-{number + 7}-{number**3}"
        address = {"WANDB_SERVICE": f"3-{number}-unix-{folder}/socket"}
        found["workers"]["2-1-used"]["environment"].update(address)
    assert differences([cold], warm) == []
    warm["workers"]["2-1-used"]["environment"]["WANDB_SERVICE"] = "none"
    assert [one.item for one in differences([cold], warm)] == ["WANDB_SERVICE"]


def test_process_id_of_zygote_is_documented() -> None:
    warm = other_run()
    each(lambda one: one["globals"].update({"a.pid": "77"}))(warm)
    assert [one.documented for one in differences([run()], warm)] == ["process number"]


def test_shared_hash_seed_of_a_node_is_documented() -> None:
    warm = other_run()
    each(lambda one: one["unseeded"].update({"hash of a text": 1}))(warm)
    assert [one.documented for one in differences([run()], warm)] == ["hash seed"]


def test_import_time_is_named() -> None:
    cold, warm = run(), other_run()
    for number, one in enumerate(cold["workers"].values()):
        one["globals"]["a.began"] = str(1763850000.125 + number)
    each(lambda one: one["globals"].update({"a.began": "1763850000.5"}))(warm)
    assert [one.item for one in differences([cold], warm)] == ["time of import a.began"]


def test_only_topmost_differing_folder_is_named() -> None:
    warm = other_run()
    warm["files"]["end"] += ["tmp/other/", "tmp/other/a", "tmp/other/b/", "tmp/other/b/c"]
    assert [one.item for one in differences([run()], warm)] == ["tmp/other/"]


def test_files_named_after_the_second_count_once() -> None:
    cold, warm = run(), other_run()
    cold["files"]["end"] += ["work/debug-20261123_035210.log"]
    warm["files"]["end"] += ["work/debug-20261123_035310.log", "work/debug-20261123_035311.log"]
    assert differences([cold], warm) == []
    del warm["files"]["end"][-2:]
    assert [one.aspect for one in differences([cold], warm)] == ["files"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (f"{FOLDER}/tmp/tmpx1y2z3w4/a", "JOB/tmp/TMP/a"),
        (f"{FOLDER}/tmp/tmpx10x2fgh/a", "JOB/tmp/TMP/a"),
        ("debug-20261123_035210.log", "debug-TIME.log"),
        ("pid 4711 took 0.25 s", "pid N took N s"),
        ("<object at 0x7f00>", "<object at ADDRESS>"),
        ("7d5f1c9e-0b5e-4b8a-9d2c-0123456789ab", "ID"),
        ("run-e51xfa2l ends", "run-ID ends"),
        ("/dev/shm/sem.PBcHN (deleted)", "/dev/shm/sem.TMP (deleted)"),
        ("plain words only", "plain words only"),
    ],
)
def test_run_specific_text_is_normalised(text: str, plain: str) -> None:
    assert normalised(text, FOLDER) == plain
