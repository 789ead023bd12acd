"""Conversion of the documents of a file: PyTorchJobs to ElasticJobs with their autoscalers.

The autoscaler of a PyTorchJob is retargeted. Every other document is left out, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticjob_cli.convert import policy
from elasticjob_cli.convert.field_reader import Json, Part, Remark, Unconvertible
from elasticjob_cli.convert.policy import Replicas
from elasticjob_cli.convert.template import (
    Template,
    added_text,
    convert_template,
    differences,
    paths_text,
)
from elasticjob_operator.domain.manifests.job_command import command_for
from elasticjob_operator.domain.manifests.template_rules import TemplateRefused
from elasticjob_operator.model.job import API_VERSION, KIND
from elasticjob_operator.model.parse import parse_manifest
from elasticjob_operator.model.problems import InvalidManifest, Location
from elasticjob_rendezvous.protocol.text import echoed

MASTER, WORKER = "Master", "Worker"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_EXIT_CODE = (
    "ExitCode has no counterpart: exit codes of 1 to 127 were final, now every failure counts "
    "towards maxRestarts"
)


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of converting a document, with remarks for the user."""

    jobs: tuple[Json, ...] = ()
    autoscalers: tuple[Json, ...] = ()
    remarks: tuple[Remark, ...] = ()


def scaled_elsewhere(written_to: Path | None) -> str:
    """Return the remark on metrics; their autoscaler is `written_to` this file, if any."""
    what = "needs a HorizontalPodAutoscaler that scales the ElasticJob"
    if written_to is None:
        return f"{what}: write one with --autoscaler FILE"
    return f"{what}: written to {written_to}"


def convert_pytorchjob(
    document: Mapping[str, Any], at: Location = (), autoscaler: Path | None = None
) -> Converted:
    """Return the ElasticJob, and a HorizontalPodAutoscaler if the job has metrics.

    Args:
        at: location of the document, for remarks.
        autoscaler: output file of the HorizontalPodAutoscaler, for remarks.

    Raises:
        Unconvertible: a field cannot be converted.
    """
    remarks: list[Remark] = []
    source = Part(document, at, remarks)
    metadata = _metadata(source.part("metadata"))
    name = str(metadata["name"])
    spec = source.part("spec")
    elastic, run_policy = spec.part("elasticPolicy"), spec.part("runPolicy")
    replicas, policies, template = _replicas(spec.part("pytorchReplicaSpecs"), name)

    sizes = policy.sizes(elastic, replicas)
    if not elastic and replicas.total > 1:
        text = "is fixed: lower minNodes to let the job survive the loss of nodes"
        remarks.append(Remark((*at, "spec"), f"the size of {replicas.total} {text}"))
    workers = policy.workers(spec, elastic, template)
    restarts = policy.restarts(run_policy, elastic, template, policies)
    rendezvous = policy.rendezvous(elastic)
    metrics = elastic.items("metrics")
    if metrics:
        elastic.note("metrics", scaled_elsewhere(autoscaler))
    ends = policy.run_policy_of(run_policy)
    elastic.note_rest()
    run_policy.note_rest()
    spec.note_rest()
    job: Json = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            **sizes,
            "nprocPerNode": workers,
            **({} if restarts is None else {"maxRestarts": restarts}),
            **({"trainer": template.trainer} if template.trainer else {}),
            **({"rendezvous": rendezvous} if rendezvous else {}),
            "runPolicy": ends,
            "template": template.document,
        },
    }
    _check(job, at)
    remarks.append(Remark((*at, "spec", "pytorchReplicaSpecs"), added_text(template)))
    autoscalers = (_autoscaler(metadata, sizes, metrics),) if metrics else ()
    return Converted((job,), autoscalers, tuple(remarks))


def _metadata(source: Part) -> Json:
    name = source.text("name")
    if not name:
        raise source.refused("name", "must be set: an ElasticJob needs a name of its own")
    found: Json = {"name": name}
    if namespace := source.text("namespace"):
        found["namespace"] = namespace
    for key in ("labels", "annotations"):
        kept = dict(source.part(key).value)
        kept.pop(_LAST_APPLIED, None)
        if kept:
            found[key] = kept
    return found


def _replicas(source: Part, job: str) -> tuple[Replicas, set[str], Template]:
    """Return the replica counts, their restart policies, and the common template."""
    kinds = {str(key).capitalize(): str(key) for key in source.value}
    unknown = [key for kind, key in kinds.items() if kind not in (MASTER, WORKER)]
    if unknown:
        raise source.refused(unknown[0], "must be Master or Worker")
    if not kinds:
        raise Unconvertible(Remark(source.location, "must have a Worker or a Master"))
    parts = {kind: source.part(key) for kind, key in kinds.items()}
    counts: dict[str, int] = {}
    policies = set()
    for kind, part in parts.items():
        count = part.count("replicas")
        counts[kind] = 1 if count is None else count
        restart = part.text("restartPolicy") or "OnFailure"
        policies.add(restart)
        if restart == "ExitCode":
            part.note("restartPolicy", _EXIT_CODE)
    chosen = parts[WORKER] if counts.get(WORKER) or MASTER not in parts else parts[MASTER]
    template = convert_template(chosen.part("template"), job)
    if len(parts) == 2:
        _compare(parts)
    for part in parts.values():
        part.note_rest("template")
    return Replicas(counts.get(MASTER), counts.get(WORKER)), policies, template


