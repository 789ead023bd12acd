"""Definition of a job to submit: the validated object, and the folder of its command."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from elasticjob_agent.runtimes.function_entrypoint import FunctionCall
from elasticjob_cli.commands.script_job import (
    Nodes,
    Target,
    command_of,
    job_document,
    job_name,
    validated,
)
from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE
from elasticjob_cli.manifest_job import folder_of, manifest_job
from elasticjob_operator import model
from elasticjob_operator.model.manifest import documents, read_text
from elasticjob_operator.model.types import MAX_NODES
from elasticjob_rendezvous.protocol.text import echoed

log = logging.getLogger("elasticjob.client")


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """Job to submit, made by `from_manifest`, `from_object`, `from_command` or `from_function`."""

    object: model.ElasticJob
    """API object, with defaults and without a status."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """Manifest, as it was given."""
    folder: Path | None = None
    """Working folder on this machine; None for a function job's own."""
    call: FunctionCall | None = None
    """Call of a function job, which its command makes."""

    def __post_init__(self) -> None:
        """Raise `BadInput` for arguments of a user, such as a script."""
        given: object = self.object
        if isinstance(given, model.ElasticJob) and self.document:
            return
        raise BadInput(
            "a job is made by ElasticJob.from_command(['python3', 'train.py']), from_function, "
            f"from_manifest or from_object, not from {echoed(given)}"
        )

    @classmethod
    def from_manifest(cls, file: str | Path) -> ElasticJob:
        """Return the only job of a manifest. Raises `BadInput` with all problems of the file."""
        if not isinstance(file, (str, Path)):
            raise BadInput(f"a manifest must be the path of a file, not {echoed(file)}")
        found, remarks = manifest_job(str(file), _of_script(str(file)))
        for remark in remarks:
            log.warning("%s", remark)
        document = next(one.value for one in documents(read_text(file)) if one.value is not None)
        return cls(found, document, folder_of(str(file)))

    @classmethod
    def from_object(
        cls, document: Mapping[str, Any] | model.ElasticJob, folder: str | Path = "."
    ) -> ElasticJob:
        """Return the job of a manifest's document or of the API's model. Raises `BadInput`."""
        if isinstance(document, model.ElasticJob):
            document = _written(document)
        if not isinstance(document, Mapping):
            raise BadInput(
                f"a job must be a manifest's document or an API object, not {echoed(document)}: "
                "ElasticJob.from_manifest reads a file"
            )
        wanted = {name: value for name, value in document.items() if name != "status"}
        return cls(validated(wanted), wanted, _folder(folder))

    @classmethod
    def from_command(
        cls,
        command: Sequence[str],
        *,
        name: str | None = None,
        nodes: int | tuple[int, int] = 1,
        workers: int | str | None = None,
        max_restarts: int | None = None,
        env: Mapping[str, str] | None = None,
        image: str | None = None,
        folder: str | Path = ".",
    ) -> ElasticJob:
        """Return the job of a command, as `elasticjob run -- COMMAND` makes it.

        Args:
            command: words of the command, such as `["python3", "train.py"]`; a word may be a path.
            name: name of the job; the default is derived from the command.
            nodes: number of nodes, or minimum and maximum.
            workers: workers of each node: a number, "auto", "gpu" or "cpu".
            max_restarts: restarts after failures; the default is the API's.
            env: additional environment variables.
            image: image of the trainer; a cluster requires one.
            folder: working folder on this machine.

        Raises:
            BadInput: a value is not valid.
        """
        words = command_of(Target.COMMAND, _words(command))
        if env is not None and not isinstance(env, Mapping):
            raise BadInput(f"env must be a mapping such as {{'LR': '0.1'}}, not {echoed(env)}")
        name = name or job_name(Target.COMMAND, words)
        document = job_document(name, words, node_range(nodes), workers)
        if max_restarts is not None:
            document["spec"]["maxRestarts"] = max_restarts
        container = document["spec"]["template"]["spec"]["containers"][0]
        if env:
            container["env"] = [{"name": key, "value": value} for key, value in env.items()]
        if image is not None:
            container["image"] = image
        return cls.from_object(document, folder)

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        nodes: int | tuple[int, int] = 1,
        workers: int | str | None = None,
        max_restarts: int | None = None,
        env: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
    ) -> ElasticJob:
        """Return the job of which each worker calls a function, on this machine.

        A function of a module or a script is passed by its name. As with multiprocessing, a worker
        runs the script again: what submits the job must be below `if __name__ == "__main__"`. A
        function of a notebook, an inner function and a lambda require the package cloudpickle.

        Args:
            function: the function; its return value is in the result by rank.
            args: arguments, picklable.
            kwargs: arguments by name.
            folder: working folder; the default is one of the job's own, which further runs of the
                job keep.

        The other arguments are those of `from_command`.

        Raises:
            BadInput: a value is not valid.
        """
        if not callable(function):
            raise BadInput(
                f"function must be callable, not {echoed(function)}: give the function itself, "
                "without a call, and its arguments as args"
            )
        if isinstance(args, str) or not isinstance(args, Sequence):
            raise BadInput(f"args must be a list of arguments, such as [0.1], not {echoed(args)}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise BadInput(f"kwargs must be a mapping such as {{'lr': 0.1}}, not {echoed(kwargs)}")
        _check_call(function, args, kwargs or {})
        named = getattr(function, "__name__", type(function).__name__)
        name = name or job_name(Target.COMMAND, [named])
        made = cls.from_command(
            ["python3"],
            name=name,
            nodes=nodes,
            workers=workers,
            max_restarts=max_restarts,
            env=env,
        )
        call = FunctionCall(partial(function, *args, **(kwargs or {})), ())
        return replace(made, call=call, folder=None if folder is None else _folder(folder))

    def renamed(self, name: str) -> ElasticJob:
        """Return the same job under another name. Raises `BadInput`."""
        return self._with_metadata(name=name)

    def in_namespace(self, namespace: str) -> ElasticJob:
        """Return the same job in a namespace. Raises `BadInput`."""
        return self._with_metadata(namespace=namespace)

    @property
    def name(self) -> str:
        return self.object.metadata.name

    @property
    def namespace(self) -> str | None:
        """Namespace that the document names; None for that of the client."""
        named: str | None = self.document["metadata"].get("namespace")
        return named

    def manifest_text(self) -> str:
        """Return the manifest as JSON, which is YAML too."""
        return json.dumps(self.document, indent=2) + "\n"

    def _with_metadata(self, **fields: str) -> ElasticJob:
        metadata = {**self.document["metadata"], **fields}
        made = ElasticJob.from_object({**self.document, "metadata": metadata})
        return replace(made, folder=self.folder, call=self.call)


_OF_AUTHOR = ("name", "namespace", "labels", "annotations")
"""Metadata that an author writes; the other fields are the API server's."""


def _of_script(file: str) -> str:
    """Return the remedy for a script in place of a manifest, on a line of its own; else empty."""
    return "\na script's job is made by ElasticJob.from_command" if file.endswith(".py") else ""


def _written(job: model.ElasticJob) -> dict[str, Any]:
    """Return an object's document without the fields that an API server sets.

    A model has a namespace in any case, so `default` stands for none.
    """
    document = job.manifest()
    metadata = {key: value for key, value in document["metadata"].items() if key in _OF_AUTHOR}
    if metadata.get("namespace") == DEFAULT_NAMESPACE:
        del metadata["namespace"]
    return {**document, "metadata": metadata}


def node_range(nodes: int | tuple[int, int]) -> Nodes:
    """Return minimum and maximum of a number of nodes. Raises `BadInput`."""
    sizes = (nodes, nodes) if isinstance(nodes, int) else nodes
    match sizes:
        case [int(least), int(most)] if 1 <= least <= most <= MAX_NODES:
            return Nodes(least, most)
    raise BadInput(
        f"nodes must be a number or (minimum, maximum) from 1 to {MAX_NODES}, not {echoed(nodes)}"
    )


def _folder(folder: object) -> Path:
    """Return the absolute path of a working folder. Raises `BadInput`."""
    if not isinstance(folder, (str, Path)):
        raise BadInput(f"folder must be the path of a folder, not {echoed(folder)}")
    return Path(folder).resolve()


def _check_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise `BadInput` for a call that no worker could make."""
    if inspect.iscoroutinefunction(function):
        raise BadInput(
            f"function must not be async, as {echoed(function)} is: call asyncio.run in another one"
        )
    try:
        # A decorator such as hydra's gives arguments that the decorated function names.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # of an extension module
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BadInput(f"args and kwargs must be those of the function: {error}") from error


def _words(command: object) -> list[str]:
    """Return the words of a command; raise `BadInput` unless they are texts or paths."""
    given: Sequence[object] = ()
    if isinstance(command, Sequence) and not isinstance(command, (str, bytes)):
        given = command
    words = [str(word) for word in given if isinstance(word, (str, Path))]
    if not words or len(words) < len(given) or not words[0].strip():
        raise BadInput(
            "command must be a list of words, such as ['python3', 'train.py'], "
            f"not {echoed(command)}"
        )
    return words
