"""Parser from a document to an ElasticJob, or to the list of all its problems.

Each error of pydantic becomes a problem: one sentence with the expected value.
"""

from __future__ import annotations

import copy
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from elasticjob_operator.model.job import (
    JOB_NAME,
    MAX_NAME,
    MAX_NPROC,
    NESTED_ANNOTATION,
    NPROC_MESSAGE,
    NPROC_WORDS,
    OWN_ERRORS,
    ElasticJob,
)
from elasticjob_operator.model.problems import (
    InvalidManifest,
    Location,
    Problem,
    got,
    not_a_string,
    not_an_integer,
    not_of_type,
    not_one_of,
    unknown_field,
)
from elasticjob_operator.model.rules import RULES
from elasticjob_operator.model.template_schema import template_problems
from elasticjob_operator.model.types import INT32_MAX, LABEL, MAX_NODES, SUBDOMAIN

TEMPLATE: Location = ("spec", "template")
_PATTERNS = {
    JOB_NAME: f"must be a DNS label of at most {MAX_NAME} characters: "
    "lower-case letters, digits and '-', a letter first, no '-' last",
    LABEL: "must be a DNS label: lower-case letters, digits and '-', no '-' first or last",
    SUBDOMAIN: "must be a DNS subdomain: lower-case letters, digits, '-' and '.'",
}
_NUMBER = re.compile(r"0*([1-9][0-9]*)(\.0*)?(?![0-9.])")
_GPU_WORDS = ("cuda", "accelerator")
_NAMED_PATTERNS = {
    "endpoints": "must be host:port, with or without http:// or https://",
    "warmStartModules": "must be the name of a Python module",
    "memoryLimit": "must be a whole number of bytes, or of k, M, G, T, Ki, Mi, Gi or Ti, such as "
    "8Gi",
    "path": "must be an absolute path",
}


def problems(error: ValidationError) -> list[Problem]:
    """Return the problem for every error, at its location in the document."""
    return [_problem(found, found["loc"]) for found in error.errors()]


def _problem(error: ErrorDetails, location: Location) -> Problem:
    if error["type"] == "missing":
        return Problem.at(location, "must be set")
    if error["type"] == "extra_forbidden":
        known = field_names(location[:-1])
        return Problem.at(location, unknown_field(str(location[-1]), known))
    return Problem.at(location, _message(error, location))


def field_names(location: Location) -> list[str]:
    """Return the fields that a manifest may set at a location; [] if any field may be set."""
    model: Any = ElasticJob
    for step in location:
        if isinstance(step, str) and isinstance(model, type) and issubclass(model, BaseModel):
            model = next(
                (info.annotation for info in model.model_fields.values() if info.alias == step),
                None,
            )
        model = _inner(model)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [info.alias or name for name, info in model.model_fields.items()]
    return []


