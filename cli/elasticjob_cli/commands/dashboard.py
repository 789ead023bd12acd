"""Command `elasticjob dashboard`: a read-only web page of jobs, on this machine's loopback."""

from __future__ import annotations

import hmac
import secrets
from http import HTTPStatus
from typing import Annotated

import typer

from elasticjob_cli.commands.options import Place, placed, until_interrupted
from elasticjob_cli.dashboard.server import LOOPBACK_NAMES, Denied, Opener, Request, Server
from elasticjob_cli.dashboard.sources import Source
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE, check_label
from elasticjob_cli.output import show
from elasticjob_cli.settings import LOOPBACK


@placed
def dashboard(
    place: Place,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 for a free one.")
    ] = 0,
) -> None:
    """Serve a read-only web page of all jobs until Ctrl-C.

    It shows each job's timeline, rounds, failures, members and logs. It listens on 127.0.0.1 only,
    and its address contains a secret: other users of the machine cannot read it. The jobs of a
    cluster are read with your own kubectl and its permissions.

    \b
    Examples:
      elasticjob dashboard
      elasticjob dashboard --port 8800
      kubectl elasticjob dashboard -n team-a
    """
    token = secrets.token_urlsafe(32)
    source, path = _source(place)
    try:
        server = Server((LOOPBACK, port), local_opener(source, token), LOOPBACK_NAMES)
    except OSError as error:
        raise CommandError(
            f"port {port} of {LOOPBACK} cannot be used: {error.strerror}; choose another --port"
        ) from error
    with server, until_interrupted():
        show(
            f"Dashboard of {source.title}: http://{LOOPBACK}:{server.port}/{token}/{path}",
            "The address is secret, and valid until Ctrl-C.",
        )
        server.serve_forever()


def _source(place: Place) -> tuple[Source, str]:
    """Return the jobs of a place, and the path of the first page."""
    if place.kubectl is not None:
        from elasticjob_cli.dashboard.cluster_jobs import ClusterJobs, by_kubectl

        namespace = place.kubectl.namespace
        path = f"namespaces/{namespace}/" if namespace else ""
        return ClusterJobs(by_kubectl(place.kubectl)), path
    from elasticjob_cli.dashboard.local_jobs import LocalJobs

    check_label(place.namespace, "namespace")
    is_default = place.namespace == DEFAULT_NAMESPACE
    return LocalJobs(), "" if is_default else f"namespaces/{place.namespace}/"


def local_opener(source: Source, token: str) -> Opener:
    """Return an opener for which the first folder of an address is the secret token."""

    def opened(request: Request) -> tuple[Source, str]:
        first, slash, rest = request.path.removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(first.encode(), token.encode()):
            raise Denied(
                HTTPStatus.NOT_FOUND, "use the whole address that `elasticjob dashboard` printed"
            )
        return source, rest

    return opened
