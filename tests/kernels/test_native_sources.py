"""What is read from sources before anything is built."""

from __future__ import annotations

import pytest

from opforge.kernels.native import clashes_of_sources, is_native
from opforge.kernels.native.sources import includes, needs_full_headers, needs_python, registrations, sources_in
from opforge.kernels.source import digest
from tests.native import write

SOURCE = """
// TORCH_LIBRARY(in_a_comment, m) { m.def("x() -> ()"); }
/* TORCH_LIBRARY(in_another, m) {} */
#define MINE(ns) TORCH_LIBRARY(ns, m)
TORCH_LIBRARY(first, m) {
  m.def("one(Tensor self) -> Tensor", &one);
  m.def("two.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)");
  const char* braces = "} {";
  m.def(R"(three(Tensor self)
           -> Tensor)");
  m.def(TORCH_SELECTIVE_SCHEMA("first::four(Tensor self) -> Tensor"));
}
TORCH_LIBRARY_FRAGMENT(second, m) { m.def("five", &five); }
TORCH_LIBRARY_IMPL(first, CPU, m) { m.impl("one", &one); }
STABLE_TORCH_LIBRARY( OPFORGE_NAMESPACE , m) { m.def("six() -> ()"); }
"""


def test_blocks_and_their_operators(tmp_path):
    found = registrations(write(tmp_path, SOURCE), {"OPFORGE_NAMESPACE": "mine"})
    assert [(b.namespace, b.claims_namespace, b.operators) for b in found] == [
        ("first", True, ("one", "two.out", "three", "four")),
        ("second", False, ("five",)),
        ("mine", True, ("six",)),
    ]
    assert [b.line for b in found] == [5, 13, 15]


@pytest.mark.parametrize(
    ("header", "full", "python"),
    [
        ("torch/csrc/stable/library.h", False, False),
        ("torch/headeronly/core/ScalarType.h", False, False),
        ("torch/csrc/inductor/aoti_torch/c/shim.h", False, False),
        ("vector", False, False),
        ("torch/library.h", True, False),
        ("ATen/ATen.h", True, False),
        ("c10/util/Half.h", True, False),
        ("torch/extension.h", True, True),
        ("Python.h", False, True),
        ("pybind11/pybind11.h", False, True),
    ],
)
def test_which_headers_are_needed(header, full, python):
    included = includes([f"#include <{header}>\n// #include <torch/extension.h>\n"])
    assert included == {header}
    assert needs_full_headers(included) is full
    assert needs_python(included) is python


def test_digests_follow_headers_beside_the_source(tmp_path):
    file = write(tmp_path, "int x;")
    before = digest(file)
    write(tmp_path, "#define X", "x.h")
    beside = digest(file)
    assert beside != before
    write(tmp_path / "inner", "#define Y", "y.h")
    assert digest(file) != beside


def test_what_is_a_source(tmp_path):
    assert is_native("a/b.cu")
    assert is_native(tmp_path / "b.cpp")
    assert not is_native("b.py")
    assert not is_native(None)
    for name in ("a.cpp", "src/b.cu", "build/c.cpp", ".hidden/d.cpp", "e.h"):
        write((tmp_path / name).parent, "", (tmp_path / name).name)
    assert [p.relative_to(tmp_path).as_posix() for p in sources_in(tmp_path)] == ["a.cpp", "src/b.cu"]


def units(tmp_path, *texts):
    return {f"u{n}": registrations(write(tmp_path / f"u{n}", text)) for n, text in enumerate(texts)}


def test_a_namespace_claimed_twice_is_named_with_files_and_fixes(tmp_path):
    block = 'TORCH_LIBRARY(ours, m) { m.def("x(Tensor a) -> Tensor"); }'
    (clash,) = clashes_of_sources(units(tmp_path, block, f"\n{block}"))
    said = str(clash)
    assert "namespace 'ours' is claimed twice" in said
    assert f"{tmp_path}/u0/source.cpp:1" in said
    assert f"{tmp_path}/u1/source.cpp:2" in said
    assert "another name" in said
    assert "TORCH_LIBRARY_FRAGMENT(ours, m)" in said


def test_an_operator_defined_twice_is_named(tmp_path):
    whole = 'TORCH_LIBRARY(ours, m) { m.def("x(Tensor a) -> Tensor"); }'
    fragment = 'TORCH_LIBRARY_FRAGMENT(ours, m) { m.def("x(Tensor a) -> Tensor"); }'
    (clash,) = clashes_of_sources(units(tmp_path, whole, fragment))
    assert "operator ours::x is defined twice" in str(clash)


def test_fragments_of_one_namespace_go_together(tmp_path):
    one = 'TORCH_LIBRARY(ours, m) { m.def("x(Tensor a) -> Tensor"); }'
    two = 'TORCH_LIBRARY_FRAGMENT(ours, m) { m.def("y(Tensor a) -> Tensor"); m.def("x.out(Tensor a) -> Tensor"); }'
    assert clashes_of_sources(units(tmp_path, one, two)) == []


def test_a_namespace_may_be_a_macro(tmp_path):
    """Macros of sources, headers and arguments are expanded; an ambiguous one is left to the trial load."""
    body = 'STABLE_TORCH_LIBRARY({}, m) {{ m.def("same(Tensor self) -> Tensor"); }}\n'
    own = f"#define INNER mine\n#define NS INNER // by two steps\n{body.format('NS')}"
    twice = f"#ifdef A\n#define NS one\n#else\n#define NS two\n#endif\n{body.format('NS')}"
    header = write(tmp_path, "#define OF_HEADER(x) x\n#define OF_HEADER_TOO yours\n", "names.h")
    expected = {own: ("mine", True), twice: ("NS", False)}
    expected |= {body.format("OF_HEADER_TOO"): ("yours", True), body.format("GIVEN"): ("given", True)}
    for number, (source, namespace) in enumerate(expected.items()):
        file = write(tmp_path / str(number), source)
        (block,) = registrations(file, {"GIVEN": "given"}, [header])
        assert (block.namespace, block.namespace_known) == namespace
    first, second = (registrations(write(tmp_path / name, twice)) for name in ("first", "second"))
    assert clashes_of_sources({"first": first, "second": second}) == []
    assert (
        len(
            clashes_of_sources(
                {"a": registrations(write(tmp_path / "a", own)), "b": registrations(write(tmp_path / "b", own))}
            )
        )
        == 1
    )
