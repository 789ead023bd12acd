"""Options of `elasticjob agent`: a wrong one is an error with exit code 2, before any start."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob_agent.rdzv_conf import read_conf
from elasticjob_agent.setting_values import SettingsError
from elasticjob_agent.settings import BackendOptions
from elasticjob_agent.standalone import Options, slots_of, standalone_agent
from elasticjob_agent.worker_runtime import StartWorkers, WorkerStart
from elasticjob_cli.main import main
from elasticjob_launcher.worker_count import usable_cpus
from elasticjob_rendezvous.etcd.endpoints import Tls

OPTIONS = Options(
    nnodes="1:4",
    nproc_per_node="2",
    rdzv_backend="etcd",
    rdzv_endpoint="127.0.0.1:2379",
    rdzv_id="digits",
    rdzv_conf="",
    max_restarts=3,
    local_addr="",
    role="default",
    log_dir="",
    name="node-0",
    no_python=False,
    module=False,
    command=(__file__, "--lr", "1"),
)


@pytest.mark.parametrize(("tee", "has_files"), [("0", False), ("0:0", False), ("1:1", True)])
def test_log_folder_is_made_for_streams_that_need_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tee: str, has_files: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    agent = standalone_agent(replace(OPTIONS, tee=tee, redirects="0"))
    assert (agent.settings.logs.folder is not None) == has_files
    assert len(list(tmp_path.iterdir())) == has_files


V2: dict[str, object] = {"rdzv_backend": "etcd-v2"}
C10D: dict[str, object] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost"}


def test_torchrun_options_become_settings(tmp_path: Path) -> None:
    options = replace(
        OPTIONS,
        rdzv_endpoint="127.0.0.1:2379,127.0.0.1:2380",
        rdzv_conf="join_timeout=60, last_call_timeout=5,keep_alive_seconds=2,increment=2",
        log_dir=str(tmp_path),
    )
    plain = standalone_agent(options)
    settings, bounds = plain.settings, plain.settings.bounds
    assert plain.command == (sys.executable, "-u", __file__, "--lr", "1")
    assert settings.prefix == "/elasticjob/default/digits/0/"
    assert settings.etcd.endpoints == ("127.0.0.1:2379", "127.0.0.1:2380")
    assert settings.address == "127.0.0.1", "the address that etcd is reached from"
    assert settings.bind_address == "127.0.0.1"
    assert settings.slots == 2
    assert settings.logs.folder == tmp_path / "digits_node-0"
    assert bounds is not None
    assert (bounds.min_nodes, bounds.max_nodes, bounds.increment) == (1, 4, 2)
    assert (bounds.join_timeout_seconds, bounds.last_call_seconds) == (60, 5)
    assert (bounds.keep_alive_seconds, bounds.max_restarts) == (2, 3)


@pytest.mark.parametrize("run_id", ["a b", "run 7 of x.y-z", "7"])
def test_run_id_may_contain_spaces(run_id: str) -> None:
    settings = standalone_agent(replace(OPTIONS, rdzv_id=run_id)).settings
    assert (settings.run_id, settings.rendezvous_id) == (run_id, run_id)


@pytest.mark.parametrize("run_id", [" a", "a ", "a\tb", "a/b", "x" * 254])
def test_invalid_run_id_is_refused(run_id: str) -> None:
    with pytest.raises(SettingsError, match="--rdzv-id must be letters, digits, spaces"):
        standalone_agent(replace(OPTIONS, rdzv_id=run_id))


def test_agents_of_one_run_share_a_key_and_other_runs_do_not() -> None:
    secret = replace(OPTIONS, rdzv_conf="user=u,password=p")
    keys = [
        standalone_agent(replace(secret, rdzv_id=run_id, name=name)).settings.job_key
        for run_id, name in (("a", "x"), ("a", "y"), ("b", "x"))
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_password_on_the_command_line_is_warned_of(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("word")
    options = replace(OPTIONS, rdzv_backend=backend)
    standalone_agent(replace(options, rdzv_conf=f"user=u,password_file={file}"))
    standalone_agent(options)
    assert not caplog.records
    standalone_agent(replace(options, rdzv_conf="user=u,password=word"))
    (record,) = caplog.records
    assert "password_file" in record.getMessage()
    assert "word" not in record.getMessage().replace("password", "")


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2", "c10d"])
def test_key_of_a_run_without_password_is_not_derived_from_its_name(backend: str) -> None:
    options = replace(OPTIONS, rdzv_backend=backend)
    keys = [standalone_agent(options).settings.job_key for _ in range(2)]
    kept = standalone_agent(options).settings.key_in_etcd
    assert kept == (backend == "etcd")
    assert keys == [b"", b""] if kept else keys[0] != keys[1]


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"module": True, "command": ("json.tool",)}, (sys.executable, "-u", "-m", "json.tool")),
        ({"no_python": True, "command": ("sleep", "1")}, ("sleep", "1")),
    ],
)  # fmt: skip
def test_modules_and_programs(options: dict[str, object], command: tuple[str, ...]) -> None:
    assert standalone_agent(replace(OPTIONS, **options)).command == command  # type: ignore[arg-type]


def test_variable_limits_the_size_of_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's files have no limit."""
    assert standalone_agent(OPTIONS).settings.logs.max_bytes == 16 * 1024 * 1024
    monkeypatch.setenv("ELASTICJOB_MAX_LOG_BYTES", str(10**12))
    assert standalone_agent(OPTIONS).settings.logs.max_bytes == 10**12
    monkeypatch.setenv("ELASTICJOB_MAX_LOG_BYTES", "much")
    with pytest.raises(SettingsError, match="ELASTICJOB_MAX_LOG_BYTES"):
        standalone_agent(OPTIONS)


