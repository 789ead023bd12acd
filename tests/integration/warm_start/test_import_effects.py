"""Preload filter: only modules whose import has a lasting effect are left to the workers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.integration.launcher_rig import process_tag, soon
from tests.integration.warm_start.warm_rig import (
    LOADED,
    SHARED,
    Warm,
    installed,
    said,
    said_warm,
    script,
    warm,
)

__all__ = ["installed", "process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folder in which packages of these tests create their files."""
    monkeypatch.setenv("PLACE", str(tmp_path))


EFFECTS = {
    "file": ("import os; open(os.environ['PLACE'] + '/new', 'w').close()", "makes the file"),
    "file named by an identifier": (
        "import os, secrets; open(os.environ['PLACE'] + '/' + secrets.token_hex(8), 'w').close()",
        "makes the file",
    ),
    "file by descriptor": (
        "import os; os.close(os.open(os.environ['PLACE'] + '/new', os.O_CREAT | os.O_WRONLY))",
        "makes the file",
    ),
    "changed file": (
        "import os; open(os.environ['PLACE'] + '/old', 'a').write('x')",
        "writes to the file",
    ),
    "removed file": ("import os; os.remove(os.environ['PLACE'] + '/old')", "removes"),
    "renamed file": (
        "import os; os.rename(os.environ['PLACE'] + '/old', os.environ['PLACE'] + '/new')",
        "renames",
    ),
    "folder": ("import pathlib, os; pathlib.Path(os.environ['PLACE'], 'new').mkdir()", "folder"),
    "file of a socket": (
        "import os, socket\nwith socket.socket(socket.AF_UNIX) as s:\n"
        "    s.bind(os.environ['PLACE'] + '/new')",
        "makes the socket",
    ),
    "link": ("import os; os.symlink('/', os.environ['PLACE'] + '/new')", "makes the link"),
    "temporary folder": (
        "import atexit, shutil, tempfile; atexit.register(shutil.rmtree, tempfile.mkdtemp())",
        "makes the temporary",
    ),
    "temporary file": ("import tempfile; f = tempfile.NamedTemporaryFile()", "makes the temporary"),
    "named pipe": ("import os; os.mkfifo(os.environ['PLACE'] + '/new')", "makes the special file"),
    "file of an ended process": (
        "import os, subprocess; subprocess.run(['touch', os.environ['PLACE'] + '/new'])",
        "starts a process that makes, changes or removes ",
    ),
    "file of an ended shell": (
        "import os; os.system('x=' + os.environ['PLACE'] + '; mkdir -p $x/new/a')",
        "starts a process that makes, changes or removes ",
    ),
    "file in the working directory of an ended process": (
        "import os, subprocess\np = subprocess.Popen(['touch', 'new'], cwd=os.environ['PLACE'])\n"
        "while p.poll() is None: pass",
        "starts a process that makes, changes or removes ",
    ),
    "file changed by an ended process": (
        "import os, subprocess; subprocess.run('echo x >>$PLACE/old', shell=True, check=True)\n"
        "subprocess.run(f'echo x >>{os.environ[\"PLACE\"]}/old', shell=True, check=True)",
        "starts a process that makes, changes or removes ",
    ),
    "file of the process that ended last": (
        "import os, subprocess; new = os.environ['PLACE'] + '/new'\n"
        "late = subprocess.Popen(['sh', '-c', 'read x && touch ' + new], stdin=subprocess.PIPE)\n"
        "subprocess.run(['true']); late.communicate(b'x\\n')",
        "starts a process that makes, changes or removes ",
    ),
    "file removed by an ended process": (
        "import os, subprocess; subprocess.check_output(['rm', os.environ['PLACE'] + '/old'])",
        "starts a process that makes, changes or removes ",
    ),
    "open file": ("f = open('/etc/passwd')", "keeps /etc/passwd open"),
    "pipe": ("import os; ends = os.pipe()", "keeps pipe:"),
    "atexit": ("import atexit; atexit.register(print)", "(atexit)"),
    "atexit as a decorator": ("from atexit import register\n@register\ndef f(): pass", "(atexit)"),
    "finalizer": (
        "import weakref\nclass C: pass\nc = C()\nweakref.finalize(c, print)",
        "(weakref.finalize)",
    ),
    "semaphore": ("import multiprocessing; lock = multiprocessing.Lock()", "makes a semaphore"),
    "shared memory": (
        "from multiprocessing.shared_memory import SharedMemory as S; m = S(create=True, size=9)",
        "shared memory",
    ),
    "System V shared memory": (
        "import ctypes; ctypes.CDLL(None).shmctl(ctypes.CDLL(None).shmget(0, 9, 0o1600), 0, 0)\n"
        "ident = ctypes.CDLL(None).shmget(0, 9, 0o1600)\n"
        "import os; open(os.environ['PLACE'] + '/ipc', 'a').write(f'{ident} ')",
        "System V shared memory",
    ),
    "shared map": ("import mmap; m = mmap.mmap(-1, 4096)", "shared memory"),
    "process": ("import subprocess; p = subprocess.Popen(['sleep', '99'])", "starts a process"),
    "orphan": ("import os; os.system('sleep 99 &')", "starts a process"),
    "lock": (
        "import fcntl, os; f = open(os.environ['PLACE'] + '/old'); fcntl.flock(f, fcntl.LOCK_SH)",
        "locked",
    ),
    "database": ("import sqlite3; c = sqlite3.connect(':memory:')", "database connection"),
    "signal": ("import signal; signal.signal(signal.SIGUSR2, lambda *a: None)", "signal handlers"),
    "timer": ("import signal; signal.alarm(999)", "sets a timer"),
    "working directory": ("import os; os.chdir('/')", "working directory"),
    "seed": ("import random; random.seed(1)", "random numbers of random"),
    "seed of numpy": ("import numpy; numpy.random.seed(1)", "random numbers of numpy.random"),
    "random number": ("import random; r = random.random()", "random numbers of random"),
    "number of a generator": (
        "import random; r = random.Random(); i = r.random()",
        "draws a random",
    ),
    "generator of numpy": ("import numpy; r = numpy.random.default_rng()", "draws a random"),
    "uuid": ("import uuid; i = uuid.uuid4()", "draws a random"),
    "uuid with the time": ("from uuid import uuid1; i = uuid1()", "draws a random"),
    "secret": ("import secrets; i = secrets.token_hex(4)", "draws a random"),
    "random bytes": ("from os import urandom; i = urandom(4)", "draws a random"),
    "time": ("import time; t = {'began': [time.time()]}", "the time of its import"),
    "clock": ("import time\nclass C:\n    t = time.monotonic()", "the time of its import"),
    "date": ("import datetime; t = datetime.datetime.now()", "the time of its import"),
    "name by date": ("import time; t = time.strftime('run-%Y%m%d_%H%M%S')", "the time of its"),
    "process number": ("import os; t = f'run-{os.getpid()}'", "the process number"),
    "process number in an object of another package": (
        "import psutil; t = psutil.Process()", "the process number",
    ),
    "number of the main thread": (
        "import threading; n = threading.get_native_id()", "the process number",
    ),
    "number of the session": ("import os; n = os.getsid(0)", "the process number"),
    "processor time": ("import time; t = time.process_time()", "its processor time"),
    "profile function of threads": (
        "import threading; threading.setprofile(lambda *a: None)", "profile function of threads",
    ),
    "hook of generators": (
        "import sys; sys.set_asyncgen_hooks(firstiter=lambda g: None)", "hook or limit of sys",
    ),
    "root logger": ("import logging; logging.basicConfig()", "the root logger"),
    "logging from a level on": ("import logging; logging.disable(20)", "the root logger"),
    "start method": ("import multiprocessing as m; m.get_context()", "the start method"),
    "exception hook": ("import sys; sys.excepthook = print", "a hook of sys"),
    "hook of threads": (
        "import threading; threading.excepthook = print", "changes threading.excepthook",
    ),
    "arguments": ("import sys; sys.argv = sys.argv[:]; sys.argv.append('x')", "sys.argv"),
    "recursion limit": ("import sys; sys.setrecursionlimit(5000)", "the recursion limit"),
    "collection off": ("import gc; gc.disable()", "garbage collection"),
    "locale": ("import locale; locale.setlocale(locale.LC_ALL, 'C.UTF-8')", "the locale"),
    "time zone": ("import os, time; os.environ['TZ'] = 'EST5'; time.tzset()", "the time zone"),
    "builtins": ("import builtins; builtins.ic = print", "the names in builtins"),
    "value in builtins": ("import builtins; builtins.help = print", "the names in builtins"),
    "limit of resources": (
        "import resource; n = resource.RLIMIT_NOFILE; soft, hard = resource.getrlimit(n)\n"
        "resource.setrlimit(n, (soft - 1, hard))",
        "changes a limit of resources",
    ),
    "priority": ("import os; os.nice(1)", "changes the priority"),
    "processors": (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "assert len(os.sched_getaffinity(0)) == 1",
        "changes the processors in use",
    ),
    "flags of dlopen": ("import sys; sys.setdlopenflags(257)", "changes a hook or limit of sys"),
    "stack of threads": (
        "import threading; threading.stack_size(1 << 20)", "changes the stack size of threads",
    ),
    "traced memory": ("import tracemalloc; tracemalloc.start()", "changes tracemalloc"),
    "faulthandler": ("import faulthandler; faulthandler.enable()", "changes "),
    "replaced function": (
        "import os; fork = os.fork\ndef counted(): return fork()\nos.fork = counted",
        "replaces os.fork",
    ),
    "replaced function of a module loaded later": (
        "import shelve, sched, http.client\nhttp.client.parse_headers = lambda *a: None",
        "replaces http.client.parse_headers",
    ),
    "wrapped function": (
        "import functools, json\njson.dumps = functools.wraps(json.dumps)(lambda *a, **o: '')",
        "replaces json.dumps",
    ),
    "function replaced by another of Python's": (
        "import time; time.sleep = time.monotonic", "replaces time.sleep",
    ),
    "replaced method": (
        "import threading\nstart = threading.Thread.start\n"
        "threading.Thread.start = lambda self: start(self)",
        "replaces threading.Thread.start",
    ),
    "replaced class": (
        "import subprocess\nclass Popen(subprocess.Popen): pass\nsubprocess.Popen = Popen",
        "replaces subprocess.Popen",
    ),
    "stream": ("import sys; sys.stdin = None", "a standard stream"),
    "buffer of a stream": (
        "import sys; sys.stdout.reconfigure(line_buffering=True)", "a standard stream",
    ),
    "certificates": (
        "import ssl; ssl._create_default_https_context = ssl._create_unverified_context",
        "the verification of certificates",
    ),
    "timeout": ("import socket; socket.setdefaulttimeout(9)", "the default timeout of sockets"),
    "captured warnings": ("import logging; logging.captureWarnings(True)", "display of warnings"),
    "decimals": ("import decimal; decimal.getcontext().prec = 5", "the decimal context"),
    "default of decimals": (
        "import decimal; decimal.DefaultContext.prec = 5", "the default decimal context",
    ),
    "errors of numpy": ("import numpy; numpy.seterr(all='raise')", "numpy's treatment of errors"),
    "printing of numpy": ("import numpy; numpy.set_printoptions(precision=2)", "print options"),
    "dtype of torch": (
        "import torch; torch.set_default_dtype(torch.float64)", "torch's default dtype",
    ),
    "gradients": ("import torch; torch.set_grad_enabled(False)", "a mode or flag of torch"),
    "contradicting flag of torch": (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "torch.backends.cudnn.benchmark = True",
        "a mode or flag of",
    ),
    "threads of torch": (
        "import torch; torch.set_num_threads(1)",
        "sets a number of threads or a mode in C (torch.set_num_threads)",
    ),
    "threads of other libraries": (
        "import numpy, threadpoolctl; threadpoolctl.threadpool_limits(1)",
        "sets a number of threads or a mode in C (threadpoolctl.set_num_threads)",
    ),
    "threads through ctypes": (
        "import ctypes; getattr(ctypes.CDLL(None), 'omp_set_num_threads', print)",
        "sets a number of threads or a mode in C (omp_set_num_threads)",
    ),
    "replaced function of torch": (
        "import torch; load = torch.load\ntorch.load = lambda *a, **o: load(*a, **o)",
        "replaces torch.load",
    ),
    "replaced method of paths": (
        "import pathlib\npathlib.Path.exists = lambda self: True", "replaces pathlib.Path.exists",
    ),
    "value of another package": (
        "from PIL import Image; Image.MAX_IMAGE_PIXELS = None", "sets PIL.Image.MAX_IMAGE_PIXELS",
    ),
    "parameters of matplotlib": (
        "import matplotlib; matplotlib.rcParams['figure.dpi'] = 7", "matplotlib's parameters",
    ),
    "logger of another package": (
        "import logging; logging.getLogger('urllib3').setLevel(50)", "the loggers of others",
    ),
    "configuration of loggers": (
        "import logging.config; logging.config.dictConfig({'version': 1})", "configures logging",
    ),
    "filter of all warnings": (
        "import warnings; warnings.simplefilter('ignore')", "the filters of all warnings",
    ),
    "folder before others": ("import sys; sys.path.insert(0, '/x')", "changes sys.path"),
    "traps of decimals": (
        "import decimal; decimal.getcontext().traps[decimal.Inexact] = True", "decimal context",
    ),
    "name of the program": ("import __main__; __main__.x = 1", "the names of the program"),
    "name of the process": (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'other', 0, 0, 0)", "changes the name of",
    ),
    "audit hook": ("import sys; sys.addaudithook(lambda *a: None)", "adds an audit hook"),
    "copy of the environment": (
        "import os; e = os.environ.copy()", "keeps a copy of the environment",
    ),
    "copy of the environment in bytes": (
        "import os; e = dict(os.environb)", "keeps a copy of the environment",
    ),
    "number of the process in C": (
        "import ctypes; n = ctypes.CDLL(None).getpid()", "the process number",
    ),
    "start of the process": (
        "import psutil; n = psutil.Process().create_time()", "the start of the process",
    ),
    "time in a form of its own": (
        "import time; t = time.strftime('%b%d_%H-%M-%S')", "the time of its import",
    ),
    "flag of torch": ("import torch; torch.backends.cudnn.benchmark = True", "a mode or flag of"),
}  # fmt: skip


