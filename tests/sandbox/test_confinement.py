"""Real workers, confined: what they try is refused and said, and what honest kernels do still works."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from opforge.judge import worker_folders
from opforge.runs.execute.judge_pool import start_server
from opforge.sandbox.guard import landlock, readable_paths, seccomp
from opforge.sandbox.guard.confinement import abilities
from opforge.sandbox.guard.secret_names import looks_secret
from opforge.sandbox.host.client import worker_environment
from tests.conftest import ROOT, UNARY, verdicts

pytestmark = pytest.mark.skipif(
    not (abilities().landlock and abilities().seccomp), reason="this system has no Landlock or no system-call filters"
)

TRIES = """
    import ctypes, os, shutil, signal, socket, subprocess, sys, torch
    def attempt(action):
        try:
            got = action()
        except BaseException:
            return
        raise RuntimeError(f"got through: {{got!r}}")
    def {op}_kernel_impl(self):
        {body}
        return torch.{op}(self)
"""
CHEATS = {
    "relu": ("attempt(lambda: os.environ['ANTHROPIC_API_KEY'])", "read the environment variable ANTHROPIC_API_KEY"),
    "abs": ("attempt(socket.socket)", "open a socket (AF_INET)"),
    "neg": ("attempt(lambda: open('{home}/pwned', 'w'))", "write ~/pwned in the home folder"),
    "exp": ("attempt(lambda: open('{run}/results.jsonl', 'a'))", "write the run's own results.jsonl"),
    "sin": ("attempt(lambda: open('/etc/shadow'))", "read /etc/shadow"),
    "cos": ("attempt(lambda: open(f'/proc/{{os.getppid()}}/environ'))", "/environ"),
    "tan": ("attempt(lambda: os.kill(os.getppid(), signal.SIGKILL))", "send SIGKILL to process"),
    "sqrt": ("attempt(lambda: os.listdir('{home}'))", "read ~ in the home folder"),
    "floor": ("attempt(lambda: os.unlink('{run}/manifest.json'))", "write the run's own manifest.json"),
    "ceil": ("os.path.exists('x') or open(os.path.expanduser('~/pwned'), 'w')", "write ~/pwned in the home folder"),
    "sigmoid": ("attempt(lambda: open(os.path.expanduser('~/.ssh/id_rsa')))", "read ~/.ssh/id_rsa"),
    "log": ("attempt(lambda: exec('import socket; socket.socket()'))", "open a socket (AF_INET)"),
    "log2": ("attempt(lambda: socket.getaddrinfo('example.org', 80))", "look up the host example.org"),
    "trunc": ("attempt(lambda: open('{run}/results.jsonl').read())", "read the run's own results.jsonl"),
    "round": ("attempt(lambda: open('/tmp/opforge-was-here', 'w'))", "write /tmp/opforge-was-here"),
}
NATIVE = {
    "relu": "assert ctypes.CDLL(None).socket(2, 1, 0) == -1",
    "abs": "assert ctypes.CDLL(None).kill(os.getppid(), 9) == -1",
    "neg": "assert subprocess.run(['sh', '-c', 'echo x >> {run}/results.jsonl'], stderr=-3).returncode",
    "exp": "assert subprocess.run(['cat', '/etc/shadow', '{secret}'], capture_output=True).stdout == b''",
    "sin": "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == -1",
    "cos": "assert ctypes.CDLL(None).unshare(0x10000000) == -1",
    "tan": """
        if "su" not in globals():  # once: it lets those wait whom it refuses
            globals()["su"] = subprocess.run(['su', '-c', 'id'], capture_output=True, stdin=-3)
        assert su.returncode
    """,
    "sqrt": """
        import resource
        for _ in range(2):
            try:
                resource.setrlimit(resource.RLIMIT_RTTIME, (5, 5))
            except (ValueError, OSError):
                continue
            raise RuntimeError("took off its mark")
    """,
    "floor": """
        ours, theirs = socket.socketpair()
        try:
            socket.socketpair(type=socket.SOCK_DGRAM)
            raise RuntimeError("a datagram socket")
        except PermissionError:
            pass
        try:
            socket.socket(socket.AF_UNIX).connect('{socket}')
            raise RuntimeError("connected")
        except PermissionError:
            pass
    """,
    "ceil": """
        ctypes.CDLL(None).chmod(b'{secret}', 0o777)
        ctypes.CDLL(None).chown(b'{secret}', os.getuid(), os.getgid())
        ctypes.CDLL(None).truncate(b'{secret}', 0)
    """,
    "sigmoid": "assert not open('/proc/self/environ', 'rb').read().count(b'SECRET_VALUE')",
    "log": "assert ctypes.CDLL(None).sched_setaffinity(os.getppid(), 128, (ctypes.c_char * 128)(1)) == -1",
}
HONEST = {
    "relu": """
        import tempfile
        with tempfile.NamedTemporaryFile("w+") as handle:
            handle.write("x")
        os.makedirs("some/folder", exist_ok=True)
        open("some/folder/file", "w").write("x")
        os.replace("some/folder/file", "some/file")
        shutil.copy2("some/file", "some/copy")
        shutil.copy2(__file__, "some/source")
        shutil.rmtree("some")
    """,
    "abs": r"""
        open("hello.cpp", "w").write('#include <cstdio>\nint main() {{ std::puts("hello"); }}')
        subprocess.run(["g++", "-O0", "hello.cpp", "-o", "hello"], check=True)
        assert subprocess.run(["./hello"], capture_output=True, check=True).stdout == b"hello\n"
    """,
    "neg": "import numpy; assert numpy.arange(3).sum() == 3",
    "exp": """
        import threading
        seen = []
        threads = [threading.Thread(target=seen.append, args=(i,)) for i in range(16)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert len(seen) == 16
    """,
    "sin": """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=theirs.send, args=([1, 2],))
        child.start()
        assert ours.recv() == [1, 2]
        child.join()
        assert child.exitcode == 0
    """,
    "cos": """
        import helper
        assert helper.ANSWER == 42
        assert os.environ.get("TOKENIZERS_PARALLELISM") is None
        assert os.environ.get("HOME") and os.environ.get("MY_OWN_SETTING") is None
        assert open(os.path.join(os.path.dirname(__file__), "table.txt")).read() == "7"
    """,
    "tan": """
        import ctypes.util, getpass, inspect, linecache, platform, tempfile, uuid
        getpass.getuser(), platform.platform(), uuid.uuid1(), ctypes.util.find_library("c"), linecache.getline(__file__, 1)
        assert os.path.expanduser("~") != "{home}"
        os.makedirs(os.path.expanduser("~/.cache/mine"), exist_ok=True)
        open("/dev/null", "w").write("x")
        sleeper = subprocess.Popen(["sleep", "60"])
        sleeper.kill()
        assert sleeper.wait() == -signal.SIGKILL
    """,
    "sqrt": "assert os.getpid() in map(int, filter(str.isdigit, os.listdir('/proc'))) and os.cpu_count()",
}
TRITON = """
    import torch, triton, triton.language as tl
    @triton.jit
    def copy(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.maximum(tl.load(x + at, mask=at < n), 0.0), mask=at < n)
    def relu_kernel_impl(self):
        x = self.contiguous()
        y = torch.empty_like(x)
        copy[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
        return y
"""


def kernel(op: str, body: str, **places: str) -> str:
    lines = body.format(**places).strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return TRIES.format(op=op, body="\n        ".join(line[indent:] for line in lines))


def judge(judge_tiny, kernel_directory, bodies, tmp_path, **fields):
    home = os.path.realpath(os.path.expanduser("~"))
    places = {"home": home, "run": str(tmp_path / "run"), "secret": str(tmp_path / "secret")}
    places["socket"] = str(tmp_path / "socket")
    root = kernel_directory({op: kernel(op, body, **places) for op, body in bodies.items()})
    cases = {f"{op}.default": UNARY[:1] for op in bodies}
    return judge_tiny(root, cases, allow_fallback=True, **{"timeout_s": 20.0, **fields})


@pytest.mark.own_server
def test_what_a_kernel_tries_is_refused_and_said(judge_tiny, kernel_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    ended = judge(judge_tiny, kernel_directory, {op: body for op, (body, _) in CHEATS.items()}, tmp_path)
    found = verdicts(ended)
    for op, (_body, words) in CHEATS.items():
        ((verdict, reason),) = found[f"{op}.default"]
        assert (verdict, words in reason, "all of it was blocked" in reason) == ("cheated", True, True), (op, reason)
    assert not os.path.exists(os.path.expanduser("~/pwned"))
    assert not os.path.exists("/tmp/opforge-was-here")
    assert len(list(ended.store.rows())) == len(CHEATS)
    assert ended.manifest.confinement["missing"] == []


@pytest.mark.own_server
@pytest.mark.slow
def test_all_of_it_in_one_kernel(judge_tiny, kernel_directory, tmp_path, monkeypatch):
    """The kernel that reads a key, opens a socket, and writes to the home folder and to the results."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    body = "\n".join(CHEATS[op][0] for op in ("relu", "abs", "neg", "exp"))
    ended = judge(judge_tiny, kernel_directory, {"relu": body}, tmp_path)
    ((verdict, reason),) = verdicts(ended)["relu.default"]
    assert verdict == "cheated"
    assert reason == (
        "tried to read the environment variable ANTHROPIC_API_KEY, to open a socket (AF_INET), "
        "to write ~/pwned in the home folder, to write the run's own results.jsonl; all of it was blocked"
    )


def test_tries_while_loading_are_said_of_every_case(judge_tiny, kernel_directory):
    source = """
        import os, torch
        key = os.getenv("OPENAI_API_KEY")
        def relu_kernel_impl(self):
            return torch.relu(self)
    """
    ended = judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY})
    ((verdict, reason),) = verdicts(ended)["relu.default"]
    assert verdict == "cheated"
    assert reason.startswith("while loading: tried to read the environment variable OPENAI_API_KEY")