def test_streams_that_need_files_have_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert standalone_agent(OPTIONS).settings.logs.folder is None
    folder = standalone_agent(replace(OPTIONS, tee="3")).settings.logs.folder
    assert folder is not None
    assert folder.parent.parent == tmp_path
    assert folder.name == "digits_node-0"


def test_shutdown_timeout_precedes_stop_grace() -> None:
    options = replace(OPTIONS, rdzv_conf="stop_grace=20", shutdown_timeout=3)
    settings = standalone_agent(options).settings
    assert settings.bounds is not None
    assert (settings.stop_grace_seconds, settings.bounds.stop_grace_seconds) == (3, 3)


def test_virtual_local_rank_needs_a_device_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(OPTIONS, virtual_local_rank=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(SettingsError, match="has no device for local rank 1"):
        standalone_agent(options)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    worker = WorkerStart(1, (), {"RANK": "3", "LOCAL_RANK": "1"}, "", "[3] ")
    order = standalone_agent(options).hooks.adjust_start(StartWorkers(1, (worker,), 0))
    env = {"RANK": "3", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "6"}
    assert order.workers == (replace(worker, env=env),)


def test_local_rank_in_an_argument_is_replaced() -> None:
    """torchrun replaces it; other text with a dollar sign is the script's."""
    argv = ("python", "train.py", "--device=${local_rank}", "$$${rank}")
    workers = tuple(WorkerStart(number, argv, {}, "", "") for number in range(2))
    order = standalone_agent(OPTIONS).hooks.adjust_start(StartWorkers(1, workers, 0))
    assert [worker.argv[2:] for worker in order.workers] == [
        (f"--device={number}", "$$${rank}") for number in range(2)
    ]


@pytest.mark.parametrize("module", [False, True])
def test_interpreter_of_workers_is_torch_variable(
    module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHON_EXEC", str(python))
    options = replace(OPTIONS, module=module)
    command = standalone_agent(options).command
    assert command == (str(python), "-u", *["-m"][: int(module)], *OPTIONS.command)
    monkeypatch.setenv("PYTHON_EXEC", "no-such-python")
    with pytest.raises(SettingsError, match=r"PYTHON_EXEC must be an interpreter.*no-such-python"):
        standalone_agent(options)


def test_fixed_number_of_nodes() -> None:
    bounds = standalone_agent(replace(OPTIONS, nnodes="3")).settings.bounds
    assert bounds is not None
    assert (bounds.min_nodes, bounds.max_nodes) == (3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ()}, "no command"),
        ({"command": ("",)}, "no command"),
        ({"command": ("train.py",)}, "the script 'train.py' does not exist"),
        ({"command": ("/",)}, "a folder without a __main__.py"),
        ({"command": ("no_such_module.x",), "module": True}, "no module 'no_such_module'"),
        ({"command": ("no-such-program",), "no_python": True}, "not a program"),
        ({"module": True, "no_python": True}, "must not be given together"),
        ({"nnodes": "4:2"}, "1 <= MIN <= MAX"),
        ({"nnodes": "0:2"}, "1 <= MIN <= MAX"),
        ({"nnodes": "two"}, "MIN:MAX"),
        ({"nnodes": "1:2:3"}, "MIN:MAX"),
        ({"nnodes": ""}, "MIN:MAX"),
        ({"nproc_per_node": "0"}, "--nproc-per-node"),
        ({"nproc_per_node": "many"}, "--nproc-per-node"),
        ({"max_restarts": -1}, "--max-restarts"),
        ({"rdzv_backend": "static"}, "--rdzv-backend must be etcd"),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:no"}, "--rdzv-endpoint"),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}, "port from 1"),
        ({"rdzv_backend": "c10d", "rdzv_conf": "is_host=maybe"}, "is_host must be true or false"),
        ({"rdzv_backend": "etcd-v2", "rdzv_endpoint": ""}, "--rdzv-endpoint must name etcd"),
        ({"rdzv_endpoint": ""}, "--rdzv-endpoint must name etcd"),
        ({"rdzv_endpoint": "127.0.0.1"}, "host:port"),
        ({"rdzv_endpoint": "127.0.0.1:no"}, "host:port"),
        ({"rdzv_endpoint": "ftp://127.0.0.1:1"}, "http or https"),
        ({"rdzv_endpoint": "no-such-host.invalid:2379"}, "--local-addr"),
        ({"rdzv_id": ""}, "--rdzv-id must be given"),
        ({"rdzv_id": "a/b"}, "--rdzv-id must be letters"),
        ({"local_addr": "no-such-host.invalid"}, "--local-addr"),
        ({"local_addr": "two..dots"}, "--local-addr 'two..dots' is not an address"),
        ({"rdzv_endpoint": "two..dots:1"}, "cannot be reached from here"),
        ({"log_dir": __file__}, "--log-dir"),
        ({"rdzv_conf": "timeout"}, "key=value"),
        ({"rdzv_conf": "last_call_timeuot=3"}, "did you mean last_call_timeout?"),
        ({"rdzv_conf": "zzz=3"}, "known are"),
        ({"rdzv_conf": "read_timeout=3"}, "only with etcd-v2 and c10d; known are ca_cert, cacert"),
        (
            V2 | {"rdzv_conf": "keep_alive_interval=3"},
            "etcd-v2, only with c10d;",
        ),
        (V2 | {"rdzv_conf": "confirm=3"}, "does nothing with backend etcd-v2, only with etcd;"),
        (V2 | {"rdzv_conf": "is_host=true"}, "only with c10d"),
        (V2 | {"rdzv_conf": "conect_timeout=3"}, "did you mean connect_timeout?"),
        (V2 | {"rdzv_conf": "read_timeout=0"}, "read_timeout must be a whole number of at least 1"),
        (
            C10D | {"rdzv_conf": f"cacert={__file__}"},
            "only with etcd and etcd-v2; known are c",
        ),
        (C10D | {"rdzv_conf": "increment=2"}, "does nothing with backend c10d"),
        (C10D | {"rdzv_conf": "store_type=file"}, "store_type must be tcp"),
        (C10D | {"rdzv_conf": "close_timeout=0"}, "close_timeout must be seconds of at least 1"),
        ({"rdzv_conf": "keep_alive_seconds=0.001"}, "at least 2 (etcd grants no shorter lease"),
        (C10D | {"rdzv_conf": "keep_alive=1.9"}, "keep_alive must be seconds of at least 2"),
        ({"rdzv_conf": "confirm=0.001"}, "confirm must be seconds of at least 1 (members"),
        ({"rdzv_conf": "timeout=0.5"}, "timeout must be seconds of at least 1, got '0.5'"),
        ({"rdzv_conf": "keep_alive_seconds=-1"}, "of at least 2, got '-1'"),
        (
            C10D | {"rdzv_conf": "keep_alive_interval=1,keep_alive_max_attempt=1"},
            "keep_alive_interval times keep_alive_max_attempt must be at least 2 seconds",
        ),
        (C10D | {"rdzv_conf": "heartbeat_timeout=0.001"}, "heartbeat_timeout must be seconds of"),
        (
            C10D | {"rdzv_conf": "keep_alive_interval=2,keep_alive=3"},
            "either keep_alive",
        ),
        ({"redirects": "4"}, "--redirects: streams must be 0 to 3, or such as 0:1,1:3"),
        ({"tee": "0:9"}, "--tee: streams must be 0 to 3"),
        ({"local_ranks_filter": "0,x"}, "--local-ranks-filter must be local ranks such as 0,1"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout must be seconds from 0 to 86400, got -1"),
        ({"rdzv_conf": "timeout=soon"}, "timeout must be seconds"),
        ({"rdzv_conf": "timeout=nan"}, "timeout must be seconds"),
        ({"rdzv_conf": "increment=0"}, "increment must be a whole number"),
        ({"rdzv_conf": "cacert=/no/such/file"}, "does not exist"),
        ({"rdzv_conf": f"cert={__file__}"}, "cert and key together"),
        ({"rdzv_conf": "user=root"}, "user and password"),
        ({"rdzv_conf": "protocol=gopher"}, "protocol must be http or https"),
        ({"rdzv_conf": f"protocol=http,cacert={__file__}"}, "protocol must be https"),
    ],
)
def test_invalid_option_names_its_remedy(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        standalone_agent(replace(OPTIONS, **options))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_tls_is_used_when_configured() -> None:
    etcd = standalone_agent(replace(OPTIONS, rdzv_conf="protocol=https")).settings.etcd
    assert etcd.tls is not None
    assert standalone_agent(OPTIONS).settings.etcd.tls is None


def test_password_is_read_from_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hush\n")
    conf = f"user=u,password_file={tmp_path / 'password'}"
    assert standalone_agent(replace(OPTIONS, rdzv_conf=conf)).settings.etcd.password == "hush"


def test_unreadable_password_file_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="binary' is not UTF-8 text"):
        standalone_agent(replace(OPTIONS, rdzv_conf=f"user=u,password_file={binary}"))


