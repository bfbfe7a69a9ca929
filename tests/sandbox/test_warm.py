"""A warm server: used by commands of the same user and version, refused by all others, and unharmed by those it serves."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from opforge.runs.execute.judge_pool import ROLES, device_settings, start_server
from opforge.sandbox.host.admission import Hello, OtherDeviceError, ServerRefusedError, Version, admit
from opforge.sandbox.host.client import SERVER_VARIABLE, ForkServerProcess, server_environment
from opforge.sandbox.host.warm import WarmServer, connect, warm_server
from tests.command import opforge, opforge_process
from tests.conftest import ROOT, UNARY, verdicts
from tests.sandbox.test_fork_server import new_worker

CPU = device_settings("cpu")


@pytest.fixture(scope="module")
def path():
    """Return the socket of the warm server that this test run has."""
    return os.environ[SERVER_VARIABLE]


@pytest.fixture(scope="module")
def own():
    """Return a warm server that tests may harm: its socket, and its process."""
    with warm_server("", ROLES, CPU) as (path, server):
        yield path, server


def test_a_command_gets_processes_from_it_with_its_own_folder_and_stderr(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = start_server("cpu")
    assert isinstance(server, WarmServer)
    pid, channel = new_worker(server.spawner)
    channel.send({"do": "load", "kernel": {"file": None, "primary": "relu.default", "entries": []}})
    assert channel.receive(10) == {}
    assert os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)
    assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == os.readlink("/proc/self/fd/2")
    waiter = os.pidfd_open(pid)
    server.close()
    assert is_over(waiter)
    channel.close()


def is_over(waiter: int) -> bool:
    import select

    over = bool(select.select([waiter], [], [], 10)[0])
    os.close(waiter)
    return over


def test_only_its_user_may_connect(own):
    path, _server = own
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_both_sides(own):
    path, _server = own
    code = (
        "import os\nimport opforge.sandbox.host.warm as warm\nhere = warm.Version.here()\nwarm.Version.here = lambda: here\nos.setuid(65534)\n"
        f"try:\n    warm.connect('server', {CPU!r})\nexcept Exception as error:\n    print(error)"
    )
    folder = os.path.dirname(path)
    os.chmod(path, 0o666)
    os.chmod(folder, 0o755)  # a relative path leads there, whatever lies above
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
        assert "belongs to user 0, and you are user 65534; start a server of your own" in done.stdout, done.stderr
        unchecked = "warm.check_socket = lambda path: None\nwarm.peer_user = lambda connection: 65534\ntry:"
        code = code.replace("try:", unchecked)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
        assert "the server belongs to user 0, and you are user 65534" in done.stdout, done.stderr
    finally:
        os.chmod(path, 0o600)
        os.chmod(folder, 0o700)


@pytest.fixture
def hello(tmp_path):
    return Hello(Version.here(), server_environment(CPU), str(tmp_path), str(tmp_path))


def admit_here(hello, monkeypatch):
    """Ask in this process what a server would say to a command, in the environment that the server has."""
    monkeypatch.setattr(os, "environ", server_environment(CPU))
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        return admit(ours, hello, [2], Version.here())


def test_the_same_version_in_a_like_environment_is_let_in(hello, monkeypatch):
    other = {**hello.environment, "OPFORGE_CACHE": "/elsewhere", "PATH": "/bin", "CC": "clang"}
    command = admit_here(replace(hello, environment=other), monkeypatch)
    assert (command.environment, command.folder, command.stderr) == (other, hello.folder, 2)


@pytest.mark.parametrize("part", ["opforge", "torch", "python"])
def test_another_version_is_refused(hello, monkeypatch, part):
    other = replace(hello, version=replace(hello.version, **{part: "9.9"}))
    with pytest.raises(
        ServerRefusedError, match=rf"the server has another {part}: .*, and this command has 9\.9; restart"
    ):
        admit_here(other, monkeypatch)


def test_an_edited_checkout_is_another_version(tmp_path, monkeypatch):
    import opforge.sandbox.host.admission as module

    package = tmp_path / "opforge"
    (package / "sandbox" / "host").mkdir(parents=True)
    (package / "sandbox" / "host" / "admission.py").write_text("a = 1\n")
    monkeypatch.setattr(module, "__file__", str(package / "sandbox" / "host" / "admission.py"))
    before = Version.here()
    (package / "sandbox" / "host" / "admission.py").write_text("a = 2\n")
    assert Version.here() != before


@pytest.mark.parametrize("name", ["PYTHONPATH", "TORCH_LOGS", "LD_LIBRARY_PATH", "HOME", "OMP_NUM_THREADS"])
def test_a_variable_that_has_had_its_effect_must_be_the_same(hello, monkeypatch, name):
    with pytest.raises(ServerRefusedError, match=rf"was started with {name}=.*, and this command has '/other'"):
        admit_here(replace(hello, environment={**hello.environment, name: "/other"}), monkeypatch)


def test_a_run_on_another_kind_of_device_starts_its_own(hello, monkeypatch, path):
    plain = {name: value for name, value in hello.environment.items() if name != "TRITON_INTERPRET"}
    with pytest.raises(OtherDeviceError):
        admit_here(replace(hello, environment=plain), monkeypatch)
    monkeypatch.undo()
    assert connect(path, device_settings("cuda")) is None


def test_a_folder_that_its_kernels_could_read_is_refused(hello, monkeypatch):
    folder = str(Path(os.__file__).parent)
    with pytest.raises(ServerRefusedError, match="could read your working folder"):
        admit_here(replace(hello, folder=folder), monkeypatch)
    with pytest.raises(ServerRefusedError, match="could read your cache"):
        admit_here(replace(hello, cache=folder), monkeypatch)


def test_a_socket_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "dead"))
    dead.close()
    for name, words in {
        "nothing": "No such file or directory; start a server with `opforge warm`, or unset the variable",
        "file": "is not a socket",
        "dead": "no server answers at",
    }.items():
        done = opforge("run", "--out", str(tmp_path / "run"), OPFORGE_SERVER=str(tmp_path / name))
        assert (done.returncode, words in done.stderr, done.stdout) == (2, True, ""), done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [b"\0\0\0\0", b"\x02\0\0\0{}", b"\x04\0\0\0null", b"GET / HTTP/1.0\r\n\r\n", b""])
def test_who_talks_nonsense_harms_nobody(own, words):
    path, _server = own
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        stranger.sendall(words)
    server = connect(path, CPU)
    assert server is not None
    pid, channel = new_worker(server.spawner)
    waiter = os.pidfd_open(pid)
    server.spawner._channel.send({"do": "nonsense"})  # and a client that does is dropped, with what it started
    assert is_over(waiter)
    other = connect(path, CPU)
    assert other is not None
    other.close()
    server.close()
    channel.close()


def test_a_command_that_is_killed_leaves_nothing_behind(own, tmp_path):
    path, server = own
    code = (
        "import os, sys, time\nfrom opforge.runs.execute.judge_pool import start_server\n"
        "from tests.sandbox.test_fork_server import new_worker\n"
        "server = start_server('cpu')\n"  # it hangs up when nothing refers to it
        "pid, channel = new_worker(server.spawner)\nprint(pid, flush=True)\ntime.sleep(100)"
    )
    environment = {**os.environ, SERVER_VARIABLE: path}
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True, env=environment, cwd=ROOT) as command:
        worker = int(command.stdout.readline())
        waiter = os.pidfd_open(worker)
        assert psutil.Process(worker).ppid() == server.pid
        command.send_signal(signal.SIGKILL)
        assert is_over(waiter)


CONNECTS = """
    import socket, torch
    def relu_kernel_impl(self):
        s = socket.socket(socket.AF_UNIX)
        try:
            s.connect({path!r})
        except PermissionError:
            return self.clamp(min=0)
        return self