@pytest.mark.own_server
def test_going_round_python_is_refused_too(judge_tiny, kernel_directory, tmp_path, monkeypatch):
    import socket

    monkeypatch.setenv("MY_PASSWORD", "SECRET_VALUE")
    monkeypatch.setenv("OPFORGE_API_KEY", "SECRET_VALUE")
    secret = tmp_path / "secret"
    secret.write_text("SECRET_VALUE")
    secret.chmod(0o640)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    before = secret.stat()
    ended = judge(judge_tiny, kernel_directory, NATIVE, tmp_path)
    listener.close()
    found = verdicts(ended)
    assert {op: found[f"{op}.default"] for op in NATIVE} == {op: {("passed", "")} for op in NATIVE}
    after = secret.stat()
    assert (after.st_mode, after.st_uid, after.st_size) == (before.st_mode, before.st_uid, before.st_size)
    assert len(list(ended.store.rows())) == len(NATIVE)


@pytest.fixture
def open_folder():
    """A folder that a plain user reaches, which pytest's may not be."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.own_server
def test_honest_kernels_work_confined(judge_tiny, kernel_directory, tmp_path, open_folder, monkeypatch):
    """Temporary files lie below the home folder here, as on many clusters: a worker may still read its own."""
    monkeypatch.setenv("HOME", str(open_folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", tempfile.mkdtemp(dir=open_folder))
    Path(os.environ["TMPDIR"]).chmod(0o711)
    root = kernel_directory({"cos": ""})
    (root / "cos" / "helper.py").write_text("ANSWER = 42")
    (root / "cos" / "table.txt").write_text("7")
    found = verdicts(judge(judge_tiny, kernel_directory, HONEST, tmp_path))
    assert {op: found[f"{op}.default"] for op in HONEST} == {op: {("passed", "")} for op in HONEST}


def test_triton_works_confined(judge_tiny, kernel_directory):
    pytest.importorskip("triton")
    ended = judge_tiny(kernel_directory({"relu": TRITON}), {"relu.default": UNARY}, timeout_s=60.0)
    assert verdicts(ended)["relu.default"] == {("passed", "")}


TOO_MANY = r"processes; 128 are allowed" + ("|Resource temporarily unavailable|no answer within" if os.getuid() else "")
"""How a fork bomb ends. A plain user's workers share one limit of the system: there it may also end at that, or for want of time beside another."""
BOMBS = {
    "relu": ("while True: os.fork()", TOO_MANY),
    "abs": (
        """
        import time
        while True:
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(0)
            os.wait()
    """,
        TOO_MANY,
    ),
    "neg": ("open('big', 'wb').truncate(2 << 30)", "File too large"),
}


