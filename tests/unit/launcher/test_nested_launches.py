"""Programs that start a launcher themselves, as users write them."""

from __future__ import annotations

import ast
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import elasticjob_torchrun
import pytest

from elasticjob_launcher.app import Launcher
from elasticjob_launcher.programs import program_files
from elasticjob_launcher.programs.nested_launches import find_nested_launch
from elasticjob_launcher.programs.program_check import ProgramError, find_in_command, node_launch
from elasticjob_launcher.settings import NESTED, read_settings


def found(folder: Path, source: str, name: str = "run_all.py") -> tuple[int, str] | None:
    file = folder / name
    file.write_text(source)
    launch = find_nested_launch(str(file), False, [])
    return None if launch is None else (launch.line, launch.launcher.name)


def launch_reason(
    command: Sequence[str], environ: Mapping[str, str] | None = None, several: str = "0"
) -> str:
    """Return the reason for which a launcher runs the command once for its node."""
    given = {"ELASTICJOB_SOCKET": "/tmp/s", "ELASTICJOB_SEVERAL_NODES": several}
    settings = read_settings(["--check", "--", *command], given)
    return node_launch(settings, environ or {})


STARTING = {
    "run": ('import subprocess\nsubprocess.run(["torchrun", "train.py"])', 2, "torchrun"),
    "module": (
        'import subprocess, sys\nsubprocess.run([sys.executable, "-m", "torch.distributed.run"])',
        2,
        "torchrun",
    ),
    "system": (
        'import os\nret = os.system("CUDA_VISIBLE_DEVICES=0,1 accelerate launch train.py")\n'
        "exit(ret)",
        2,
        "accelerate launch",
    ),
    "wrapper with options": (
        'import subprocess\nsubprocess.run(["conda", "run", "-n", "x", "torchrun", "t.py"])',
        2,
        "torchrun",
    ),
    "wrappers in a text": (
        'import os\nos.system("nice -n 10 sudo -u me torchrun t.py")',
        2,
        "torchrun",
    ),
    "shell behind a wrapper": (
        'import subprocess\nsubprocess.run(["sudo", "-E", "bash", "-c", "cd x; torchrun t.py"])',
        2,
        "torchrun",
    ),
    "preparation in a line": (
        'import subprocess\nsubprocess.run(["bash", "-c", ". env.sh && exec torchrun train.py"])',
        2,
        "torchrun",
    ),
    "exec": (
        'import os, sys\nos.execvp("torchrun", ["torchrun", "train.py", *sys.argv[1:]])',
        2,
        "torchrun",
    ),
    "execlp": ('from os import execlp\nexeclp("deepspeed", "deepspeed", "t.py")', 2, "deepspeed"),
    "posix_spawn": (
        'import os\nos.posix_spawnp("torchrun", ["torchrun", "t.py"], os.environ)',
        2,
        "torchrun",
    ),
    "list in parts": (
        "import os, sys, subprocess\n"
        'cmd = [sys.executable, "-m", "torch.distributed.launch", f"--nproc={os.cpu_count()}"]\n'
        'cmd += ["train.py"] + sys.argv[1:]\n'
        "proc = subprocess.Popen(cmd, env=dict(os.environ))\nsys.exit(proc.wait())",
        2,
        "torch.distributed.launch",
    ),
    "joined": (
        'import subprocess as sp\nsp.call(" ".join(["torchrun", "--nproc", str(2), "t.py"]), '
        "shell=True)",
        2,
        "torchrun",
    ),
    "helper and loop": (
        "import subprocess\ndef sh(cmd):\n    subprocess.run(cmd, shell=True, check=True)\n"
        'def main():\n    sh("git rev-parse HEAD")\n    for lr in (1, 2):\n'
        '        sh(f"torchrun --nproc-per-node=2 train.py --lr {lr}")\n'
        'if __name__ == "__main__":\n    main()',
        7,
        "torchrun",
    ),
    "returned command": (
        "import subprocess, click\ndef build(n):\n"
        '    args = ["accelerate", "launch", "--num_processes", str(n)]\n'
        '    args.extend(["train.py"])\n    return args\n'
        "@click.command()\ndef main(n):\n    subprocess.check_call(build(n))\nmain()",
        3,
        "accelerate launch",
    ),
    "typer and shlex": (
        "import subprocess, typer, shlex\napp = typer.Typer()\n@app.command()\n"
        "def train(gpus: int = 2, dry: bool = False):\n"
        '    cmd = f"torchrun --nproc-per-node={gpus} train.py"\n'
        "    if dry:\n        print(cmd)\n        return\n"
        "    subprocess.run(shlex.split(cmd), check=True)\n"
        'if __name__ == "__main__":\n    app()',
        9,
        "torchrun",
    ),
    "method": (
        "import subprocess\nclass Runner:\n"
        '    def __init__(self, n):\n        self.cmd = ["torchrun", f"--nproc={n}", "t.py"]\n'
        '    def run(self):\n        with open("log", "w") as log:\n'
        "            return subprocess.Popen(self.cmd, stdout=log).wait()\n"
        "raise SystemExit(Runner(2).run())",
        4,
        "torchrun",
    ),
    "thread": (
        "import subprocess, threading\ndef go(cmd): subprocess.call(cmd)\n"
        'threading.Thread(target=go, args=(["deepspeed", "train.py"],)).start()',
        3,
        "deepspeed",
    ),
    "asyncio": (
        'import asyncio\nasync def main():\n    await asyncio.create_subprocess_exec("torchrun", '
        '"t.py")\nasyncio.run(main())',
        3,
        "torchrun",
    ),
    "main of torchrun": (
        'from torch.distributed.run import main\nmain(["--nproc-per-node=2", "train.py"])',
        2,
        "torchrun",
    ),
    "alias": (
        "import torch.distributed.run as tr\nargs = tr.parse_args([])\ntr.run(args)",
        3,
        "torchrun",
    ),
    "elastic_launch": (
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "def trainer(x): return x\ndef main():\n    elastic_launch(LaunchConfig(1, 1, 2), "
        "trainer)(1)\nif __name__ == '__main__': main()",
        4,
        "torchrun",
    ),
    "runpy": (
        'import runpy, sys\nsys.argv = ["torchrun", "train.py"]\n'
        'runpy.run_module("torch.distributed.run", run_name="__main__")',
        3,
        "torchrun",
    ),
    "notebook_launcher": (
        "from accelerate import notebook_launcher\nnotebook_launcher(print, num_processes=2)",
        2,
        "notebook_launcher",
    ),
    "spawn of the tutorial": (
        "import torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        'def setup(rank, n):\n    dist.init_process_group("gloo", rank=rank, world_size=n)\n'
        "def demo(rank, n):\n    setup(rank, n)\n"
        "def run_demo(fn, n):\n    mp.spawn(fn, args=(n,), nprocs=n, join=True)\n"
        'if __name__ == "__main__":\n    n = torch.cuda.device_count()\n'
        '    assert n >= 2, f"needs 2 GPUs, but got {n}"\n    run_demo(demo, n)',
        7,
        "torch.multiprocessing.spawn",
    ),
    "both branches": (
        "import subprocess, torch\nif torch.cuda.is_available():\n"
        '    subprocess.run(["torchrun", "--nproc-per-node=gpu", "t.py"])\nelse:\n'
        '    subprocess.run(["torchrun", "t.py"])',
        3,
        "torchrun",
    ),
    "early return": (
        "import subprocess, torch\ndef main():\n    if torch.cuda.is_available():\n"
        '        subprocess.run(["torchrun", "a.py"])\n        return\n'
        '    subprocess.run(["torchrun", "b.py"])\nmain()',
        4,
        "torchrun",
    ),
    "condition in a program that cannot train": (
        "import argparse, subprocess, sys\ngpus = argparse.ArgumentParser().parse_args().gpus\n"
        'if gpus > 1:\n    subprocess.run(["torchrun", f"--nproc={gpus}", "t.py"])\nelse:\n'
        '    subprocess.run([sys.executable, "train.py"])',
        4,
        "torchrun",
    ),
    "check before": (
        "import os, sys, subprocess, torch\nif not os.path.exists('data'):\n"
        "    sys.exit('no data')\nsubprocess.run(['torchrun', 't.py'])",
        4,
        "torchrun",
    ),
}


