"""`opforge add-op`: operators that work at once, only what is missing, and nothing at all when something is wrong."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from opforge.errors import OpforgeError
from opforge.package import add_op, edits
from tests.command import opforge
from tests.conftest import slow
from tests.package.packages import SCHEMAS, bake, environment, files_of, install, run, run_tests, wheel

OPTIONS = {
    "plain": [],
    "plain_": ["--mutates"],
    "pair": ["--outputs", "2"],
    "shifted": ["--optional", "bias"],
    "everything_": ["--mutates", "--outputs", "2", "--optional", "bias", "--optional", "gate"],
    "much": ["--outputs", "3", "--optional", "bias,gate"],
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return a package to which nothing was added."""
    return bake(tmp_path_factory.mktemp("bare"), "more_ops")


@pytest.fixture(scope="module")
def full(bare, tmp_path_factory):
    """Return a package to which an operator with each of the options was added."""
    folder = tmp_path_factory.mktemp("full") / "more_ops"
    shutil.copytree(bare, folder)
    for name, options in OPTIONS.items():
        done = opforge("add-op", name, *options, "--package", str(folder))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("made  ") == 3
        assert done.stdout.count("extended  ") == 2
    return folder


@pytest.fixture(scope="module")
def installed(full, tmp_path_factory):
    return install(full, tmp_path_factory.mktemp("installed"))


@pytest.fixture
def package(bare, tmp_path):
    """Return a package of a test's own."""
    return Path(shutil.copytree(bare, tmp_path / "more_ops"))


def add(package, name, *options):
    return opforge("add-op", name, *options, "--package", str(package))


@pytest.mark.parametrize("ops", [("everything_",), slow((*OPTIONS, "package"))])
def test_what_was_added_works_at_once(ops, full, installed):
    names = [f"tests/test_{name}.py" for name in ops]
    printed = run_tests(full, installed, "-n0", *names)
    assert " passed" in printed
    assert "skipped" not in printed


def test_what_was_added_is_tidy(full):
    run("ruff", "check", ".", cwd=full)
    run("ruff", "format", "--check", ".", cwd=full)
    run("mypy", cwd=full)


@pytest.mark.slow
def test_kernels_are_compiled_and_traced_as_on_a_gpu(installed, tmp_path):
    script = Path(__file__).with_name("as_on_gpu.py")
    printed = run(sys.executable, script, "more_ops", path=installed, TRITON_CACHE_DIR=str(tmp_path))
    kernels = {
        f"{name}_kernel" for name in (*OPTIONS, "swiglu", "swiglu_backward", "row_moments", "rms_norm", "add_scaled")
    }
    compiled = re.findall(r"^compiled (\w+) (\w+) True$", printed, re.MULTILINE)
    assert sorted(compiled) == sorted((kernel, dtype) for kernel in kernels for dtype in ("fp32", "bf16"))
    traced = re.findall(r"^traced (\w+) (?:fixed|dynamic) (\w+)$", printed, re.MULTILINE)
    assert {
        (name, f"{name}_kernel".replace("scaled__", "scaled_"))
        for name in (*OPTIONS, "swiglu", "rms_norm", "add_scaled_")
    } <= set(traced)
    assert len(traced) == 2 * (len(OPTIONS) + 4)


@pytest.mark.slow
def test_a_wheel_has_what_was_added(full, tmp_path):
    python = environment(tmp_path / "environment", wheel(full, tmp_path))
    code = (
        "import torch, more_ops\nx = torch.ones(3)\nprint(more_ops.everything_(x, None, torch.ones(3)), x)\n"
        "print(torch.compile(more_ops.much, fullgraph=True, backend='aot_eager')(torch.ones(1)))"
    )
    printed = run(python, "-c", code, cwd=tmp_path, TRITON_INTERPRET="1")
    ones = "(tensor([4., 4., 4.]), tensor([5., 5., 5.])) tensor([3., 3., 3.])\n"
    assert printed == ones + "(tensor([2.]), tensor([3.]), tensor([4.]))\n"


@pytest.fixture(scope="module")
def of_schemas(bare, tmp_path_factory):
    """Return a package with an operator of each schema, and what the commands printed."""
    folder = Path(shutil.copytree(bare, tmp_path_factory.mktemp("schemas") / "more_ops"))
    done = [opforge("add-op", schema, "--package", str(folder)) for schema in SCHEMAS.values()]
    assert not [one.stderr for one in done if one.returncode]
    return folder, [one.stdout for one in done]