def _compare(parts: dict[str, Part]) -> None:
    """Remark on differences between the templates: every node gets the Worker's."""
    master, worker = (parts[kind].part("template").value for kind in (MASTER, WORKER))
    found = list(differences(master, worker))
    if found:
        parts[MASTER].note(
            "template",
            f"is replaced by the Worker's on every node; they differ in {paths_text(found)}. "
            "In the script, use RANK for work that only one node does",
        )


def _check(job: Json, at: Location) -> None:
    """Raise `Unconvertible` unless the result is valid and its command can be launched."""
    try:
        command_for(parse_manifest(job))
    except TemplateRefused as error:
        raise Unconvertible(Remark(at, f"becomes {error}")) from error
    except InvalidManifest as error:
        raise Unconvertible(
            *(Remark(at, f"becomes {problem}") for problem in error.problems)
        ) from error


def _autoscaler(metadata: Json, sizes: Json, metrics: list[Any]) -> Json:
    """Return the autoscaler that the PyTorchJob's operator would create, for the new job."""
    target = {"apiVersion": API_VERSION, "kind": KIND, "name": metadata["name"]}
    kept = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": kept,
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": sizes["minNodes"],
            "maxReplicas": sizes["maxNodes"],
            "metrics": metrics,
        },
    }


PYTORCHJOB = ("kubeflow.org", "PyTorchJob")
_TRAINJOB = ("trainer.kubeflow.org", "TrainJob")
_AUTOSCALER = ("autoscaling", "HorizontalPodAutoscaler")


def convert_document(document: Any, at: Location = (), autoscaler: Path | None = None) -> Converted:
    """Convert a document, or each item of a List.

    Args:
        at: location of the document, for remarks.
        autoscaler: output file of HorizontalPodAutoscalers, for remarks.

    Raises:
        Unconvertible: with all problems of the document.
    """
    if not isinstance(document, Mapping):
        raise Unconvertible(Remark(at, "must be a mapping with apiVersion and kind"))
    group, _, version = str(document.get("apiVersion", "")).partition("/")
    kind = str(document.get("kind", ""))
    if isinstance(document.get("items"), list) and kind.endswith("List"):
        return _list(document["items"], at, autoscaler)
    if (group, kind) == PYTORCHJOB:
        if version != "v1":
            got = echoed(document["apiVersion"])
            text = f"must be {group}/v1, got {got}: read the job from the cluster in that version"
            raise Unconvertible(Remark((*at, "apiVersion"), text))
        return convert_pytorchjob(document, at, autoscaler)
    if (group, kind) == _TRAINJOB:
        raise Unconvertible(Remark((*at, "kind"), _trainjob(document)))
    if "kubeflow.org" in group:
        text = f"must be a PyTorchJob; a {kind} cannot be converted"
        raise Unconvertible(Remark((*at, "kind"), text))
    return _other(document, group, kind, at, autoscaler)


def _list(items: list[Any], at: Location, autoscaler: Path | None) -> Converted:
    found = []
    problems: list[Remark] = []
    for index, item in enumerate(items):
        try:
            found.append(convert_document(item, (*at, "items", index), autoscaler))
        except Unconvertible as error:
            problems += error.problems
    if problems:
        raise Unconvertible(*problems)
    return Converted(
        jobs=tuple(job for converted in found for job in converted.jobs),
        autoscalers=tuple(scaler for converted in found for scaler in converted.autoscalers),
        remarks=tuple(remark for converted in found for remark in converted.remarks),
    )


def _trainjob(document: Mapping[str, Any]) -> str:
    spec = document.get("spec")
    runtime = spec.get("runtimeRef") if isinstance(spec, Mapping) else None
    name = runtime.get("name") if isinstance(runtime, Mapping) else None
    return (
        f"a TrainJob's pods are described in its runtime ({name or 'runtimeRef'}), which is not in "
        "this file: write the ElasticJob from the runtime's template, with numNodes as maxNodes "
        "and numProcPerNode as nprocPerNode"
    )


def _other(
    document: Mapping[str, Any], group: str, kind: str, at: Location, autoscaler: Path | None
) -> Converted:
    """Convert another object in the file: retarget a PyTorchJob's autoscaler, leave out others."""
    spec = document.get("spec")
    target = spec.get("scaleTargetRef") if isinstance(spec, Mapping) else None
    of_pytorchjob = isinstance(target, Mapping) and target.get("kind") == PYTORCHJOB[1]
    if (group, kind) == _AUTOSCALER and of_pytorchjob and spec and target:
        new = {**target, "apiVersion": API_VERSION, "kind": KIND}
        scaler: Json = {**document, "spec": {**spec, "scaleTargetRef": new}}
        remark = Remark((*at, "spec"), scaled_elsewhere(autoscaler))
        return Converted(autoscalers=(scaler,), remarks=(remark,))
    text = f"{kind or 'an object without kind'} left out: it needs no change"
    return Converted(remarks=(Remark((*at, "kind"), text),))