"""


def test_a_kernel_cannot_connect_to_it_nor_learn_where_it_is(path, judge_tiny, kernel_directory):
    assert path not in server_environment(CPU).values()
    ended = judge_tiny(kernel_directory({"relu": CONNECTS.format(path=path)}), {"relu.default": UNARY})
    assert verdicts(ended)["relu.default"] == {("passed", "")}


@pytest.mark.slow
def test_kernels_that_are_not_confined_do_not_get_it():
    server = start_server("cpu", confined=False)
    assert isinstance(server, ForkServerProcess)
    server.close()


@pytest.mark.slow
def test_the_command_serves_others_until_it_is_ended(tmp_path):
    socket_path = tmp_path / "server"
    command = [sys.executable, "-m", "opforge.cli", "warm", "--socket", str(socket_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == f"OPFORGE_SERVER={socket_path}\n"
        run = ("run", "--suite", "smoke", "--out", str(tmp_path / "run"), "--format", "json")
        assert opforge(*run, OPFORGE_SERVER=str(socket_path)).returncode == 0
        second = opforge("warm", "--socket", str(socket_path))
        assert (second.returncode, "Address already in use; give another" in second.stderr) == (2, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not socket_path.exists()


def test_the_command_runs_another_with_it(tmp_path):
    done = opforge_process("warm", "--", "sh", "-c", 'test -S "$OPFORGE_SERVER" && echo "$OPFORGE_SERVER"; exit 7')
    assert done.returncode == 7, done.stderr
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "tpu"], "unknown device 'tpu'; allowed: cpu, cuda"),
        (["--socket", "/proc/nowhere/socket"], "cannot be made"),
        (["--socket", "/tmp/" + "x" * 200], "100 are allowed: give a shorter one with --socket"),
        (["--", "/no/such/command"], "'/no/such/command' cannot be run: there is no such command"),
    ],
)
def test_bad_input(words, said):
    done = opforge("warm", *words)
    assert (done.returncode, said in done.stderr, done.stdout) == (2, True, ""), done.stderr