def test_schemas_make_tidy_files_of_what_they_say(of_schemas):
    folder, printed = of_schemas
    run("ruff", "check", ".", cwd=folder)
    run("ruff", "format", "--check", ".", cwd=folder)
    types = (folder / "src/more_ops/namespace.py").read_text()
    for method in (
        "scale_add(self, x: Tensor, y: Tensor, a: float = ..., dims: list[int] = ...) -> tuple[Tensor, Tensor]",
        "add_all(self, a: Tensor, b: Tensor, s: float, flag: bool = ..., c: Tensor | None = ...) -> Tensor",
        "fill_up(self, size: list[int], value_of: float = ...) -> tuple[Tensor, Tensor]",
        "quiet_(self, x: Tensor, a: float) -> None",
    ):
        assert f"    def {method}: ...\n" in types
    ops = (folder / "src/more_ops/ops/scale_add.py").read_text()
    assert f"# opforge add-op '{SCHEMAS['scale_add']}'\n" in ops
    assert "    return to_x, to_each, None, None\n" in ops
    assert not (folder / "src/more_ops/kernels/fill_up.py").exists()
    assert "operator more_ops::scale_add multiplies for now" in printed[0]
    before = files_of(folder)
    again = opforge("add-op", SCHEMAS["scale_add"].replace("(Tensor x", "( Tensor  x"), "--package", str(folder))
    assert again.stdout.endswith("operator more_ops::scale_add is already complete\n"), again.stderr
    other = opforge("add-op", "quiet_(Tensor(a!) x) -> ()", "--package", str(folder))
    assert f"made by `opforge add-op '{SCHEMAS['quiet_']}'`, not by" in other.stderr
    assert files_of(folder) == before


@pytest.mark.slow
def test_operators_of_schemas_pass_their_tests(of_schemas, tmp_path):
    folder, _ = of_schemas
    printed = run_tests(folder, install(folder, tmp_path), *(f"tests/test_{name}.py" for name in SCHEMAS))
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("f(Tensor x", "is not a schema that can be generated: Invalid function schema"),
        ("f(Tenso x) -> Tensor", "is not a schema that can be generated: unrecognized type Tenso"),
        (
            "f(Tensor x, str mode) -> Tensor",
            "argument 'mode' of 'f(Tensor x, str mode) -> Tensor' has type str; allowed: T",
        ),
        ("f(Tensor x, Tensor? b) -> Tensor", "argument 'b' of 'f(Tensor x, Tensor? b) -> Tensor' needs a default"),
        ("f(Tensor x, *, float a) -> Tensor", "has arguments after `*`"),
        ("f(Tensor? x=None) -> Tensor", "the first tensor of 'f(Tensor? x=None) -> Tensor' is x, which is optional"),
        ("f(Tensor x, Tensor(a!) b) -> Tensor", "writes into b; add-op generates operators that write into the first"),
        ("f_(Tensor(a!) x) -> Tensor(a!)", "is not a schema that can be generated"),
        ("f(Tensor x) -> int", "returns int; allowed: (), Tensor, (Tensor, Tensor)"),
        ("f(Tensor x) -> ()", "returns nothing and writes nothing"),
        ("f_(Tensor(a!) x, int dim) -> ()", "writes into x and sums over dim"),
        ("f(Tensor x, float a=1.0, float b) -> Tensor", "a has a default, and an argument after it has none"),
        ("f(Tensor x, Tensor ctx) -> Tensor", "argument 'ctx' is a name that means something else"),
        ("launch(Tensor x) -> Tensor", "operator 'launch' is a name that means something else"),
    ],
)
def test_a_schema_that_cannot_be_generated_is_refused(schema, why, bare):
    before = files_of(bare)
    done = add(bare, schema)
    assert done.returncode == 2
    assert why in done.stderr
    assert files_of(bare) == before
    assert "leave them out" in add(bare, schema, "--mutates").stderr


def test_a_schema_needs_a_launcher_that_takes_it(package):
    launch = package / "src/more_ops/kernels/launch.py"
    launch.write_text(launch.read_text().replace("schema: str | None = None", "").replace(", schema=schema", ""))
    done = add(package, SCHEMAS["quiet_"])
    assert "launch.py has no parameter schema; copy that file" in done.stderr


def test_a_second_time_changes_nothing(full):
    before = files_of(full)
    for name, options in OPTIONS.items():
        done = add(full, name, *options)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("kept  ") == 5
        assert done.stdout.endswith(f"operator more_ops::{name} is already complete\n")
    assert files_of(full) == before


def test_other_options_are_refused(full):
    before = files_of(full)
    done = add(full, "pair", "--outputs", "3")
    assert done.returncode == 2
    assert "made by `opforge add-op pair --outputs 2`, not by `opforge add-op pair --outputs 3`" in done.stderr
    assert files_of(full) == before


def test_only_what_is_missing_is_added(package):
    add(package, "scale")
    whole = files_of(package)
    kernel, types = package / "src/more_ops/kernels/scale.py", package / "src/more_ops/namespace.py"
    kernel.write_text(kernel.read_text().replace("2 * x", "7 * x"))
    (package / "tests/test_scale.py").unlink()
    types.write_text(re.sub(r"    def scale\(.*\n", "", types.read_text()))
    edited = kernel.read_bytes()
    done = add(package, "scale")
    assert re.findall(r"^(\w+) +(?:.*/)?(\S+)$", done.stdout, re.MULTILINE)[:5] == [
        ("kept", "scale.py"), ("kept", "scale.py"), ("made", "test_scale.py"), ("kept", "__init__.py"), ("extended", "namespace.py"),
    ]  # fmt: skip
    assert files_of(package) == {**whole, "src/more_ops/kernels/scale.py": edited}


