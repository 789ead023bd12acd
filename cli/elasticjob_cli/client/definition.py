"""Definition of a job to submit: the validated object, and the folder of its command."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticjob_cli.commands.script_job import (
    Nodes,
    Target,
    command_of,
    job_document,
    job_name,
    validated,
)
from elasticjob_cli.errors import BadInput
from elasticjob_cli.manifest_job import folder_of, manifest_job
from elasticjob_operator import model
from elasticjob_operator.model.types import MAX_NODES

log = logging.getLogger("elasticjob.client")


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """Job to submit. `from_manifest`, `from_object` and `from_command` make one."""

    object: model.ElasticJob
    """API object, without a status."""
    folder: Path
    """Working folder of the command on this machine."""

    @classmethod
    def from_manifest(cls, file: str | Path) -> ElasticJob:
        """Return the only job of a manifest. Raises `BadInput` with all problems of the file."""
        found, remarks = manifest_job(str(file))
        for remark in remarks:
            log.warning("%s", remark)
        return cls(found, folder_of(str(file)))

    @classmethod
    def from_object(
        cls, document: Mapping[str, Any] | model.ElasticJob, folder: str | Path = "."
    ) -> ElasticJob:
        """Return the job of a manifest's document or of the API's model. Raises `BadInput`."""
        if isinstance(document, model.ElasticJob):
            document = document.manifest()
        wanted = {name: value for name, value in document.items() if name != "status"}
        return cls(validated(wanted), Path(folder).resolve())

    @classmethod
    def from_command(
        cls,
        command: Sequence[str],
        *,
        name: str | None = None,
        nodes: int | tuple[int, int] = 1,
        workers: int | str | None = None,
        env: Mapping[str, str] | None = None,
        image: str | None = None,
        folder: str | Path = ".",
    ) -> ElasticJob:
        """Return the job of a command, as `elasticjob run -- COMMAND` makes it.

        Args:
            command: words of the command, such as `["python3", "train.py"]`.
            name: name of the job; the default is derived from the command.
            nodes: number of nodes, or minimum and maximum.
            workers: workers of each node: a number, "auto", "gpu" or "cpu".
            env: additional environment variables.
            image: image of the trainer; a cluster requires one.
            folder: working folder on this machine.

        Raises:
            BadInput: a value is not valid.
        """
        if isinstance(command, str) or not command:
            raise BadInput("command must be a list of words, such as ['python3', 'train.py']")
        words = command_of(Target.COMMAND, command)
        name = name or job_name(Target.COMMAND, words)
        document = job_document(name, words, node_range(nodes), workers)
        container = document["spec"]["template"]["spec"]["containers"][0]
        if env:
            container["env"] = [{"name": key, "value": value} for key, value in env.items()]
        if image is not None:
            container["image"] = image
        return cls.from_object(document, folder)

    def renamed(self, name: str) -> ElasticJob:
        """Return the same job under another name. Raises `BadInput`."""
        document = self.object.manifest()
        document["metadata"]["name"] = name
        return ElasticJob(ElasticJob.from_object(document).object, self.folder)

    @property
    def name(self) -> str:
        return self.object.metadata.name

    def manifest(self) -> dict[str, Any]:
        """Return the object as a document."""
        return self.object.manifest()

    def manifest_text(self) -> str:
        """Return the manifest as JSON, which is YAML too."""
        return json.dumps(self.manifest(), indent=2) + "\n"


def node_range(nodes: int | tuple[int, int]) -> Nodes:
    """Return minimum and maximum of a number of nodes. Raises `BadInput`."""
    least, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    if not 1 <= least <= most <= MAX_NODES:
        raise BadInput(
            f"nodes must be a number or (minimum, maximum) from 1 to {MAX_NODES}, not {nodes}"
        )
    return Nodes(least, most)
