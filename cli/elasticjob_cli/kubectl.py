"""Calls of the user's kubectl, and the choice between a cluster and this machine.

kubectl has the user's contexts and credentials. Its messages are shown after the request that
failed, without its prefixes.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.settings import is_cluster_default
from elasticjob_rendezvous.protocol.text import echoed

RESOURCE = "elasticjobs.elasticjob.dev"
REQUEST_SECONDS = 15
CALL_SECONDS = 60.0
ANSWER_SECONDS = 5.0
"""Duration of a call of kubectl after which a second one checks that the API server answers."""
CHECK_SECONDS = 5
"""Time limit of that check. A sign-in and a long list have `CALL_SECONDS`."""
Json = dict[str, Any]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_REASON = re.compile(r"Error from server \((\w+)\): ")
_PREFIX = re.compile(r"(error: |Error from server( \(\w+\))?: )+")
"""Prefixes of kubectl's messages."""
_CHECK_ADDRESS = "check the cluster's address with `kubectl cluster-info`"
_NO_API_SERVER = (
    f"this is not the answer of an API server: {_CHECK_ADDRESS}, and proxies on the way"
)
_FORBIDDEN = "ask the cluster's administrator for this permission"
_NETWORK = "check the cluster's address in the kubeconfig, the network and proxies on the way"
_SILENCE = (
    "Client.Timeout",
    "deadline exceeded",
    "i/o timeout",
    "TLS handshake timeout",
    "connection lost",
)
"""Signs of a server that does not answer, in kubectl's messages."""
_AGAIN = f"try again; if it lasts, {_NETWORK}"
_SIGN_IN = "sign in, or renew the user's credentials in the kubeconfig"
_REMEDIES = (
    ("getting credentials", "check the exec plug-in of the user in the kubeconfig"),
    ("was refused", _CHECK_ADDRESS),
    ("no such host", _CHECK_ADDRESS),
    ("looking for beginning of value", _NO_API_SERVER),
    ("unexpected end of JSON input", _NO_API_SERVER),
    ("<html", _NO_API_SERVER),
    ("x509:", "check certificate-authority-data of the cluster in the kubeconfig"),
    ("the server doesn't have a resource type", "install ElasticJob's Helm chart on the cluster"),
    ("is forbidden", _FORBIDDEN),
    ("provide credentials", _SIGN_IN),
    ("Unauthorized", _SIGN_IN),
    ("connection reset", _AGAIN),
    ("unexpected EOF", _AGAIN),
    *((sign, _NETWORK) for sign in _SILENCE),
    ("an error on the server", "try again; if it lasts, the API server's log has the cause"),
    ("currently unable to handle", "try again; if it lasts, check the API server and its etcd"),
)
"""Remedies for messages with a sign; the first match counts."""
_NO_CONTEXT = "the kubeconfig has no context {0}: `kubectl config get-contexts` lists them"
_NO_FILE = "the kubeconfig {0} cannot be read: {1}"
_TEXTS = (
    (
        re.compile(
            r".*error when reading response body\. Please retry\. Original (?:error: )?"
            r"(?:.*: read: )?(.*)"
        ),
        f"the connection to the API server broke in the middle of an answer: {{0}}; {_AGAIN}",
    ),
    (re.compile(r'.*context was not found for specified context: "?(.*?)"?'), _NO_CONTEXT),
    (re.compile(r'.*context "(.*)" does not exist'), _NO_CONTEXT),
    (
        re.compile(r'.*error loading config file "(.*?)": (?:(?:read|open) .*?: )?(.*)'),
        _NO_FILE,
    ),
    (
        re.compile(r"stat (.*?): (.*)"),
        _NO_FILE,
    ),
    (
        re.compile(r".*\blocalhost:8080\b.*"),  # kubectl's default without a kubeconfig
        "no cluster is configured: give a context or a kubeconfig",
    ),
)
"""Own texts for kubectl's messages on its configuration, with the groups of their patterns."""


def selects_cluster(
    is_plugin: bool, cluster: bool | None, context: str | None, kubeconfig: Path | None
) -> bool:
    """Return True if a verb acts on a cluster.

    The plug-in always does; `elasticjob` only with --cluster, --context or --kubeconfig, or if
    ELASTICJOB_PLACE names one. Raises `BadInput` for options that contradict each other.
    """
    if cluster is False:
        if is_plugin:
            raise BadInput("kubectl elasticjob acts on a cluster: use `elasticjob` for local jobs")
        if context is not None or kubeconfig is not None:
            raise BadInput(
                "a context and a kubeconfig belong to a cluster, and this machine was chosen: "
                "leave out one of the two"
            )
        return False
    named = context is not None or kubeconfig is not None
    return is_plugin or cluster is True or named or is_cluster_default()


def checked_name(name: str) -> str:
    """Return a job's name, which must not be an option of kubectl. Raises `BadInput`."""
    if not _NAME.fullmatch(name):
        raise BadInput(f"the name of a job must be a DNS label, not {echoed(name)}")
    return name


class NoAnswer(CommandError):
    """API server that accepts connections, or whose address exists, and does not answer."""