def test_lines_of_the_author_stay(package):
    exports = package / "src/more_ops/ops/__init__.py"
    exports.write_text(exports.read_text().replace('__all__ = ["add', '# mine\nMINE = 1\n\n__all__ = ["zeta", "add'))
    types = package / "src/more_ops/namespace.py"
    types.write_text(types.read_text() + "\n\ndef mine() -> int:\n    return 1\n")
    assert add(package, "pick", "--optional", "bias").returncode == 0
    assert "# mine\nMINE = 1\n" in exports.read_text()
    assert '"swiglu", "pick"]' in exports.read_text()  # a list that is not sorted is added to at its end
    assert "import add_scaled_\nfrom .pick import pick\nfrom .rms_norm" in exports.read_text()
    method = "    def pick(self, x: Tensor, bias: Tensor | None = ...) -> Tensor: ...\n\n\nops = cast"
    assert method in types.read_text()
    assert types.read_text().endswith("return 1\n")


def test_a_failure_leaves_the_package_as_it_was(package, monkeypatch):
    before = files_of(package)
    write = add_op._write

    def fails(path, text):
        if path.name == "namespace.py":
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(add_op, "_write", fails)
    with pytest.raises(
        OpforgeError, match=r"namespace.py' cannot be written: No space left on device; nothing was changed"
    ):
        add_op.add_op(add_op.read_package(package), add_op.operator_request("scale"))
    assert files_of(package) == before


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("ops/__init__.py", "from .swiglu import swiglu\n", "has no list of its exports"),
        ("ops/__init__.py", "__all__ = [] + ['a']\n", "has no list of its exports"),
        ("ops/__init__.py", "def (\n", "is not Python, line 1"),
        ("namespace.py", "ops = 1\n", "has no class Namespace"),
        ("ops/swiglu.py", "\xff", "cannot be read"),
    ],
)
def test_files_that_cannot_be_extended_are_named(file, text, why, package):
    (package / "src/more_ops" / file).write_bytes(text.encode("latin-1"))
    before = files_of(package)
    done = add(package, "scale")
    assert done.returncode == 2
    assert why in done.stderr
    assert file in done.stderr
    assert files_of(package) == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["Scale"], "operator 'Scale' cannot be used"),
        (["double"], "operator 'double' is a word of Python or C++"),
        (["a" * 300], "is too long: it has 300 characters and may have 64"),
        (["launch"], "operator 'launch' is a name that means something else"),
        (["swiglu"], "was not added by this command"),
        (["swiglu_backward"], "more_ops::swiglu_backward is registered in"),
        (["scale", "--outputs", "0"], "--outputs 0 is out of range; it must be 1 to 8"),
        (["scale_", "--mutates", "--outputs", "9"], "--outputs 9 is out of range; it must be 0 to 8"),
        (["scale", "--optional", "x"], "optional argument 'x' is a name that means something else"),
        (["scale", "--optional", "y1"], "optional argument 'y1' is a name that the operator's files use"),
        (["scale", "--optional", "a,a"], "an optional argument is given twice: a, a"),
        (["scale", "--optional", ""], "optional argument '' cannot be used"),
    ],
)
def test_what_cannot_be_added_is_refused(words, why, bare):
    before = files_of(bare)
    done = add(bare, *words)
    assert done.returncode == 2
    assert why in done.stderr
    assert files_of(bare) == before


def test_another_folder_is_refused(tmp_path, package):
    done = opforge("add-op", "scale", cwd=tmp_path)
    assert done.returncode == 2
    assert "was not made by `opforge new`: there is no [tool.opforge] in its pyproject.toml" in done.stderr
    project = package / "pyproject.toml"
    project.write_text(project.read_text().replace('variant = "triton"', 'variant = "rust"'))
    assert "says variant 'rust', abi 'stable'; allowed: triton or cpp, stable or full" in add(package, "scale").stderr
    project.write_text(
        project.read_text().replace('"rust"', '"triton"').replace('package = "more_ops"', 'package = "less"')
    )
    assert "there is no src/less/ops/__init__.py" in add(package, "scale").stderr


def test_long_lines_are_folded_as_the_formatter_folds_them():
    names = [f"parameter_{n}: Tensor" for n in range(5)]
    assert edits.fold_line("def f(", names[:1], "): ...") == "def f(parameter_0: Tensor): ..."
    assert edits.fold_line("def f(", names, ") -> None: ...") == f"def f(\n    {', '.join(names)}\n) -> None: ..."
    many = edits.fold_line("def f(", names * 2, ") -> None: ...")
    assert many.splitlines()[1] == "    parameter_0: Tensor,"