@pytest.mark.parametrize(("source", "line", "launcher"), STARTING.values(), ids=STARTING)
def test_program_that_starts_a_launcher_is_found(
    tmp_path: Path, source: str, line: int, launcher: str
) -> None:
    assert found(tmp_path, source) == (line, launcher)


ORDINARY = {
    "worker": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "self launch without ranks": (
        "import os, subprocess\ndef train(): pass\nif 'LOCAL_RANK' in os.environ:\n    train()\n"
        "else:\n    subprocess.run(['torchrun', '--nproc-per-node=2', __file__])"
    ),
    "exec without ranks": (
        "import os, sys\ndef main():\n    if 'RANK' not in os.environ:\n"
        "        os.execvp('torchrun', ['torchrun', *sys.argv])\n    import torch\nmain()"
    ),
    "return with ranks": (
        "import os, subprocess, torch\ndef main():\n    if torch.distributed."
        "is_torchelastic_launched():\n        return\n    subprocess.run(['torchrun', 't.py'])\n"
        "main()"
    ),
    "texts": (
        '"""usage: torchrun t.py"""\nimport subprocess, torch\nUSAGE = "torchrun t.py"\n'
        "sha = subprocess.check_output(['git', 'rev-parse', 'HEAD'])\nprint('start:', USAGE)"
    ),
    "evaluation by rank 0": (
        "import subprocess, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n    subprocess.run(['torchrun', '--standalone', 'eval.py'])"
    ),
    "spawn on request": (
        "import torch.multiprocessing as mp, torch.distributed as dist, argparse\n"
        "def worker(gpu, args): dist.init_process_group('nccl')\n"
        "args = argparse.ArgumentParser().parse_args()\n"
        "if args.multiprocessing_distributed:\n    mp.spawn(worker, nprocs=8, args=(args,))\n"
        "else:\n    worker(0, args)"
    ),
    "spawn of a preparation": (
        "import torch.multiprocessing as mp, torch.distributed as dist\n"
        "def tokenize(i): print(i)\nmp.spawn(tokenize, nprocs=4)\ndist.init_process_group('gloo')"
    ),
    "helpers of torchrun": (
        "from torch.distributed.run import get_args_parser\nimport torch.distributed.run as run\n"
        "print(run.__file__, get_args_parser())"
    ),
    "name in another function": (
        "import subprocess, torch\ndef sh(cmd): subprocess.run(cmd)\n"
        "def launch():\n    cmd = ['torchrun', 't.py']\n    sh(cmd)\n"
        "def version():\n    cmd = ['git', 'log']\n    sh(cmd)\nversion()"
    ),
    "function that is not called": (
        "import subprocess, torch\ndef launch(): subprocess.run(['torchrun', 't.py'])\n"
    ),
    "sweep of one script": (
        "import subprocess, sys\nfor lr in (1, 2):\n"
        "    subprocess.run([sys.executable, 'train.py', '--launcher', 'torchrun'])"
    ),
    "names as arguments": (
        "import subprocess\n"
        "subprocess.run('pip install torchrun-x && echo torchrun && grep torchrun x', shell=True)\n"
        "subprocess.run(['echo', 'torchrun t.py']); subprocess.run(['which', 'torchrun'])"
    ),
    "no launch of accelerate": "import os\nos.system('accelerate config default')",
    "syntax error": "import subprocess\nsubprocess.run(['torchrun', 't.py']",
    "recursion": "def f():\n    f()\nf()",
    **{
        f"condition of a shell: {line}": f"import os\nos.system({line!r})"
        for line in (
            "(test -x a) && torchrun t.py",
            "[[ -x a ]] && torchrun t.py",
            "test -x a && (cd x && torchrun t.py)",
            "test -x a && { torchrun t.py; }",
            "a || torchrun t.py",
            "if [[ -x a ]]; then torchrun t.py; fi",
            "case $X in a) torchrun t.py;; esac",
        )
    },
}


