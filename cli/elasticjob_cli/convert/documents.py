"""Conversion of each document of a file: converted, retargeted, left out, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticjob_cli.convert.pytorchjob import Converted, convert_pytorchjob, scaled_elsewhere
from elasticjob_cli.convert.source import Json, Remark, Unconvertible
from elasticjob_operator.model.job import API_VERSION, KIND
from elasticjob_operator.model.problems import Location
from elasticjob_rendezvous.core.typed import echoed

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
        jobs=tuple(job for one in found for job in one.jobs),
        autoscalers=tuple(scaler for one in found for scaler in one.autoscalers),
        remarks=tuple(remark for one in found for remark in one.remarks),
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