@pytest.mark.slow
@pytest.mark.own_server
def test_bombs_are_ended_and_harm_nobody(judge_tiny, kernel_directory, tmp_path, still_running):
    bodies = {op: body for op, (body, _) in BOMBS.items()} | {"ceil": "pass"}
    # on a busy machine a process forks some five times a second
    found = verdicts(judge(judge_tiny, kernel_directory, bodies, tmp_path, timeout_s=120.0))
    for op, (_body, reasons) in BOMBS.items():
        assert found[f"{op}.default"], op
        assert all(v != "passed" and re.search(reasons, reason) for v, reason in found[f"{op}.default"]), (op, found)
    assert found["ceil.default"] == {("passed", "")}
    assert still_running() == []


def test_a_filled_disk_is_blamed_on_the_worker_that_filled_it(tmp_path, monkeypatch):
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    monkeypatch.setattr(worker_folders, "MAX_BYTES", 8 << 20)
    guard = worker_folders.QuotaGuard(os.getpid(), str(folder))
    other.write_bytes(bytes(16 << 20))
    assert guard._stored_too_much() is None
    (folder / "file").write_bytes(bytes(16 << 20))
    os.sync()
    assert "GiB in its folder" in guard._stored_too_much()


def test_a_worker_finds_again_what_a_dead_one_made_and_the_folder_goes(judge_tiny, kernel_directory, tmp_path):
    source = """
        import os, torch
        def relu_kernel_impl(self):
            with open("count", "a") as handle:
                handle.write("x")
            if os.path.getsize("count") == 1:
                os.abort()
            raise NotImplementedError(f"{os.path.getsize('count')} in {os.getcwd()}")
    """
    ended = judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY[:2]}, workers=1, allow_fallback=True)
    reasons = " ".join(row.reason for row in ended.store.rows() if row.verdict == "unsupported")
    count, folder = re.search(r"(\d+) in (\S+)", reasons).groups()
    assert int(count) >= 2
    assert not os.path.exists(folder)