@pytest.mark.parametrize("source", ORDINARY.values(), ids=ORDINARY)
def test_program_that_starts_no_launcher_for_certain_is_not_found(
    tmp_path: Path, source: str
) -> None:
    assert found(tmp_path, source) is None


def ordinary_programs() -> dict[str, dict[str, str]]:
    """Return the programs of `ordinary_programs.txt` by name, with the text of each file."""
    text = Path(__file__).with_name("ordinary_programs.txt").read_text()
    programs = {}
    for section in text.split("=== ")[1:]:
        name, _, files = section.partition("\n")
        parts = [part.partition("\n") for part in files.split("--- ")[1:]]
        programs[name] = {file: source for file, _, source in parts}
    return programs


PROGRAMS = ordinary_programs()


@pytest.mark.parametrize("library", ["known", "unknown"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_that_trains_once_for_each_worker_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    if library == "unknown":  # as before Python 3.10
        monkeypatch.delattr(sys, "stdlib_module_names")
    for file, source in PROGRAMS[name].items():
        compile(source, file, "exec")
        (tmp_path / file).write_text(source)
    assert find_nested_launch(str(tmp_path / "run.py"), False, []) is None


CLEAR = {
    "function of a class": (
        "import subprocess, torch\nclass Base:\n    def main(self): self.start()\n"
        "class Mine(Base):\n    def start(self): subprocess.run(['torchrun', 't.py'])\n"
        "Mine().main()",
        5,
    ),
    "values that all launch": (
        "import subprocess, torch\nif torch.cuda.is_available():\n    cmd = ['torchrun', 'a.py']\n"
        "else:\n    cmd = ['torchrun', 'b.py']\ncmd = cmd + ['--lr', '1']\nsubprocess.run(cmd)",
        3,
    ),
    "shell with a preparation": (
        "import os, torch\nos.system('mkdir x && cd x; torchrun \"t.py\" | tee x')",
        2,
    ),
    "loop of a shell": ("import os, torch\nos.system('for i in 1 2; do torchrun t.py; done')", 2),
    **{
        f"commands of a shell: {line}": (f"import os, torch\nos.system({line!r})", 2)
        for line in (
            "function f { torchrun t.py; }; f",
            "mkdir -p x && (cd x && torchrun t.py)",
            "if [[ -x a ]]; then b; fi; torchrun t.py",
            "[[ -x a ]] && b; torchrun t.py > log 2>&1",
            "torchrun t.py > >(tee log)",
            "torchrun t.py 'an open quotation",
        )
    },
    "check with an error": (
        "import os, sys, torch\nif 'DATA' not in os.environ:\n    sys.exit(f'no {1}')\n"
        "try:\n    os.system('torchrun t.py')\nexcept OSError as error:\n    print(error)",
        5,
    ),
    "default of a parameter": (
        "import os, torch\ndef go(cmd='torchrun t.py'): os.system(cmd)\ngo()",
        2,
    ),
}


@pytest.mark.parametrize(("source", "line"), CLEAR.values(), ids=CLEAR)
def test_program_with_a_training_package_that_starts_a_launcher_for_certain_is_found(
    tmp_path: Path, source: str, line: int
) -> None:
    assert found(tmp_path, source) == (line, "torchrun")


LARGE = {
    "attributes from each other": "import torch\n"
    + "".join(
        f"class C{number}:\n    def __init__(self, cfg):\n        self.cfg = cfg\n"
        f"        cfg = self.cfg if cfg else cfg\n"
        for number in range(40)
    )
    + "def main(cfg): print(cfg)\ncfg = 1\nmain(cfg)\nmain(C1.cfg)\n",
    "values from each other": "import os, torch\n"
    + "a = b if b else c\nb = c if a else c\nc = a if b else b\n" * 30
    + "os.system(a)\n",
    "tree of calls": "import torch\n"
    + "".join(f"def f{n}(a):\n" + f"    f{n + 1}(a)\n" * 4 for n in range(11))
    + "def f11(a): pass\nf0(1)\n",
    "20,000 lines": "import torch\n"
    + "".join(f"def f{n}(x):\n    y = x + {n}\n    return print(y, x.a)\n" for n in range(5000))
    + "".join(f"f{n}(f{n + 1}({n}))\n" for n in range(4999)),
    "branches": "import os, torch\ndef f():\n"
    + "    if a():\n        os.system('torchrun a')\n        return\n" * 2000
    + "f()\n",
    "deep expression": "x = a" + ".b()" * 5000,
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_analysis_is_bounded(tmp_path: Path, source: str) -> None:
    began = time.process_time()
    found(tmp_path, source)
    assert time.process_time() - began < 10  # a second or two on a machine with nothing else to do


def test_program_that_was_found_to_start_others_alone_is_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second search would exceed the bounds that the first one kept."""
    begin = "import subprocess, sys\nif sys.argv:\n    subprocess.run(['torchrun', 't.py'])\n"
    file = tmp_path / "run_all.py"
    file.write_text(begin + "x = 1\n" * 1000)
    monkeypatch.setattr(program_files, "MAX_STEPS", 8000)
    launch = find_nested_launch(str(file), False, [])
    assert launch is not None
    assert launch.alone


def test_of_many_modules_a_bounded_part_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    parse = ast.parse

    def counted(content: bytes, path: str) -> ast.Module:
        parsed.append(len(content))
        return parse(content, path)

    monkeypatch.setattr(ast, "parse", counted)
    for number in range(300):
        (tmp_path / f"m{number}.py").write_text("import torch\n" + "x = [1, 2, 3]\n" * 3000)
    assert found(tmp_path, "".join(f"import m{number}\n" for number in range(300))) is None
    assert 1 < len(parsed) <= 50
    assert sum(parsed) <= 1 << 20


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_result_of_a_long_analysis_does_not_depend_on_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(program_files, "MAX_SECONDS", 1000.0)
    monkeypatch.setattr(program_files, "MAX_STEPS", 20_000)
    first = found(tmp_path, source)
    clock = iter(range(0, 10_000, 1))
    monkeypatch.setattr(time, "process_time", lambda: next(clock) / 100)
    assert found(tmp_path, source) == first  # read by a slow processor


def test_files_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "package").symlink_to("package")
    (tmp_path / "latin.py").write_bytes("# \u00e9".encode("latin-1"))
    (tmp_path / "nul.py").write_bytes(b"import os\0")
    os.mkfifo(tmp_path / "pipe.py")  # reading it would wait for ever
    imports = (
        "import loop, package.x, latin, nul, pipe, absent\nfrom . import y\nfrom .. import z\n"
    )
    assert found(tmp_path, imports + "import os\nos.system('torchrun t.py')") == (5, "torchrun")
    assert find_nested_launch(str(tmp_path / "pipe.py"), False, []) is None


def test_warnings_for_the_users_source_are_left_to_the_program(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = "import os\nx = '\\d'\nos.system('torchrun t.py')"
        assert found(tmp_path, source) == (3, "torchrun")


def test_launch_in_the_users_own_modules_is_found(tmp_path: Path) -> None:
    package = tmp_path / "tools"
    package.mkdir()
    (package / "__init__.py").write_text("from .launching import go\n")
    (package / "launching.py").write_text(
        "import subprocess\ndef go(cmd):\n    subprocess.run(['torchrun', *cmd])\n"
        "if __name__ == '__main__':\n    go([])\n"
    )
    assert found(tmp_path, "import torch, tools\nprint(tools)") is None
    assert found(tmp_path, "from tools import go\ngo(['t.py'])") == (3, "torchrun")
    assert found(tmp_path, "import tools.launching as l\nl.go([])") == (3, "torchrun")
    launch = find_nested_launch("tools.launching", True, [str(tmp_path)])
    assert launch is not None
    assert launch.place == f"{package / 'launching.py'}, line 3"


@pytest.mark.parametrize(
    "command",
    [
        ["python3", "run_all.py"],
        ["nice", "-n", "5", "python", "-u", "run_all.py", "--lr", "1"],
        ["env", "A=b", "python3.11", "run_all.py"],
        ["uv", "run", "run_all.py"],
        ["python", "-m", "run_all"],
        ["bash", "-ec", "exec python run_all.py"],
        ["python", "."],
    ],
)
def test_command_whose_program_starts_a_launcher_runs_once_for_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "import os\nos.system('torchrun train.py')\n"
    for name in ("run_all.py", "__main__.py"):
        (tmp_path / name).write_text(source)
    assert re.fullmatch(r"\S*\.py, line 2 starts torchrun", launch_reason(command))
    launch = find_in_command(command, {}, str(tmp_path))
    assert launch is not None
    (tmp_path / "run_all.py").write_text("print('trains')\n")
    (tmp_path / "__main__.py").write_text("print('trains')\n")
    assert not launch_reason(command)


def test_modules_on_pythonpath_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "launching.py").write_text("import os\nos.system('deepspeed t.py')\n")
    (tmp_path / "t.py").write_text("import launching\n")
    command = ["python", str(tmp_path / "t.py")]
    assert not launch_reason(command)
    environ = {"PYTHONPATH": f"/nowhere:{tmp_path / 'lib'}"}
    assert launch_reason(command, environ).endswith("launching.py, line 2 starts deepspeed")
    with pytest.raises(ProgramError, match=r"deepspeed, .*does not join the job's rendezvous"):
        launch_reason(command, environ, "1")


@pytest.mark.parametrize(
    "command", [["python", "absent.py"], ["absent"], ["bash", "-c", "a; b"], ["sh"], ["python"]]
)
def test_command_without_a_readable_program_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not launch_reason(command, {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("ranks", "is_refused"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, True),
        ({"RANK": "1"}, True),
        ({}, False),
    ],
)
def test_first_worker_of_a_node_may_start_a_job_of_its_own(
    monkeypatch: pytest.MonkeyPatch, ranks: dict[str, str], is_refused: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", elasticjob_torchrun.ADDRESS):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**ranks, elasticjob_torchrun.NESTED: "refuse"}.items():
        monkeypatch.setenv(name, value)
    creators = {"c10d": str}
    registry = ModuleType("torch.distributed.elastic.rendezvous.api")
    handlers = SimpleNamespace(_registry=creators)
    monkeypatch.setattr(registry, "rendezvous_handler_registry", handlers, raising=False)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    elasticjob_torchrun.plugin()
    if is_refused:
        with pytest.raises(RuntimeError, match="torchrun was started by a worker"):
            creators["c10d"]("x")
    else:
        assert creators["c10d"]("x") == "x"
    monkeypatch.setenv(elasticjob_torchrun.NESTED, "allow")
    assert creators["c10d"]("x") == "x"


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "refuse"), ({NESTED: ""}, "refuse"), ({NESTED: "allow"}, "allow")],
)
def test_value_of_the_container_decides_on_a_launcher_inside_of_a_worker(
    given: dict[str, str], found: str
) -> None:
    settings = read_settings(["--check", "--", "true"], {"ELASTICJOB_SNAPSHOT_VOLUME": "off"})
    assert Launcher(settings, given)._env[NESTED] == found