@pytest.mark.parametrize("name", EFFECTS)
def test_module_with_lasting_effect_is_left_to_worker(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    source, words = EFFECTS[name]
    (tmp_path / "old").touch()
    (installed / "odd_pkg.py").write_text(f"{source}\n")
    # The worker does not import it, so that the effect is the standby's alone.
    path = script(tmp_path / "code", f"{LOADED}import plain_pkg\nprint(there)\n")
    assert said_warm(tmp_path / "logs", path, "odd_pkg") == "['plain_pkg']\n"
    assert "not preloaded: odd_pkg: it " in (told := capfd.readouterr().err)
    assert words in told
    for ident in (tmp_path / "ipc").read_text().split() if (tmp_path / "ipc").exists() else ():
        os.system(f"ipcrm -m {ident}")


HARMLESS = {
    "what the standard library does": "import asyncio, concurrent.futures, logging, random, uuid\n"
    "import multiprocessing.pool, sqlite3, tempfile, secrets\n"
    "uuid.UUID(int=3); uuid.uuid5(uuid.NAMESPACE_DNS, 'x'); logging.getLogger('x')",
    "a file that is gone": "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n"
    "    open(d + '/x', 'w').close()\ntempfile.gettempdir()",
    "a process that has ended": "import subprocess; subprocess.run(['true'])",
    "a file that was read": "t = open('/etc/passwd').read()",
    "a cycle that is garbage": "class C:\n    pass\nc = C(); c.c = c; c.f = open('/etc/passwd')\n"
    "del c",
    "a seeded generator of its own": "import random; r = random.Random(3); x = r.random()",
    "a date that is written down": "t = '2024-01-01'; n = 1700000000; f = 1.5e9",
    "an interval": "import time; t = time.time(); t = time.time() - t",
    "a setting that is put back": "import sys\nlimit = sys.getrecursionlimit()\n"
    "sys.setrecursionlimit(5000)\nimport decimal\nsys.setrecursionlimit(limit)",
    "a logger of its own": "import logging\n"
    "logging.getLogger('x').addHandler(logging.StreamHandler())",
    "a process that ends without files": "import subprocess, tempfile\n"
    "with tempfile.TemporaryFile() as f:\n    subprocess.run(['ls', '/etc/passwd'], stdout=f)\n"
    "out = subprocess.check_output('f=$(mktemp) && rm $f; uname -s', shell=True)",
    "a handler of the window's size": "import readline",
    "a function that is put back": "import json\ndumps, json.dumps = json.dumps, print\n"
    "json.dumps = dumps",
    "the environment without ranks": "import os\n"
    "e = {k: v for k, v in os.environ.items() if k.startswith('TQDM_')}",
    "a package that replaces private functions of Python": "import typing_extensions",
    "a folder after others": "import sys; sys.path.append('/x')",
    "a function added to a module": "import json\njson.of_odd_pkg = lambda: None",
    "classes of distutils, which setuptools replaces": "import sys\n"
    "if sys.version_info < (3, 12):\n    import distutils.dist as d\n"
    "    d.Distribution = type('D', (d.Distribution,), {})",
    "an environment that is put back": "import os, subprocess\nfrom unittest import mock\n"
    "with mock.patch.dict(os.environ, X='1'):\n    pass\n"
    "out = subprocess.run(['env'], capture_output=True, text=True).stdout\n"
    "assert 'LOCAL_RANK' not in out\ndel out",
    "the environment of a process, without ranks": "import os, subprocess\n"
    "out = subprocess.run(['env'], env={**os.environ}, capture_output=True, text=True).stdout\n"
    "assert 'LOCAL_RANK' not in out\ndel out",
    "the environment in order": "import os\nfor name in sorted(os.environ):\n"
    "    value = os.environ[name]\ndel name, value",
    "an object of another module": "import types\nn = types.SimpleNamespace(rapid=3, x=[1])",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_module_without_lasting_effect_is_preloaded(
    tmp_path: Path, installed: Path, name: str
) -> None:
    (installed / "odd_pkg.py").write_text(f"{HARMLESS[name]}\n")
    path = script(tmp_path / "code", f"{LOADED}import plain_pkg, odd_pkg\nprint(there)\n")
    assert said_warm(tmp_path / "logs", path) == "['odd_pkg', 'plain_pkg']\n"


def is_preloaded(tmp_path: Path, installed: Path, source: str) -> bool:
    """Return True if a trusted package with that source is preloaded; no worker imports it."""
    (installed / "fsspec.py").write_text(f"{source}\n")
    program = "import sys\nprint('fsspec' in sys.modules)\n"
    printed = said_warm(tmp_path / "logs", script(tmp_path / "code", program), "fsspec")
    return {"True\n": True, "False\n": False}[printed]


def test_cache_folder_does_not_prevent_preload_of_trusted_package(
    tmp_path: Path, installed: Path
) -> None:
    """Torch's compiler cache is such a folder, with the same name in every process."""
    cache = tmp_path / "cache"
    source = f"import os; os.makedirs({str(cache)!r}, exist_ok=True)"
    assert is_preloaded(tmp_path, installed, source)
    assert cache.is_dir()


CHANGES = {
    "removed": "os.remove(new)",
    "renamed and removed": "os.rename(new, new + '2'); os.remove(new + '2')",
    "changed": "os.chmod(new, 0o600); open(new, 'a').close()",
    "checked by tempfile": "import tempfile; tempfile.gettempdir()",
}


@pytest.mark.parametrize("name", CHANGES)
def test_trusted_package_may_change_files_that_it_created(
    tmp_path: Path, installed: Path, name: str
) -> None:
    """The first call of `tempfile.gettempdir`, in torch's import, creates and removes a file."""
    new = "import os; new = os.environ['PLACE'] + '/new'; open(new, 'w').close()"
    assert is_preloaded(tmp_path, installed, f"{new}\n{CHANGES[name]}")


@pytest.mark.parametrize("change", ["os.remove(old)", "os.rename(old, old + '2')"])
def test_trusted_package_that_changes_older_file_is_left_to_worker(
    tmp_path: Path, installed: Path, change: str
) -> None:
    (tmp_path / "old").touch()
    old = "import os; old = os.environ['PLACE'] + '/old'"
    assert not is_preloaded(tmp_path, installed, f"{old}\n{change}")


def test_importers_of_refused_module_are_found_at_once(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (installed / "uuid_pkg.py").write_text("import uuid; value = uuid.uuid4()\n")
    names = [f"user{number}_pkg" for number in range(25)]
    for name in names:
        (installed / f"{name}.py").write_text("from uuid_pkg import value\n")
    path = script(
        tmp_path / "code", f"{LOADED}import plain_pkg, {', '.join(names)}\nprint(there)\n"
    )
    assert said_warm(tmp_path / "logs", path) == "['plain_pkg']\n"
    assert "user24_pkg: it imports uuid_pkg, which is not preloaded" in capfd.readouterr().err


def test_selected_module_with_lasting_effect_is_left_out(tmp_path: Path, installed: Path) -> None:
    (installed / "odd_pkg.py").write_text("import uuid; value = uuid.uuid4()\n")
    path = script(tmp_path / "code", f"{LOADED}print(there)\n")

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path, modules=("odd_pkg", "plain_pkg"))).ready
        assert (await runtime.outcome(sys.executable, path))[0].warm

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 1) == "['plain_pkg']\n"


