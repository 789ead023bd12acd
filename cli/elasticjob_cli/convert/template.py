"""Conversion of a PyTorchJob's replica templates to the pod template of an ElasticJob.

torchrun is removed from the trainer's command, as the operator does; its numbers are kept as
fields of the job.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from elasticjob_cli.convert.field_reader import Json, Part, Remark
from elasticjob_operator.domain.manifests.names import AGENT_CONTAINER
from elasticjob_operator.domain.manifests.pod import PodSettings, traits_of
from elasticjob_operator.domain.manifests.sidecar import resources
from elasticjob_operator.domain.manifests.torchrun import TORCHRUN, CannotUnwrap
from elasticjob_operator.domain.manifests.trainer_command import LaunchSpec, trainer_command
from elasticjob_operator.model.problems import Location, field_path
from elasticjob_operator.model.types import Launch

_KEPT = {
    "--nproc-per-node": "nprocPerNode",
    "--num-processes": "nprocPerNode",
    "--max-restarts": "maxRestarts",
}


@dataclass(frozen=True, slots=True)
class Command:
    """Command without its launcher.

    Args:
        launched: set if a launcher such as torchrun was removed, or runs once for each pod.
        changed: set if a launcher was removed.
        note: description of the removed parts, or of the launch.
        workers: number of workers per node by the removed launcher's options; empty if they name
            none.
        restarts: number of restarts by these options; empty if they name none.
    """

    command: tuple[str, ...]
    args: tuple[str, ...]
    launched: bool
    changed: bool
    note: str
    workers: str = ""
    restarts: str = ""


def option(words: Sequence[str], name: str, abbreviated: bool = False) -> str | None:
    """Return the value of a launcher's option in any spelling; None if it is not given.

    `abbreviated`: True if the words are torchrun's options alone. An abbreviation of one of them,
    such as `--max-res`, may be an option of the script.
    """
    for index, word in enumerate(words):
        key, equals, value = (TORCHRUN.full(word) if abbreviated else word).partition("=")
        if key.replace("_", "-") == name:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


def without_launcher(command: Sequence[str], args: Sequence[str]) -> Command:
    """Return the command that each worker runs.

    Raises:
        CannotUnwrap: no way of launching the command is safe.
    """
    words = (*command, *args)
    found = trainer_command(command, args, None, LaunchSpec(single=True))
    if found.mode is Launch.PER_NODE:
        note = f"runs once for each pod (spec.launch PerNode): {found.message}"
        unchanged = Command(tuple(command), tuple(args), True, False, note)
        workers = option(launcher_words(words, unchanged), "--nproc-per-node")
        return replace(unchanged, workers=workers or "")
    if found.launcher is None:
        return Command(tuple(command), tuple(args), False, False, "")
    # Unlike in a pod, some options keep their effect here: they become fields of the job.
    note = found.note_with("its options left out")
    left_out = [word for text in found.dropped for word in text.split(" ", 1)]
    restarts = option(left_out, "--max-restarts", found.launcher.abbreviates) or ""
    given = {"--max-restarts": restarts}
    kept = [
        f"{name} became {field}"
        for name, field in _KEPT.items()
        if option(words, name) or given.get(name)
    ]
    note = "; ".join([note, *kept])
    return Command(found.words, found.args, True, True, note, found.workers, restarts)


def launcher_words(words: Sequence[str], command: Command) -> tuple[str, ...]:
    """Return the words among which the launcher's options are: those of a shell line, too, if the
    launcher was not removed."""
    if command.launched and not command.changed:
        return tuple(part for word in words for part in word.split())
    return tuple(words)


TRAINER = "pytorch"
"""Name of a PyTorchJob's training container, by its operator's convention."""
_PORT = "pytorchjob-port"
_LAUNCH_ENV = re.compile(r"PET_[A-Z0-9_]+")
_GIVEN_ENV = re.compile(r"MASTER_ADDR|MASTER_PORT|(LOCAL_)?WORLD_SIZE|(LOCAL_|NODE_)?RANK")
_MASTER = re.compile(r"\$\(MASTER_(ADDR|PORT)\)|\$\{?MASTER_(ADDR|PORT)")


@dataclass(frozen=True, slots=True)
class Template:
    """New template, with the job settings found in its trainer container.

    Args:
        trainer: name of the training container; empty if it is the only one.
        launched: set if torchrun or a similar launcher starts the script.
        workers, restarts: the launcher's values, from options or variables.
    """

    document: Json
    trainer: str
    launched: bool
    workers: str | None
    restarts: str | None


def convert_template(source: Part, job: str) -> Template:
    """Convert one replica's template. Raises `Unconvertible`."""
    document = copy.deepcopy(dict(source.value))
    spec = document.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not _are_containers(containers):
        raise source.refused("spec", "must have containers")
    _clean_metadata(document)
    _clean_pod(spec, source, job)
    index = next((i for i, one in enumerate(containers) if one.get("name") == TRAINER), 0)
    at = Part(containers[index], (*source.location, "spec", "containers", index), source.remarks)
    environment = _clean_environment(containers[index], at)
    _clean_ports(containers[index], at)
    command = _command(at)
    words = launcher_words(_words(at), command)
    if command.changed:
        containers[index]["command"] = list(command.command)
        containers[index].pop("args", None)
    _warn_of_master(containers[index], at, job)
    return Template(
        document=document,
        trainer=str(containers[index].get("name", "")) if len(containers) > 1 else "",
        launched=command.launched,
        workers=command.workers or environment.get("PET_NPROC_PER_NODE"),
        restarts=command.restarts
        or option(words, "--max-restarts")
        or environment.get("PET_MAX_RESTARTS"),
    )


