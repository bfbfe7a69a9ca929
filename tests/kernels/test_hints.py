"""Hints are read from the source, with their lines, and never stop anything."""

from opforge.kernels.hints import native_hints, python_hints


def test_each_thing_is_named_with_its_first_line():
    source = (
        "import ctypes, torch\nimport time\nfrom concurrent.futures import wait\n"
        "torch.cuda.synchronize = None\ns = torch.cuda.Stream()\nt = torch.cuda.Stream()\n"
        "try:\n    exec('1')\nexcept Exception:\n    pass\n"
    )
    assert python_hints(source) == [
        "calls native code through ctypes (line 1)",
        "reads clocks (line 2)",
        "starts threads or processes (line 3)",
        "assigns to torch.cuda.synchronize (line 4)",
        "makes streams of its own (line 5)",
        "runs text as code (line 8)",
        "catches every exception (line 9)",
    ]


def test_a_plain_kernel_has_none_and_a_broken_one_no_error():
    assert python_hints("import torch\ndef relu_kernel_impl(self):\n    return torch.where(self > 0, self, 0)\n") == []
    assert python_hints("def (") == []


def test_what_is_worth_a_look_in_native_sources():
    source = """
// system("in a comment");
STABLE_TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("relu", TORCH_BOX(&relu)); }
void f() { cblas_sgemm(1, 2); }
void g() { std::thread work(f); getenv("KEY"); }
"""
    assert native_hints(source) == [
        "registers implementations of ATen's own operators (line 3)",
        "calls a vendor's library (line 4)",
        "starts threads (line 5)",
        "reads the environment (line 5)",
    ]
    assert native_hints("int fork_count = 1; // exit(0)") == []