@pytest.mark.own_server
def test_nothing_of_a_run_stays_in_the_temporary_folder(judge_tiny, kernel_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    source = """
        import os, torch
        def relu_kernel_impl(self):
            os.makedirs("a" * 200 + "/" + "b" * 200, mode=0o300)
            for _ in range(40):
                os.mkdir("d" * 200)
                os.chdir("d" * 200)
            os._exit(1)
    """
    judge_tiny(kernel_directory({"relu": source}), {"relu.default": UNARY[:1]})
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("opforge-")] == []


def test_a_server_that_nobody_waited_for_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start_server("cpu")
    server.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.own_server
def test_unconfined_on_request(judge_tiny, kernel_directory, tmp_path):
    """With --no-confine a kernel has what its user has, and is not watched."""
    body = f"open('{tmp_path}/mine', 'w').write('x')"
    ended = judge(judge_tiny, kernel_directory, {"relu": body}, tmp_path, confine=False)
    assert verdicts(ended)["relu.default"] == {("passed", "")}
    assert (tmp_path / "mine").exists()
    assert ended.manifest.confinement["held"] == []


@pytest.mark.slow
def test_as_a_plain_user(open_folder):
    """Root's tests show nothing about people who are not: here the same is run as one of them."""
    if os.getuid() != 0:
        pytest.skip("the tests above already run as a plain user")
    python = _python_of_everybody()
    if python is None or not _reachable(ROOT):
        pytest.skip("a plain user reaches no Python of this version, or not this checkout")
    folder = open_folder / "kernels" / "relu"
    folder.mkdir(parents=True)
    body = "\n".join(CHEATS[op][0] for op in ("relu", "abs", "neg", "exp", "cos", "tan"))
    source = textwrap.dedent(kernel("relu", body, home=str(open_folder), run=str(open_folder / "out")))
    (folder / "relu_implementation_1.py").write_text(source)
    done = _run_as_user(python, open_folder)
    assert done.returncode == 1, done.stderr
    rows = [json.loads(line) for line in (open_folder / "out" / "results.jsonl").read_text().splitlines()]
    ((verdict, reason),) = {(row["verdict"], row["reason"]) for row in rows}
    assert verdict == "cheated"
    for words in ("ANTHROPIC_API_KEY", "AF_INET", "~/pwned", "results.jsonl", "/environ", "SIGKILL", "was blocked"):
        assert words in reason
    assert not (open_folder / "pwned").exists()
    manifest = json.loads((open_folder / "out" / "manifest.json").read_text())
    assert manifest["confinement"]["own_user"] is False
    assert manifest["confinement"]["missing"] == []