def _are_containers(value: Any) -> TypeGuard[list[Json]]:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(container, dict) for container in value)


def added_text(template: Template) -> str:
    """Return a remark on the container that the operator adds to each pod, and its resources."""
    spec = template.document["spec"]
    own = next(
        (
            container
            for container in spec["containers"]
            if container.get("name") == template.trainer
        ),
        spec["containers"][0],
    )
    added = resources(PodSettings(sidecar_image=""), traits_of(spec, own)).get("resources", {})
    requests, limits = added.get("requests", {}), added.get("limits", {})
    text = f"each pod also runs {AGENT_CONTAINER}, which "
    if not requests:
        return f"{text}uses the resources of the pod as a whole and requests none of its own"
    asked = " and ".join(f"{amount} of {name}" for name, amount in requests.items())
    if "cpu" in limits:
        return f"{text}requests {asked}, with equal limits, so that the pod stays Guaranteed"
    return f"{text}requests {asked}; the chart's sidecar.resources change that"


def differences(one: Any, other: Any, at: Location = ()) -> Iterator[Location]:
    """Yield the locations where two templates differ, as deep as their structures match."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            yield from differences(one.get(key), other.get(key), (*at, key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, (*at, index))
    elif one != other:
        yield at


def _clean_metadata(document: Json) -> None:
    """Drop all metadata except labels and annotations, which alone matter in a template."""
    metadata = document.pop("metadata", None)
    kept = {
        key: metadata[key]
        for key in ("labels", "annotations")
        if isinstance(metadata, dict) and metadata.get(key)
    }
    if kept:
        document["metadata"] = kept
        document["spec"] = document.pop("spec")  # keep the usual order


def _clean_pod(spec: Json, source: Part, job: str) -> None:
    pod = Part(spec, (*source.location, "spec"), source.remarks)
    if spec.get("restartPolicy") not in (None, "Never"):
        pod.note("restartPolicy", "left out: the job restarts workers itself, the kubelet must not")
        del spec["restartPolicy"]
    for key in ("hostname", "subdomain"):
        if key in spec:
            pod.note(key, "left out: every pod is named after its index, <job>-<index>")
            del spec[key]
    kept = []
    for index, container in enumerate(pod.items("initContainers")):
        text = json.dumps(container)
        if _MASTER.search(text) or f"{job}-master-" in text:
            at = (*pod.location, "initContainers", index)
            remark = (
                "left out: it waits for the master's Service, which an ElasticJob does not have"
            )
            source.remarks.append(Remark(at, f"{remark}; restore any other work it does"))
        else:
            kept.append(container)
    if "initContainers" in spec:
        spec["initContainers"] = kept
        if not kept:
            del spec["initContainers"]


def _clean_environment(container: Json, at: Part) -> dict[str, str]:
    """Remove variables that the job sets itself; return their former values."""
    entries = at.items("env")
    kept, taken = [], {}
    for index, entry in enumerate(entries):
        name = str(entry.get("name")) if isinstance(entry, dict) else ""
        if _LAUNCH_ENV.fullmatch(name) or _GIVEN_ENV.fullmatch(name):
            taken[name] = str(entry.get("value", ""))
            setter = "an option of torchrun" if name.startswith("PET_") else "set by the job"
            at.remarks.append(
                Remark((*at.location, "env", index), f"{name} left out: it is {setter}")
            )
        else:
            kept.append(entry)
    if entries:
        container["env"] = kept
        if not kept:
            del container["env"]
    return taken


def _clean_ports(container: Json, at: Part) -> None:
    ports = at.items("ports")
    kept = [port for port in ports if not (isinstance(port, dict) and port.get("name") == _PORT)]
    if len(kept) < len(ports):
        at.note("ports", f"{_PORT} left out: MASTER_PORT changes in every round")
        container["ports"] = kept
        if not kept:
            del container["ports"]


def _words(at: Part) -> tuple[str, ...]:
    return tuple(str(word) for key in ("command", "args") for word in at.items(key))


def _command(at: Part) -> Command:
    command, args = at.items("command"), at.items("args")
    if not command:
        raise at.refused(
            "command",
            "must be set: the image's own entry point is not known here. "
            "Set it, for example to [python3, train.py], or write the image's entry point into it, "
            "which docker inspect prints",
        )
    try:
        found = without_launcher([str(word) for word in command], [str(word) for word in args])
    except CannotUnwrap as error:
        raise at.refused("command", str(error)) from error
    if found.note:
        at.note("command", found.note)
    return found


def _warn_of_master(container: Json, at: Part, job: str) -> None:
    for key in ("command", "args", "env"):
        text = json.dumps(container.get(key))
        if f"{job}-master-" in text or f"{job}-worker-" in text:
            at.note(key, f"names a pod of the PyTorchJob: pods are now named {job}-<index>")
        elif "$(MASTER_" in text:
            at.note(
                key,
                "$(MASTER_ADDR) and $(MASTER_PORT) are no longer replaced: they change in every "
                "round, so read them from the environment in the script",
            )


def paths_text(paths: list[Location]) -> str:
    """Format up to four paths for a message."""
    shown = ", ".join(field_path(path) or "template" for path in paths[:4])
    return shown + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
