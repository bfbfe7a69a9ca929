"""A C++ package as `opforge new` makes it: it builds, loads and passes its own tests; test_cpp_template.py has the rest."""

from __future__ import annotations

import json
import sys

import pytest

from tests.package.packages import run, run_tests, stored_package

CODE = """
import json, torch, cpp_ops
x = torch.randn(3, 5)
compiled = torch.compile(lambda x: cpp_ops.rms_norm(x), fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(x), torch.nn.functional.rms_norm(x, (5,), eps=1e-6))
print(json.dumps([cpp_ops.__file__, sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("cpp_ops::"))]))
"""


def test_it_loads_and_its_operators_are_right_and_compile():
    package = stored_package("cpp_ops", "cpp")
    file, operators = json.loads(
        run(sys.executable, "-c", CODE, path=package.target, cwd=package.target).splitlines()[-1]
    )
    assert file == str(package.target / "cpp_ops" / "__init__.py")
    assert {"cpp_ops::swiglu", "cpp_ops::row_moments", "cpp_ops::add_scaled_", "cpp_ops::rms_norm"} <= set(operators)


@pytest.mark.slow
def test_it_passes_its_own_tests():
    package = stored_package("cpp_ops", "cpp")
    printed = run_tests(package.project, package.target, "tests/test_package.py")
    assert " passed" in printed
    assert "skipped" not in printed