def _inner(annotation: Any) -> Any:
    """Return the model inside `X | None`, `list[X]` and `Annotated[X, …]`."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, list, typing.Annotated):
        return _inner(next(arg for arg in typing.get_args(annotation) if arg is not type(None)))
    return annotation


def _message(error: ErrorDetails, location: Location) -> str:
    context: Mapping[str, Any] = error.get("ctx") or {}
    message_of = _MESSAGES.get(error["type"])
    if message_of is not None:
        return message_of(context, error["input"])
    if error["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(str(context["pattern"])) or next(
            (text for name, text in _NAMED_PATTERNS.items() if name in location),
            f"must match {context['pattern']}",
        )
    return error["msg"] if error["type"] in OWN_ERRORS else f"must be valid: {error['msg']}"


def _expected(kind: str) -> Callable[[Mapping[str, Any], Any], str]:
    return lambda _context, value: not_of_type(kind, value)


def _string(_context: Mapping[str, Any], value: Any) -> str:
    return not_a_string(value)


def _integer(_context: Mapping[str, Any], value: Any) -> str:
    return not_an_integer(value)


def _choice(context: Mapping[str, Any], value: Any) -> str:
    words = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
    return not_one_of(words, value)


def _nproc(_context: Mapping[str, Any], value: Any) -> str:
    hint = _nproc_hint(value)
    return f"{NPROC_MESSAGE}; {got(value)}" + (f", did you mean {hint}?" if hint else "")


def _nproc_hint(value: Any) -> str | None:
    """Return the word or number that was probably meant."""
    text = str(value).strip()
    if (number := _NUMBER.match(text)) and not isinstance(value, bool):
        return number[1] if int(number[1]) <= MAX_NPROC else None
    close = difflib.get_close_matches(text.lower(), NPROC_WORDS, n=1)
    return "gpu" if text.lower() in _GPU_WORDS else next(iter(close), None)


def _entries(count: int) -> str:
    return "entry" if count == 1 else "entries"


def _shorter(context: Mapping[str, Any], value: Any) -> str:
    return f"must be at most {context['max_length']} characters long, not {len(value)}"


def _bound(word: str, key: str) -> Callable[[Mapping[str, Any], Any], str]:
    return lambda context, value: f"must be at {word} {context[key]}; {got(value)}"


_MESSAGES: dict[str, Callable[[Mapping[str, Any], Any], str]] = {
    "int_type": _integer,
    "int_parsing": _integer,
    "int_parsing_size": lambda _context, _value: f"must be at most {INT32_MAX}",
    "int_from_float": _integer,
    "bool_type": _expected("true or false"),
    "bool_parsing": _expected("true or false"),
    "string_type": _string,
    "string_unicode": lambda _context, _value: "must not contain an unpaired surrogate",
    "list_type": _expected("a list"),
    "dict_type": _expected("a mapping"),
    "model_type": _expected("a mapping"),
    "model_attributes_type": _expected("a mapping"),
    "enum": _choice,
    "literal_error": _choice,
    "nproc": _nproc,
    "greater_than_equal": _bound("least", "ge"),
    "less_than_equal": _bound("most", "le"),
    "string_too_long": _shorter,
    "string_too_short": lambda context, value: (
        f"must be at least {context['min_length']} characters long; {got(value)}"
        if value
        else "must not be empty"
    ),
    "too_short": lambda context, _value: (
        f"must hold at least {context['min_length']} {_entries(context['min_length'])}"
    ),
    "too_long": lambda context, _value: (
        f"must hold at most {context['max_length']} {_entries(context['max_length'])}"
    ),
    "datetime_parsing": _expected("a time such as 2026-01-31T12:00:00Z"),
    "datetime_from_date_parsing": _expected("a time such as 2026-01-31T12:00:00Z"),
    "datetime_type": _expected("a time such as 2026-01-31T12:00:00Z"),
}


def first_of_each(found: Iterable[Problem]) -> list[Problem]:
    """Return the problems in order, without duplicates of path and message."""
    return list({(problem.path, problem.message): problem for problem in found}.values())


_PASSES = 4
"""Maximum number of attempts to replace faulty fields before the rules are checked: one fault may
hide another."""


def parse_manifest(document: Mapping[str, Any], ignored: list[Problem] | None = None) -> ElasticJob:
    """Return the job that a document describes.

    Args:
        ignored: gets the problems of its status, whose parts are left out.

    Raises:
        InvalidManifest: the document has problems; lists all, including broken rules between
            fields.
    """
    if not isinstance(document, Mapping):
        raise InvalidManifest([Problem.at((), "must be a mapping with apiVersion, kind and spec")])
    unread: list[ErrorDetails] = []
    try:
        job = _validate(document, unread)
    except ValidationError as error:
        faults = problems(error)
        broken = _broken_rules(_without(document, faults))
        raise InvalidManifest(first_of_each([*faults, *_apart(broken, faults)])) from error
    broken = _broken_rules(document)
    if broken:
        raise InvalidManifest(first_of_each(broken))
    if ignored is not None:
        ignored += first_of_each(_problem(found, ("status", *found["loc"])) for found in unread)
    return job


def parse_strictly(
    document: Mapping[str, Any],
    check: Callable[[ElasticJob], Iterable[Problem]] = lambda _job: (),
) -> ElasticJob:
    """Return the job that a document describes, if the API server would accept it too.

    `parse_manifest` ignores fields of the template that no part of the operator reads; this also
    compares the template with Kubernetes' schema.

    Args:
        check: further problems of a job without the faults found before.

    Raises:
        InvalidManifest: the document has problems; lists all.
    """
    found: list[Problem] = []
    job: ElasticJob | None = None
    try:
        job = parse_manifest(document)
    except InvalidManifest as error:
        found += error.problems
    spec = document.get("spec")
    if isinstance(spec, Mapping) and isinstance(spec.get("template"), Mapping):
        known = [problem.location for problem in found]
        for problem in template_problems(spec["template"], TEMPLATE):
            if not any(at[: len(problem.location)] == problem.location for at in known):
                found.append(problem)
    if found:
        job = _sound_job(document, found)
    if job is not None:
        found += _apart(check(job), found)
    if found or job is None:
        raise InvalidManifest(first_of_each(found))
    return job


def _sound_job(document: Mapping[str, Any], faults: list[Problem]) -> ElasticJob | None:
    """Return the job with stand-ins for faulty fields; None if other faults depend on them."""
    sound = _without(document, faults)
    return None if sound is None or _broken_rules(sound) else _validate(sound)


def _validate(document: Mapping[str, Any], unread: list[ErrorDetails] | None = None) -> ElasticJob:
    """Return the job; `unread` gets the errors of its status, whose parts are left out."""
    # by_name=False: a manifest is camelCase only; min_nodes is a typo there.
    job = ElasticJob.model_validate(document, by_alias=True, by_name=False, context=unread)
    given = job.metadata.annotations or {}
    if NESTED_ANNOTATION not in given:
        return job
    kept = {name: value for name, value in given.items() if name != NESTED_ANNOTATION}
    metadata = job.metadata.model_copy(update={"annotations": kept or None})
    return job.model_copy(update={"metadata": metadata})


def _broken_rules(document: Mapping[str, Any] | None) -> list[Problem]:
    """Return the broken rules; none for a document whose faults could not be replaced."""
    if document is None:
        return []
    return [
        Problem.at(("spec", *location), rule.message)
        for rule in RULES
        for location in rule.check(document["spec"])
    ]


def _apart(broken: Iterable[Problem], faults: Iterable[Problem]) -> list[Problem]:
    """Return the broken rules that are not an effect of a faulty field."""
    faulty = [fault.location for fault in faults]
    return [rule for rule in broken if not any(_nested(rule.location, at) for at in faulty)]


def _nested(one: Location, other: Location) -> bool:
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _without(document: Mapping[str, Any], faults: list[Problem]) -> dict[str, Any] | None:
    """Return a copy with stand-ins for faulty fields, so that the rules can check the rest; None
    if faults remain."""
    sound = copy.deepcopy(dict(document))
    for _ in range(_PASSES):
        for fault in reversed(faults):
            _put_aside(sound, fault.location)
        try:
            _validate(sound)
        except ValidationError as error:
            faults = problems(error)
        else:
            return sound
    return None


def _put_aside(document: Any, location: Location) -> None:
    holder = document
    for step in location[:-1]:
        try:
            holder = holder[step]
        except (KeyError, IndexError, TypeError):
            return
    last = location[-1]
    stand_in = _stand_in(location)
    if isinstance(holder, dict):
        holder.pop(last, None)
        if stand_in is not None:
            holder[last] = stand_in
    elif isinstance(holder, list) and isinstance(last, int) and last < len(holder):
        # In a list the indices of the other items must stay, or their problems would be misplaced.
        if stand_in is None:
            del holder[last]
        else:
            holder[last] = stand_in


def _stand_in(location: Location) -> Any:
    match location:
        case ("apiVersion",):
            return "elasticjob.dev/v1alpha1"
        case ("kind",):
            return "ElasticJob"
        case ("metadata",):
            return {"name": "stand-in"}
        case ("metadata", "name"):
            return "stand-in"
        case ("spec",):
            return {}
        case ("spec", "maxNodes"):
            return MAX_NODES
        case (*_, "containers" | "initContainers", int() as index):
            return {"name": f"stand-in-{index}", "command": ["true"]}
        case (*_, "containers" | "initContainers", int() as index, "name"):
            return f"stand-in-{index}"
        case (*_, "containers"):
            return [{"name": "stand-in", "command": ["true"]}]
        case ("spec", "template") | ("spec", "template", "spec"):
            return {}
        case (*_, "command" | "args", int()):
            return "stand-in"
        case (*_, "env", int() as index):
            return {"name": f"STAND_IN_{index}"}
        case (*_, "env", int() as index, "name"):
            return f"STAND_IN_{index}"
        case ("spec", "template", *_, int()):
            return {}
    return None