def _python_of_everybody() -> str | None:
    here = os.path.realpath(sys.executable)
    found = here if _reachable(Path(here)) else shutil.which(Path(here).name, path="/usr/bin:/usr/local/bin")
    return found if _reachable(Path(torch_folder())) else None


def torch_folder() -> str:
    return importlib.util.find_spec("torch").submodule_search_locations[0]


def _reachable(path: Path) -> bool:
    return all(p.stat().st_mode & 0o001 for p in path.resolve().parents)


def _run_as_user(python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(Path(torch_folder()).parent)])
    return subprocess.run(
        [python, "-m", "opforge.cli", "run", "--suite", "smoke", "--backend", "directory", "--ops", "relu",
         "--out", str(folder / "out"), "--ops-directory", str(folder / "kernels")],
        capture_output=True, text=True, check=False, cwd=folder, user=12345, group=12345, extra_groups=[],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": str(folder), "OPFORGE_CACHE": str(folder / "cache"),
             "TMPDIR": str(folder)},
    )  # fmt: skip


def test_names_that_look_secret():
    secret = ["ANTHROPIC_API_KEY", "OPENAI_APIKEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_TOKEN"]
    plain = ["PATH", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "CUDA_VISIBLE_DEVICES", "KEYBOARD", "AUTHOR", "HOME"]
    assert [n for n in secret if not looks_secret(n)] == []
    assert [n for n in plain if looks_secret(n)] == []


def test_kept_prefixes_do_not_carry_secrets(monkeypatch):
    monkeypatch.setenv("OPFORGE_API_KEY", "secret")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "secret")
    assert "secret" not in worker_environment().values()


def test_the_home_folder_on_the_path_does_not_open_it(tmp_path, monkeypatch):
    home = tmp_path / "home"
    package = home / "project" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (home / "project" / ".env").touch()
    (home / "module.py").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "path", [*sys.path, str(home), "/", str(home / "project"), str(tmp_path)])
    readable_paths.shared_rights.cache_clear()
    readable_paths.home_folders.cache_clear()
    try:
        opened = {path for path, rights in readable_paths.shared_rights().items() if rights & landlock.READ_FILE}
    finally:
        readable_paths.shared_rights.cache_clear()
        readable_paths.home_folders.cache_clear()
    assert str(package) in opened
    assert not {str(home), str(tmp_path), str(home / "project"), "/", str(home / "project" / ".env")} & opened
    assert not any(path.startswith(str(home / "module")) for path in opened)