class Refused(CommandError):
    """Error of kubectl or refusal of the API server, with its reason, such as `Forbidden`."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Answer:
    """Output of kubectl, and its errors, of which a successful call has none."""

    output: str
    errors: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    def check(self) -> None:
        """Raise `CommandError` if the call failed: its errors, and a remedy where one is known."""
        if not self.errors:
            return
        answer = list(dict.fromkeys(_PREFIX.sub("", line) for line in self.errors))
        for pattern, text in _TEXTS:
            if found := pattern.fullmatch(answer[-1]):
                raise Refused(text.format(*map(echoed, found.groups()[:1]), *found.groups()[1:]))
        remedy = next((text for sign, text in _REMEDIES if sign in answer[-1]), "")
        reason = next((found[1] for line in self.errors if (found := _REASON.match(line))), "")
        if answer == ["unknown"] and reason:  # kubectl's word for an answer without a message
            answer = [reason]
            remedy = _FORBIDDEN if reason == "Forbidden" else ""
        raise Refused(
            f"the cluster's answer: {'; '.join([*answer, *([remedy] if remedy else [])])}", reason
        )


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Cluster and namespace of kubectl's calls; None means the kubeconfig's default."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None

    def items(self, *arguments: str) -> list[Json]:
        found = self.get(*arguments)
        items: list[Json] = found.get("items", [found] if found else [])
        return items

    def jobs(self, name: str | None, everywhere: bool = False) -> list[Json]:
        """Return the objects of one or all jobs, unparsed. Raises `CommandError`."""
        words = [checked_name(name)] if name is not None else []
        return self.items(RESOURCE, *words, *(["--all-namespaces"] if everywhere else []))

    def get(self, *arguments: str) -> Json:
        answer = self.call("get", *arguments, "--output=json")
        try:
            document = json.loads(answer) if answer.strip() else {}
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise CommandError(
                "kubectl did not answer with a JSON object: check the program `kubectl` on PATH"
            )
        return document

    def call(self, verb: str, *arguments: str, given: str | None = None) -> str:
        """Run kubectl to its end with `given` as input. Raises `CommandError`."""
        done = self.attempt(verb, *arguments, given=given)
        done.check()
        return done.output

    def attempt(self, verb: str, *arguments: str, given: str | None = None) -> Answer:
        """Run kubectl to its end, successful or not. Raises `CommandError` if it cannot run."""
        words = (verb, *arguments, f"--request-timeout={REQUEST_SECONDS}s")
        return _kubectl(*words, where=self.where(), given=given)

    def where(self) -> list[str]:
        """Return kubectl's options for this cluster and namespace."""
        where = [f"--namespace={self.namespace}"] if self.namespace else []
        where += [f"--context={self.context}"] if self.context else []
        return where + ([f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else [])


def _kubectl(*arguments: str, where: Sequence[str], given: str | None) -> Answer:
    """Run kubectl to its end. Raises `CommandError`.

    Raises:
        NoAnswer: the API server does not answer.
    """
    words = [*arguments, *where]
    data = (given or "").encode(errors="replace")
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(["kubectl", *words], stdin=pipe, stdout=pipe, stderr=pipe) as process:
            try:
                output, errors = _communicate(process, data, where)
            except BaseException:  # also Ctrl-C: the block would wait, or leave a zombie
                process.kill()
                process.wait()
                raise
    except FileNotFoundError as error:
        raise CommandError(
            "kubectl was not found on PATH; it is required for jobs on a cluster"
        ) from error
    except OSError as error:
        raise CommandError(f"kubectl cannot be run: {error.strerror}") from error
    # As bytes, so that a carriage return in a log stays one.
    text = output.decode(errors="replace")
    if process.returncode == 0:
        return Answer(text)
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    # The lines before the last one are warnings and klog's, unless they are errors as well.
    found = tuple(line for line in lines[:-1] if _PREFIX.match(line)) + tuple(lines[-1:])
    return Answer(text, found or (f"exit code {process.returncode}",))


def _communicate(
    process: subprocess.Popen[bytes], data: bytes, where: Sequence[str]
) -> tuple[bytes, bytes]:
    """Return the output and the errors of kubectl. Raises `CommandError` without an end."""
    try:
        return process.communicate(data, ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        if server := _silent_server(where):
            text = f"the API server {echoed(server)} does not answer: {_NETWORK}"
            raise NoAnswer(text) from None
    try:
        return process.communicate(timeout=CALL_SECONDS - ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"kubectl did not answer within {CALL_SECONDS:.0f} s") from error


def _silent_server(where: Sequence[str]) -> str:
    """Return the address of the API server if it does not answer; empty if it does, or is unknown.

    The check has no credentials, so that no plug-in asks for them again. A refusal is an answer.
    """
    words = ["config", "view", "--minify", "--raw", "--flatten", "--output=json", *where]
    try:
        config = json.loads(_checked(words).stdout)
        server = str(config["clusters"][0]["cluster"]["server"])
        config["users"] = [{"name": user["name"], "user": {}} for user in config["users"] or ()]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return ""  # no kubeconfig, as in a pod
    limit = f"--request-timeout={CHECK_SECONDS}s"
    try:
        with NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            done = _checked(["get", "--raw=/version", limit, f"--kubeconfig={file.name}"])
    except OSError:  # no writable folder for temporary files
        return ""
    except subprocess.TimeoutExpired:
        return server
    errors = done.stderr.decode(errors="replace")
    return server if done.returncode and any(sign in errors for sign in _SILENCE) else ""


def _checked(words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["kubectl", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=2.0 * CHECK_SECONDS,
    )
