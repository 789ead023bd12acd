"""Conversion of a job's sizes, workers per node, restart limit, rendezvous and run policy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticjob_cli.convert.field_reader import Json, Part
from elasticjob_cli.convert.template import Template
from elasticjob_operator.model.job import NPROC_WORDS
from elasticjob_rendezvous.protocol.text import echoed

_CONF_FIELDS = {
    "timeout": "joinTimeoutSeconds",
    "join_timeout": "joinTimeoutSeconds",
    "last_call_timeout": "lastCallSeconds",
}
_WHOLE = re.compile(r"[0-9]{1,9}")
_OWN_ETCD = "rendezvous is kept in the operator's etcd"


@dataclass(frozen=True, slots=True)
class Replicas:
    """Number of replicas of each kind; None if the kind is absent."""

    master: int | None
    worker: int | None

    @property
    def total(self) -> int:
        return (self.master or 0) + (self.worker or 0)


def sizes(elastic: Part, replicas: Replicas) -> Json:
    """Return minNodes, maxNodes and nodes."""
    if not elastic:
        return {"minNodes": replicas.total, "maxNodes": replicas.total}
    least, most = elastic.count("minReplicas"), elastic.count("maxReplicas")
    if least is None:
        least = most if most is not None else replicas.worker or 0
    if most is None:
        most = least
    masters = replicas.master or 0
    if masters:
        elastic.note(
            "minReplicas",
            f"increased, like maxReplicas, by {masters} for the Master, which they did not count",
        )
    low, high = max(1, least + masters), max(1, most + masters)
    wanted = replicas.total
    if low <= high and not low <= wanted <= high:
        elastic.note(
            "maxReplicas",
            f"{wanted} replicas are outside {low} to {high}: the job starts with the nearest size",
        )
        wanted = min(max(wanted, low), high)
    return {"minNodes": low, "maxNodes": high, "nodes": wanted}


def workers(spec: Part, elastic: Part, template: Template) -> int | str | None:
    """Return nprocPerNode; None for its default."""
    old = elastic.count("nProcPerNode")
    given = spec.text("nprocPerNode")
    if not template.launched:
        if given not in (None, "1"):
            spec.note(
                "nprocPerNode",
                "is now 1: without torchrun the command ran once in each pod. Set gpu for one "
                "worker per GPU",
            )
        return 1
    value = template.workers or given or (str(old) if old is not None else "auto")
    if _WHOLE.fullmatch(value) and int(value) >= 1:
        return int(value)
    if value not in NPROC_WORDS:
        raise spec.refused(
            "nprocPerNode", f"must be auto, gpu, cpu or a number, got {echoed(value)}"
        )
    return value


def restarts(run_policy: Part, elastic: Part, template: Template, policies: set[str]) -> int | None:
    """Return maxRestarts; None for its default."""
    limit = run_policy.count("backoffLimit")
    given = elastic.count("maxRestarts")
    if template.restarts is not None and _WHOLE.fullmatch(template.restarts):
        given = int(template.restarts)
    if given is not None:
        if limit is not None:
            run_policy.note("backoffLimit", f"left out: maxRestarts ({given}) is the only limit")
        return given
    if limit is not None:
        run_policy.note(
            "backoffLimit",
            f"became maxRestarts: {limit}, which counts worker failures only, not lost or leaving "
            "nodes",
        )
        return limit
    return 0 if policies == {"Never"} else None


def rendezvous(elastic: Part) -> Json:
    """Return spec.rendezvous: timeouts are kept, endpoints are not."""
    found: Json = {}
    backend = elastic.text("rdzvBackend")
    host, port = elastic.text("rdzvHost"), elastic.text("rdzvPort")
    if backend is not None:
        elastic.note("rdzvBackend", f"{backend} left out: the {_OWN_ETCD}")
    if host is not None:
        where = f"{host}:{port}" if port else host
        text = f"{where} left out: the {_OWN_ETCD}"
        if backend in ("etcd", "etcd-v2"):
            text += "; to use your own, give its v3 endpoints in spec.rendezvous.endpoints"
        elastic.note("rdzvHost", text)
    if elastic.text("rdzvId") is not None:
        elastic.note("rdzvId", "left out: each run of a job has its own")
    if elastic.flag("standalone"):
        elastic.note("standalone", f"left out: the {_OWN_ETCD}, for one node too")
    for index, entry in enumerate(elastic.items("rdzvConf")):
        if not isinstance(entry, dict):
            raise elastic.refused("rdzvConf", "must be a list of key and value")
        key, value = str(entry.get("key")), str(entry.get("value"))
        field = _CONF_FIELDS.get(key)
        if field and _WHOLE.fullmatch(value):
            found[field] = int(value)
        else:
            elastic.note("rdzvConf", f"{key}={value} (number {index + 1}) has no counterpart")
    return found


def run_policy_of(source: Part) -> Json:
    """Return spec.runPolicy."""
    found: Json = {"cleanPodPolicy": source.text("cleanPodPolicy") or "None"}
    if (suspend := source.flag("suspend")) is not None:
        found["suspend"] = suspend
    for key in ("ttlSecondsAfterFinished", "activeDeadlineSeconds"):
        if (seconds := source.count(key)) is not None:
            found[key] = seconds
    policy = source.part("schedulingPolicy")
    if queue := policy.text("queue"):
        policy.note(
            "queue",
            f"{queue} left out: the operator makes no PodGroup; name the queue with the "
            "scheduler's own label or annotation in spec.template.metadata",
        )
    available = policy.count("minAvailable")
    if available is not None:
        policy.note(
            "minAvailable",
            f"{available} left out: the operator makes no PodGroup; make one with the scheduler's "
            "own API and name it in spec.template.metadata",
        )
    if name := policy.text("priorityClass"):
        found["schedulingPolicy"] = {"priorityClass": name}
    policy.note_rest()
    return found