OLDER = """
    import os, signal, sys, tempfile
    from opforge.sandbox.guard import confinement
    version, as_user = int(sys.argv[1]), sys.argv[2] == "user"
    can = confinement.abilities()
    old = confinement.Abilities(version, can.seccomp, None if as_user else can.first_user, can.gpu_groups, can.search)
    confinement.abilities = lambda: old
    folder = tempfile.mkdtemp(dir=sys.argv[3])
    confinement.enter(confinement.Confinement(folder), confinement.user_for(folder, 1), None)
    os.makedirs("a/b")
    open("a/b/file", "w").close()
    os.rename("a/b/file", "file")
    os.kill(os.getpid(), signal.SIGURG)
    for action in (
        lambda: os.listdir(sys.argv[3]),
        lambda: open(sys.argv[3] + "/file", "w"),
        lambda: os.kill(os.getppid(), signal.SIGURG),
        lambda: __import__("socket").socket(),
    ):
        try:
            action()
        except PermissionError:
            continue
        sys.exit("got through")
"""


@pytest.mark.parametrize("who", ["user", "root"])
@pytest.mark.parametrize("version", range(2, 7))
def test_older_versions_of_landlock(version, who, tmp_path):
    if version > abilities().landlock:
        pytest.skip(f"this system's Landlock is version {abilities().landlock}")
    command = [sys.executable, "-c", textwrap.dedent(OLDER), str(version), who, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_one_the_kernel_could_take(machine):
    """Every jump lands inside the program, and the program ends in a verdict."""
    for chosen in (seccomp.rules(own_user=False), list(seccomp.signal_rules(77))):
        code = seccomp.assemble_filter(chosen, machine)
        count = len(code) // 8
        assert count < 4096
        for at in range(count):
            operation = int.from_bytes(code[8 * at : 8 * at + 2], "little")
            if operation in (0x15, 0x35):
                assert at + 1 + max(code[8 * at + 2], code[8 * at + 3]) < count
        assert code[-8:-6] == b"\x06\x00"


def test_system_call_numbers_are_those_of_the_headers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip(f"{header} is not there (package linux-libc-dev)")
    known = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    ours = {name: number for name, (number, _) in seccomp._NUMBERS.items()}
    assert {n: ours[n] for n in ours if n in known and ours[n] != int(known[n])} == {}
    assert len(set(ours) & set(known)) > 80


def test_a_kernel_reads_what_its_digest_covers_and_nothing_else_beside_it(judge_tiny, kernel_directory):
    """Neither a file whose name it makes up as it runs, nor compiled code that is not of its source."""
    source = """
        import torch
        from pathlib import Path
        import helper
        here = Path(__file__).parent
        def relu_kernel_impl(self):
            assert (here / "named.txt").read_text() == "named"
            assert helper.NUMBER == 7, helper.NUMBER
            return torch.where(self <= 0, 0, self)
        def neg_kernel_impl(self):
            return 0 - self * int((here / ("un" + "named.txt")).read_text())
    """
    root = kernel_directory({"relu": source, "neg": source})
    for name in ("relu", "neg"):
        folder = root / name
        (folder / "named.txt").write_text("named")
        (folder / "unnamed.txt").write_text("1")
        (folder / "helper.py").write_text("NUMBER = 8\n")
        compiled = Path(py_compile.compile(str(folder / "helper.py"), doraise=True))
        times = (folder / "helper.py").stat()
        (folder / "helper.py").write_text("NUMBER = 7\n")
        os.utime(folder / "helper.py", ns=(times.st_atime_ns, times.st_mtime_ns))
        assert compiled.exists()
    rows = list(judge_tiny(root, {"relu.default": UNARY, "neg.default": UNARY}).store.rows())
    assert {row.verdict for row in rows if row.op == "relu.default"} == {"passed"}, rows
    ((verdict, reason),) = {(row.verdict, row.reason) for row in rows if row.op == "neg.default"}
    assert verdict == "error"
    assert "PermissionError" in reason
    assert "only those files beside it that its source imports or names in full" in reason


def test_a_home_folder_within_another_is_named_first(tmp_path, monkeypatch):
    """Then a message says ``~`` for the folder that the user calls so."""
    inner = tmp_path / "tmp" / "home"
    monkeypatch.setenv("HOME", str(inner))
    monkeypatch.setattr(pwd, "getpwuid", lambda _user: type("Entry", (), {"pw_dir": str(tmp_path)}))
    assert readable_paths.home_folders.__wrapped__() == (str(inner), str(tmp_path))
