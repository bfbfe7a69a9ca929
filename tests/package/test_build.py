"""A folder of sources becomes libraries with Python packages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from opforge.package.library_package import _stub
from tests.command import opforge
from tests.conftest import ROOT
from tests.native import ABORTS, DOES_NOT_COMPILE, NO_OPERATOR, registering, write

MATMUL = ROOT / "examples" / "cpp_matmul"


def python(code, *path):
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {list(map(str, path))!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def matmul(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    done = opforge("build", str(MATMUL), "--out", str(out), "--format", "json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_the_example_has_two_libraries(matmul):
    out, answer = matmul
    assert [one["name"] for one in answer["libraries"]] == ["matmul_blocked", "matmul_naive"]
    for one in answer["libraries"]:
        assert one["status"] in ("built", "cached")
        assert one["abi"] == "stable"
        assert one["operators"] == {f"{one['name']}::mm": f"{one['name']}::mm(Tensor a, Tensor b) -> Tensor"}
        files = sorted(path.name for path in (out / one["name"]).iterdir())
        assert files == ["__init__.py", "__init__.pyi", f"{one['name']}.so", "py.typed"]


def test_what_was_built_before_is_taken_and_named(matmul, tmp_path):
    write(tmp_path / "libs" / "broken", DOES_NOT_COMPILE)
    for name in ("matmul_blocked", "matmul_naive"):
        shutil.copytree(MATMUL / name, tmp_path / "libs" / name)
    done = opforge("build", "libs", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-5:-1] == [
        "matmul_blocked  out/matmul_blocked, stable ABI, cached",
        "  torch.ops.matmul_blocked.mm(Tensor a, Tensor b) -> Tensor",
        "matmul_naive  out/matmul_naive, stable ABI, cached",
        "  torch.ops.matmul_naive.mm(Tensor a, Tensor b) -> Tensor",
    ]
    assert lines[0].startswith("broken  failed: cannot be built: ")
    assert lines[-1] == "libraries: 2 cached, 1 failed; with out on the path, `import matmul_blocked`"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["matmul_blocked", "matmul_naive"]


@pytest.fixture
def demo(matmul, tmp_path):
    """Return the demo beside the libraries that it looks for, wherever the checkout's own are."""
    (tmp_path / "build").symlink_to(matmul[0])
    (tmp_path / "demo.py").write_text((MATMUL / "demo.py").read_text())
    return tmp_path / "demo.py"