TRACKER = """
import atexit, os, shutil, tempfile
folder = tempfile.mkdtemp(prefix="tracked-")
atexit.register(shutil.rmtree, folder)
"""


def test_temporary_folder_of_package_belongs_to_each_worker(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trackers that log have such a folder: the first worker that ends removes it at its exit."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (installed / "odd_pkg.py").write_text(TRACKER)
    path = script(
        tmp_path / "code",
        "import odd_pkg, os, pathlib, time\nprint(odd_pkg.folder)\n"
        f"done = pathlib.Path({str(tmp_path)!r}, 'done-' + os.environ['ELASTICJOB_ROUND'])\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not done.exists():\n        time.sleep(0.01)\n"
        "pathlib.Path(odd_pkg.folder, 'image').write_text('x')\n",
    )

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path)).ready, runtime.prepared
        for number in (1, 2):
            env = {"ELASTICJOB_ROUND": str(number)}
            assert (await runtime.start(sys.executable, path, count=2, env=env)).warm
            (tmp_path / f"done-{number}").touch()
            ended = await runtime.ended(2)
            assert [exited.exit_code for exited in ended.values()] == [0, 0], ended

    warm(tmp_path / "logs", scenario)
    folders = [said(tmp_path / "logs", number, rank) for number in (1, 2) for rank in (0, 1)]
    assert len(set(folders)) == 4
    assert list((tmp_path / "tmp").iterdir()) == []


