"""Commands and environments of a pod's two processes.

Translates an ElasticJob into the settings of launcher and agent on one machine.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticjob_agent.zipapp_build import install
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.container import Trainer
from elasticjob_cli.local.kubelet import UID_VARIABLE, PodFiles, Program
from elasticjob_cli.settings import LOOPBACK
from elasticjob_operator.domain.manifests.names import pod_name
from elasticjob_operator.domain.manifests.sidecar import COUNTED
from elasticjob_operator.domain.manifests.snapshots import snapshot_variables
from elasticjob_operator.domain.plan.backends import STORE_INDEX, agent_params, is_steered
from elasticjob_operator.model import ElasticJob, Launch
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import job_prefix


@dataclass(frozen=True, slots=True)
class PodPrograms:
    """Factory of the processes of one job's pods."""

    job: ElasticJob
    trainer: Trainer
    environment: Mapping[str, str]
    run_dir: Path
    endpoint: str
    """Endpoint of etcd or of the c10d store."""
    claims: Path
    """Folder with one folder for each PersistentVolumeClaim that a job names for its snapshots."""

    @property
    def pyz(self) -> Path:
        return self.run_dir / "launcher.pyz"

    @property
    def job_key_file(self) -> Path:
        return self.run_dir / "job.key"

    def build(self) -> None:
        """Write the launcher's files, as the init container does in a pod, and the job's secret.

        Raises `CommandError` if there is no room for them.
        """
        try:
            install(self.pyz)
            self.job_key_file.touch(mode=0o600)
            self.job_key_file.write_text(secrets.token_hex(32))
        except OSError as error:
            raise CommandError(
                f"the files of the run cannot be written: {self.run_dir}: {error.strerror}; free "
                "room there, or set TMPDIR to a folder with more"
            ) from error

    def prefix(self, incarnation: int) -> str:
        metadata = self.job.metadata
        return job_prefix(metadata.namespace, metadata.uid, incarnation)

    def launcher(self, files: PodFiles) -> Program:
        trainer = self.trainer
        env = {
            **trainer.env,
            UID_VARIABLE: files.uid,
            "ELASTICJOB_SOCKET": str(files.socket),
            "ELASTICJOB_PROBE_ADDRESS": LOOPBACK,
            "ELASTICJOB_INIT": "1",
            "ELASTICJOB_SEVERAL_NODES": str(int(self.job.spec.max_nodes > 1)),
            "ELASTICJOB_STOP_GRACE_SECONDS": str(self.job.spec.recovery.stop_grace_seconds),
            "ELASTICJOB_TERMINATION_LOG": str(files.termination_log),
            **snapshot_variables(self.job, str(self.claims / self._claim()), ""),
        }
        if trainer.launch is Launch.PER_WORKER and not trainer.workers.isdigit():
            env["ELASTICJOB_NPROC"] = trainer.workers
        argv = (trainer.interpreter, str(self.pyz), *trainer.options, "--", *trainer.argv)
        return Program(argv, env, trainer.cwd, is_trainer=True)

    def _claim(self) -> str:
        snapshots = self.job.spec.recovery.snapshots
        storage = None if snapshots is None else snapshots.storage
        return "" if storage is None else storage.claim or ""

    def agent(self, files: PodFiles) -> Program:
        recovery, workers = self.job.spec.recovery, self.trainer.workers
        env = {
            **self.environment,
            UID_VARIABLE: files.uid,
            "ELASTICJOB_PREFIX": self.prefix(files.incarnation),
            "ELASTICJOB_ENDPOINTS": self.endpoint,
            "ELASTICJOB_MEMBER_ID": files.uid,
            "ELASTICJOB_NAME": files.name,
            "ELASTICJOB_ADDRESS": LOOPBACK,
            "ELASTICJOB_BIND_ADDRESS": LOOPBACK,
            "ELASTICJOB_SLOTS": workers if workers.isdigit() else COUNTED,
            "ELASTICJOB_NNODES": f"{self.job.spec.min_nodes}:{self.job.spec.max_nodes}",
            "ELASTICJOB_NODE": socket.gethostname(),
            "ELASTICJOB_JOB_KEY_FILE": str(self.job_key_file),
            "ELASTICJOB_SOCKET": str(files.socket),
            "ELASTICJOB_LAUNCH": self.trainer.launch.value,
            "ELASTICJOB_LOG_DIR": str(files.worker_logs),
            "ELASTICJOB_STOP_GRACE_SECONDS": str(recovery.stop_grace_seconds),
            "ELASTICJOB_KEEP_ALIVE_SECONDS": str(self.job.spec.rendezvous.keep_alive_seconds),
            "ELASTICJOB_WARM_START": recovery.warm_start.value,
            "ELASTICJOB_WARM_START_MODULES": ",".join(recovery.warm_start_modules),
            "ELASTICJOB_HANG_TIMEOUT_SECONDS": str(recovery.hang_timeout_seconds),
            "ELASTICJOB_TERMINATION_LOG": str(files.termination_log),
            **self._backend(files),
        }
        given = self.job.spec.nproc_per_node
        if self.trainer.launch is Launch.PER_NODE and given is not None:
            env["ELASTICJOB_NPROC"] = str(given)
        # -P: files in the working folder must not shadow a module.
        return Program((sys.executable, "-P", "-m", "elasticjob_agent"), env, self.run_dir)

    def _backend(self, files: PodFiles) -> dict[str, str]:
        """Return the agents' settings for a rendezvous other than etcd's v3 API."""
        job = self.job
        if is_steered(job):
            return {}
        hosts = files.name == pod_name(job.metadata.name, STORE_INDEX)
        return {
            "ELASTICJOB_BACKEND": job.spec.rendezvous.backend.agent_name,
            "ELASTICJOB_BOUNDS": encode(agent_params(job)).decode(),
            "ELASTICJOB_STORE_HOST": str(hosts).lower(),
            "ELASTICJOB_CONTROL": str(files.control),
        }