@pytest.mark.slow
def test_the_demo_compares_with_pytorch(demo):
    done = subprocess.run([sys.executable, str(demo)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()[1:-1]]
    assert {row[0] for row in rows} == {"matmul_naive", "matmul_blocked"}
    assert len({(row[1], row[3]) for row in rows}) >= 5
    assert {row[4] for row in rows} == {"float32", "float64", "int64"}
    assert done.stdout.endswith("all equal within rounding\n")


@pytest.mark.slow
def test_the_demo_notices_a_wrong_product(demo):
    code = "import torch, runpy\ntorch.mm = lambda a, b: a @ b + 1\n"
    done = python(code + f"runpy.run_path({str(demo)!r}, run_name='__main__')")
    assert done.returncode == 1, done.stderr
    assert "WRONG" in done.stdout


@pytest.mark.slow
def test_the_demo_says_what_to_build_first(demo):
    (demo.parent / "build").unlink()
    done = subprocess.run([sys.executable, str(demo)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"build the libraries first: opforge build {demo.parent}" in done.stderr


def test_operators_are_reached_as_functions_and_by_torch(matmul):
    out, _ = matmul
    code = """
import torch, matmul_naive
a, b = torch.eye(3), torch.arange(9.0).view(3, 3)
assert matmul_naive.mm is torch.ops.matmul_naive.mm
assert torch.equal(matmul_naive.mm(a, b), b) and torch.equal(torch.ops.matmul_naive.mm.default(b.T, a), b.T)
try:
    matmul_naive.mm(a, b[:2])
except RuntimeError as error:
    print(error)
"""
    done = python(code, out)
    assert "3x3 and 2x3 do not go together" in done.stdout, done.stderr


@pytest.mark.slow
def test_stubs_are_what_a_type_checker_reads(matmul, tmp_path):
    out, _ = matmul
    use = write(
        tmp_path,
        "import matmul_naive\nimport torch\n\nx: int = matmul_naive.mm(torch.eye(2), torch.eye(2))\n",
        "use.py",
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(use)],
        capture_output=True, text=True, check=False, env={"MYPYPATH": str(out), "PATH": ""}, cwd=tmp_path,
    )  # fmt: skip
    assert 'expression has type "Tensor", variable has type "int"' in done.stdout


@pytest.mark.parametrize(
    ("schema", "stub"),
    [
        ("n::f(Tensor self, int k=1, *, float? p=None) -> Tensor", "def f(self: torch.Tensor, k: int = ..., *, p: float | None = ...) -> torch.Tensor: ..."),
        ("n::f(Tensor[] x, int lambda) -> (Tensor, bool)", "def f(x: Sequence[torch.Tensor], lambda_: int) -> tuple[torch.Tensor, bool]: ..."),
        ("n::f() -> ()", "def f() -> None: ..."),
        ("", "def f(*args: Any, **kwargs: Any) -> Any: ..."),
    ],
)  # fmt: skip
def test_stubs_of_schemas(schema, stub):
    assert _stub("f", schema) == stub


def test_a_clash_is_found_before_anything_is_built(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / "libs" / name, registering("STABLE_TORCH_LIBRARY", f"op_{name}"))
    done = opforge("build", "libs", cwd=tmp_path)
    assert done.returncode == 1
    for words in (
        "namespace 'shared' is claimed twice",
        "libs/one/source.cpp:5",
        "libs/two/source.cpp:5",
        "another name",
        "FRAGMENT(shared, m)",
    ):
        assert words in done.stderr
    assert not (tmp_path / "libs" / "build").exists()


@pytest.mark.slow
def test_a_package_does_not_end_the_process_that_has_its_namespace(tmp_path):
    """Build two libraries of one namespace by themselves, and import both: plain torch would end the process."""
    for name in ("one", "two"):
        write(tmp_path / name, registering("STABLE_TORCH_LIBRARY", f"op_{name}"))
        assert opforge("build", name, "--out", "out", cwd=tmp_path).returncode == 0
    plain = "import torch\nfor name in ('one', 'two'): torch.ops.load_library(f'{sys.path[0]}/{name}/{name}.so')"
    assert python(plain, tmp_path / "out").returncode < 0
    both = "import one\ntry:\n    import two\nexcept ImportError as error:\n    print(error)\nprint('alive')"
    done = python(both, tmp_path / "out")
    assert done.returncode == 0
    for words in (
        "namespace 'shared' of",
        "two.so is taken in this process",
        "source.cpp:5",
        "FRAGMENT(shared, m)",
        "alive",
    ):
        assert words in done.stdout


@pytest.mark.slow
def test_one_that_fails_does_not_keep_the_others_from_being_built(tmp_path):
    good = registering("STABLE_TORCH_LIBRARY", "same", "OPFORGE_NAMESPACE")
    for name, source in {"good": good, "broken": DOES_NOT_COMPILE, "empty": NO_OPERATOR, "aborts": ABORTS}.items():
        write(tmp_path / "libs" / name, source)
    done = opforge("build", "libs", cwd=tmp_path)
    assert done.returncode == 1
    for words in (
        "torch.ops.good.same(Tensor self) -> Tensor",
        "broken  failed: cannot be built: source.cpp:2:11: error: 'three' was not declared",
        "empty  failed: registers no operator: write a block",
        "aborts  failed: cannot be loaded: loading it dies of SIGABRT",
        "3 failed;",
    ):
        assert words in done.stdout
    assert [path.name for path in (tmp_path / "libs" / "build").iterdir()] == ["good"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere"], 2, "there is no folder 'nowhere'"),
        (["empty"], 5, "nothing to build in 'empty'"),
        (["1st"], 2, "'1st' cannot be a namespace"),
        (["two", "--namespace", "x"], 2, "--namespace x requires one library, and 'two' holds a, b"),
        (["one", "--namespace", "a-b"], 2, "'a-b' cannot be a namespace"),
        (["one", "--target", "new"], 2, "'new' is not a version of torch"),
        (
            ["one", "--target", "2.10"],
            2,
            "--target 2.10 is out of range; the torch installed here builds for 2.11 to 2",
        ),
        (["one", "--target", "9.0"], 2, "--target 9.0 is out of range"),
        (
            ["one", "--namespace", "prims"],
            2,
            "source.cpp:5 registers operators in 'prims', a namespace of torch itself",
        ),
        (
            ["aten"],
            2,
            "source.cpp:5 registers operators in 'aten', a namespace of torch itself; use a name of your own",
        ),
        (["one", "--format", "xml"], 2, "unknown format 'xml'"),
        (["one", "--workers", "0"], 2, "--workers 0 is out of range"),
        (["one", "--timeout", "inf"], 2, "--timeout inf is out of range"),
        (["one", "--out", "/proc/nope"], 2, "cannot be written"),
    ],
)
def test_bad_input(words, code, message, tmp_path):
    (tmp_path / "empty").mkdir()
    source = registering("STABLE_TORCH_LIBRARY", "same", "OPFORGE_NAMESPACE")
    for folder in ("1st", "one", "aten", "two/a", "two/b"):
        write(tmp_path / folder, source)
    done = opforge("build", *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