UNIQUE_NAMES = {
    "identifier": "uuid.uuid4()",
    "secret": "'x-' + secrets.token_hex(4)",
    "process number": "f'log-{os.getpid()}'",
}


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", UNIQUE_NAMES)
def test_standby_removes_what_it_made_under_a_name_of_its_own(
    tmp_path: Path, installed: Path, name: str, kind: str
) -> None:
    """Files of fixed names stay: workers may use them by then. So do folders with the process
    number, which a fixed name may have by chance."""
    makes = {"file": "path.touch()", "folder": "path.mkdir(); (path / 'x').touch()"}[kind]
    (tmp_path / "made").mkdir()
    (installed / "odd_pkg.py").write_text(
        f"import os, pathlib, secrets, uuid\nfolder = pathlib.Path(os.environ['PLACE'], 'made')\n"
        f"path = folder / str({UNIQUE_NAMES[name]})\n{makes}\n(folder / 'settings').touch()\n"
    )
    path = script(tmp_path / "code", "import odd_pkg\nprint(odd_pkg.path.name)\n")
    made_by_worker = said_warm(tmp_path / "logs", path).strip()
    left = {each.name for each in (tmp_path / "made").iterdir()} - {made_by_worker, "settings"}
    assert len(left) == ((name, kind) == ("process number", "folder"))