def test_password_file_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read every file, so the error is made here."""
    secret = tmp_path / "secret"
    secret.write_text("x")

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(SettingsError, match="secret' cannot be read: Permission denied"):
        standalone_agent(replace(OPTIONS, rdzv_conf=f"user=u,password_file={secret}"))


def test_rendezvous_defaults() -> None:
    conf = read_conf("")
    assert (conf.timeout, conf.last_call_timeout, conf.keep_alive_seconds) == (600, 30, 5)


def test_workers_are_counted_as_in_a_pod() -> None:
    assert slots_of("auto") == slots_of("cpu") == usable_cpus()
    with pytest.raises(SettingsError) as caught:
        slots_of("gpu")
    said, _, remedy = str(caught.value).partition(". ")
    assert said.startswith("--nproc-per-node=gpu: nprocPerNode is gpu, but there is no accelerator")
    assert "container" not in said, "the machine of an agent may have none"
    assert remedy.endswith("in a pod, request the accelerator in the container's resources")
    with pytest.raises(SettingsError) as unreplaced:
        slots_of("$(WORKERS)")
    assert str(unreplaced.value).endswith("no such variable; outside of one, set a number")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes=4:2", __file__], "elasticjob: --nnodes must have 1 <= MIN <= MAX"),
        (["--rdzv_endpoint=127.0.0.1:1", "--rdzv_id=x", "gone.py"], "the script 'gone.py'"),
        (["--max-restarts=lots", __file__], "--max-restarts"),
        (["--nonsense", __file__], "--nonsense"),
    ],
)  # fmt: skip
def test_command_exits_with_2_on_invalid_options(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["elasticjob", "agent", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "given", "names"),
    [
        ([], None, "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        ([], "SIGINT", "SIGINT"),
        (["--signals-to-handle=SIGUSR1"], "SIGINT", "SIGUSR1"),
    ],
)
def test_variable_of_the_workers_has_the_handled_signals(
    options: list[str], given: str | None, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", given or "")
    if given is None:
        monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE")
    found: list[str | None] = []

    def refuse(_: Options) -> None:
        found.append(os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE"))
        raise SettingsError("no agent in this test")

    monkeypatch.setattr("elasticjob_cli.commands.agent.standalone_agent", refuse)
    monkeypatch.setattr(sys, "argv", ["elasticjob", "agent", "--standalone", *options, __file__])
    with pytest.raises(SystemExit):
        main()
    assert found == [names]


@pytest.mark.parametrize(
    ("name", "value"),
    [("STANDBY_SECONDS", "-1"), ("STANDBY_MIB", "4Gi"), ("SAVE_SIGNAL", "TERM")],
)
def test_variable_that_the_launcher_refuses_is_the_only_error(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"ELASTICJOB_{name}", value)
    monkeypatch.setenv("ELASTICJOB_ORPHAN_SECONDS", "x")  # of a pod, not passed on
    monkeypatch.setattr(sys, "argv", ["elasticjob", "agent", "--standalone", __file__])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elasticjob: ELASTICJOB_{name} must be ")
    assert line.endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("", "localhost:29400"), ("127.0.0.1", "127.0.0.1:29400"), ("[::1]:7", "[::1]:7")],
)
def test_c10d_store_is_local_unless_configured(endpoint: str, expected: str) -> None:
    asked = replace(OPTIONS, rdzv_backend="c10d", rdzv_endpoint=endpoint, local_addr="127.0.0.1")
    settings = standalone_agent(asked).settings
    assert settings.etcd.endpoints == (expected,)
    assert (settings.backend, settings.hosts_store) == ("c10d", None)
    assert settings.rendezvous_id == OPTIONS.rdzv_id, "a plain torchrun names the run so"
    told = standalone_agent(replace(asked, rdzv_conf="is_host=false")).settings
    assert told.hosts_store is False


def test_torch_names_of_etcd_settings_are_accepted() -> None:
    conf = f"ca_cert={__file__},ssl_cert={__file__},ssl_cert_key={__file__},read_timeout=7"
    more = "connect_timeout=2,etcd_prefix=/own,timeout=9,join_timeout=8"
    options = replace(OPTIONS, rdzv_backend="etcd-v2", rdzv_conf=f"{conf},{more}")
    settings = standalone_agent(options).settings
    assert settings.etcd.tls == Tls(__file__, __file__, __file__, None)
    assert settings.backend_options == BackendOptions(
        connect_seconds=2, read_seconds=7, etcd_prefix="/own"
    )
    assert settings.bounds is not None
    assert settings.bounds.join_timeout_seconds == 8


@pytest.mark.parametrize(
    ("conf", "seconds", "beat", "beats"),
    [
        ("", 5, None, None),
        ("keep_alive_seconds=9", 9, None, None),
        ("keep_alive_interval=2", 6, 2, None),
        ("keep_alive_max_attempt=2", 10, None, 2),
        ("keep_alive_interval=7,keep_alive_max_attempt=5", 35, 7, 5),
    ],
)
def test_torch_keep_alive_settings_of_c10d(
    conf: str, seconds: float, beat: int | None, beats: int | None
) -> None:
    settings = standalone_agent(replace(OPTIONS, **C10D, rdzv_conf=conf)).settings  # type: ignore[arg-type]
    assert settings.bounds is not None
    assert settings.bounds.keep_alive_seconds == seconds
    assert (settings.backend_options.beat_seconds, settings.backend_options.beats) == (beat, beats)


def test_etcd_v2_settings() -> None:
    settings = standalone_agent(replace(OPTIONS, rdzv_backend="etcd-v2")).settings
    assert settings.backend == "etcd-v2"
    assert settings.etcd.endpoints == standalone_agent(OPTIONS).settings.etcd.endpoints


@pytest.mark.parametrize(
    ("backend", "lease", "seconds"), [("etcd", 5, 30.0), ("etcd", 60, 60.0), ("c10d", 60, 30.0)]
)
def test_workers_of_hung_agent_end_with_its_lease_at_the_latest(
    backend: str, lease: int, seconds: float
) -> None:
    """The launcher also has a deadline on etcd v3, derived from the agent's evidence."""
    options = replace(OPTIONS, rdzv_backend=backend, rdzv_conf=f"keep_alive_seconds={lease}")
    assert standalone_agent(options).hung_agent_seconds == seconds


@pytest.mark.parametrize("path", ["/run/etcd.sock", "/run/a b/etcd:0"])
def test_socket_of_etcd_implies_the_loopback_address(path: str) -> None:
    settings = standalone_agent(replace(OPTIONS, rdzv_endpoint=f"unix://{path}")).settings
    assert (settings.etcd.endpoints, settings.address) == ((f"unix://{path}",), "127.0.0.1")


def test_socket_of_etcd_with_tls_is_refused() -> None:
    options = replace(OPTIONS, rdzv_endpoint="unix:///etcd.sock", rdzv_conf="protocol=https")
    with pytest.raises(SettingsError, match="a unix socket has no TLS"):
        standalone_agent(options)