HOOK = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "plain_pkg":
            import random; random.random()
sys.meta_path.insert(0, Finder())
"""


def test_effect_of_an_import_hook_is_not_attributed_to_the_module_imported_through_it(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (installed / "hook_pkg.py").write_text(f"{HOOK}import atexit; atexit.register(print)\n")
    path = script(tmp_path / "code", f"{LOADED}import hook_pkg, plain_pkg\nprint(there)\n")
    assert said_warm(tmp_path / "logs", path) == "['plain_pkg']\n\n"
    assert "not preloaded: plain_pkg" not in capfd.readouterr().err


DRAWN = """
import odd_pkg
print(odd_pkg.fixed, odd_pkg.drawn, odd_pkg.generator.random(), sep="\\n")
"""


def test_seeds_are_kept_and_identifiers_differ(tmp_path: Path, installed: Path) -> None:
    (installed / "odd_pkg.py").write_text(
        "import random, numpy, uuid\nrandom.seed(5); numpy.random.seed(6)\n"
        "fixed = (random.random(), numpy.random.rand())\n"
        "drawn = uuid.uuid4().hex\nfrom free_pkg import generator\n"
    )
    (installed / "free_pkg.py").write_text("import random; generator = random.Random()\n")
    path = script(
        tmp_path / "code",
        f"import random, numpy, free_pkg\n{DRAWN}print(random.random(), numpy.random.rand())\n",
    )

    async def scenario(runtime: Warm) -> None:
        assert not (await runtime.outcome(sys.executable, path))[0].warm
        assert (await runtime.prepare(sys.executable, path)).ready
        for _ in range(2):
            assert (await runtime.start(sys.executable, path, count=2)).warm
            await runtime.ended(2)

    warm(tmp_path / "logs", scenario)
    places = [(1, 0), *((number, rank) for number in (2, 3) for rank in (0, 1))]
    lines = [said(tmp_path / "logs", *place).splitlines() for place in places]
    assert len({(line[0], line[3]) for line in lines}) == 1  # the package's seeds hold
    assert len({line[1] for line in lines}) == len({line[2] for line in lines}) == 5


def test_identifiers_of_known_packages_are_regenerated(tmp_path: Path, installed: Path) -> None:
    source = "from uuid import uuid4\nSESSION_ID = uuid4().hex\n"
    for name in ("transformers", "diffusers"):
        script(installed, "", f"{name}/__init__.py")
        script(installed, "", f"{name}/utils/__init__.py")
    script(installed, source, "transformers/utils/hub.py")
    script(installed, source, "diffusers/utils/hub_utils.py")
    program = (
        "import sys; there = 'transformers.utils.hub' in sys.modules\n"
        "import transformers.utils.hub as a, diffusers.utils.hub_utils as b\n"
        "print(there, a.SESSION_ID, b.SESSION_ID)\n"
    )
    path = script(tmp_path / "code", program)

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path)).ready
        for _ in range(2):
            assert (await runtime.start(sys.executable, path, count=2)).warm
            await runtime.ended(2)

    warm(tmp_path / "logs", scenario)
    words = [said(tmp_path / "logs", n, rank).split() for n in (1, 2) for rank in (0, 1)]
    assert {word[0] for word in words} == {"True"}
    assert len({identifier for word in words for identifier in word[1:]}) == 8


def test_native_generator_that_a_package_reseeds_in_forks_differs_in_each_worker(
    tmp_path: Path, installed: Path
) -> None:
    """As uuid_utils does; the generator is seeded by code that Python does not know."""
    (installed / "odd_pkg.py").write_text(
        "import _random, os; generator = _random.Random()\n"
        "os.register_at_fork(after_in_child=generator.seed)\n"
    )
    path = script(
        tmp_path / "code",
        f"{LOADED}import odd_pkg\nprint(*there, odd_pkg.generator.random())\n",
    )

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path)).ready
        assert (await runtime.start(sys.executable, path, count=2)).warm
        await runtime.ended(2)

    warm(tmp_path / "logs", scenario)
    words = [said(tmp_path / "logs", 1, rank).split() for rank in (0, 1)]
    assert [word[0] for word in words] == ["odd_pkg", "odd_pkg"]
    assert words[0][1] != words[1][1]


def test_abandoned_zygote_removes_its_helpers_and_files(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby ended in the middle of an import is included."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("ELASTICJOB_STANDBY_SECONDS", "8")
    (tmp_path / "tmp").mkdir()
    (installed / "slow_pkg.py").write_text(
        "import os, pathlib, subprocess, sys, tempfile, time\nfrom multiprocessing import "
        "shared_memory\nmemory = shared_memory.SharedMemory(create=True, size=9)\n"
        "folder = tempfile.mkdtemp()\nopen(folder + '/x', 'w').close()\n"
        "helper = subprocess.Popen(['sleep', '99'])\n"
        "alone = subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'told').write_text("
        "f'{helper.pid} {alone.pid} {memory.name}')\ntime.sleep(99)\n"
    )
    path = script(tmp_path / "code", "")

    async def scenario(runtime: Warm) -> None:
        prepared = await runtime.prepare(sys.executable, path, modules=("slow_pkg",))
        assert prepared.reason.startswith("preloading used no processor for 8 s"), prepared
        helper, alone, memory = (tmp_path / "told").read_text().split()
        await soon(lambda: not Path("/proc", helper).exists() and not Path("/proc", alone).exists())
        await soon(lambda: not Path("/dev/shm", memory.lstrip("/")).exists())
        await soon(lambda: not list((tmp_path / "tmp").iterdir()))

    warm(tmp_path / "logs", scenario)


def test_worker_start_with_hung_zygote_takes_no_longer_than_cold_start(
    tmp_path: Path, installed: Path
) -> None:
    """A standby is replaced by one that hangs while it loads: the first loaded instantly."""
    (installed / "slow_pkg.py").write_text(
        f"import os, pathlib, time\nif pathlib.Path({str(tmp_path / 'hangs')!r}).exists():\n"
        "    if 'ELASTICJOB_ROUND' not in dict(os.environ):\n        time.sleep(99)\n"
    )
    path = script(tmp_path / "code", "import slow_pkg\n")
    env = {"ELASTICJOB_ROUND": "1", "MODE": "2"}

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path)).ready
        (tmp_path / "hangs").touch()
        await runtime.ask(sys.executable, path, env={**SHARED, "MODE": "2"})
        began = asyncio.get_running_loop().time()
        started, exited = await runtime.outcome(sys.executable, path, env=env)
        assert asyncio.get_running_loop().time() - began < 40, "the standby hangs for 99 s"
        assert (started.warm, exited.exit_code) == (False, 0)
        assert started.cold_reason == "the standby is still preloading"

    warm(tmp_path / "logs", scenario)


def test_modules_that_restore_a_setting_are_preloaded_beside_one_that_changes_it(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    restored = HARMLESS["a setting that is put back"]
    (installed / "odd_pkg.py").write_text("import restoring_pkg, changing_pkg\n")
    (installed / "restoring_pkg.py").write_text(restored.replace("decimal", "plain_pkg"))
    (installed / "changing_pkg.py").write_text("import sys; sys.setrecursionlimit(6000)\n")
    path = script(tmp_path / "code", f"{LOADED}print(there)\n")
    said_warm(tmp_path / "logs", path, "odd_pkg")
    told = capfd.readouterr().err
    assert "not preloaded: changing_pkg: it changes the recursion limit" in told
    assert "not preloaded: restoring_pkg" not in told


def test_signal_handler_of_the_standard_library_is_not_the_next_modules(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (installed / "odd_pkg.py").write_text("import prompt_pkg, plain_pkg\n")
    (installed / "prompt_pkg.py").write_text("import code, readline\n")
    path = script(tmp_path / "code", f"{LOADED}import plain_pkg\nprint(there)\n")
    said_warm(tmp_path / "logs", path, "odd_pkg")
    assert "not preloaded" not in capfd.readouterr().err
