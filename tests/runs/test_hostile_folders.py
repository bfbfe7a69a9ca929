"""Folders that somebody made to stop a run: each gets its own verdict, and the others are judged."""

from __future__ import annotations

import os
import re

from tests.command import opforge
from tests.conftest import UNARY, verdicts

RIGHT = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"
SELF = "def {op}_kernel_impl(self):\n    return self\n"
ESCAPES = r"""
def floor_kernel_impl(self):
    raise ValueError("\x1b[2K\x1b[1A\r:boom: \u202epassed\n::error::forged ##[error]forged")
"""


def make(root):
    """Make a folder of kernels, of which one is right."""

    def folder(op):
        (root / op).mkdir(parents=True)
        return root / op

    (folder("relu") / "relu_implementation_1.py").write_text(RIGHT)
    sparse = folder("exp") / "exp_implementation_1.py"
    sparse.touch()
    os.truncate(sparse, 8 << 40)
    os.mkfifo(folder("sin") / "sin_implementation_1.py")
    (folder("cos") / "cos_implementation_1.py").write_text(SELF.format(op="cos"))
    os.mkfifo(root / "cos" / "cos_implementation_1.proof.json")
    (folder("tan") / "tan_implementation_1.py").write_text(SELF.format(op="tan"))
    (root / "tan" / "data").symlink_to("/usr")
    (folder("abs") / os.fsdecode(b"abs_implementation_\xff.py")).write_text(SELF.format(op="abs"))
    (folder("neg") / "neg_implementation_²_1.py").write_text(SELF.format(op="neg"))
    (folder("sqrt") / "sqrt_implementation_1.py").write_text(f"x = {'-' * 60_000}1\n{SELF.format(op='sqrt')}")
    (folder("ceil") / "ceil_implementation_1.2.py").write_text(
        "import torch\ndef ceil_kernel_impl(self):\n    return -torch.floor(-self)\n"
    )
    (folder("floor") / f"floor_implementation_{'x' * 60}::error::forged.py").write_text(ESCAPES)
    (folder("log2") / "log2_implementation_1.py").write_text(f"x = 'named.bin'\n{SELF.format(op='log2')}")
    (root / "log2" / "named.bin").touch()
    os.truncate(root / "log2" / "named.bin", 8 << 40)
    (folder("sigmoid") / "sigmoid_implementation_1.py").symlink_to("/etc/passwd")
    (folder("tanh") / "tanh_implementation_1.py").mkdir()
    (root / os.fsdecode(b"\xfe\xff")).mkdir()
    (root / "log").symlink_to("/usr")
    return root


OPS = ("relu", "exp", "sin", "cos", "tan", "abs", "neg", "sqrt", "ceil", "floor", "sigmoid", "log2")


def test_each_has_its_own_verdict(judge_tiny, tmp_path):
    ended = judge_tiny(make(tmp_path / "kernels"), {f"{op}.default": UNARY[:1] for op in OPS})
    found = {
        op.removesuffix(".default"): one for op, ((one), *_) in ((op, list(v)) for op, v in verdicts(ended).items())
    }
    assert found["relu"] == ("passed", "")
    assert found["ceil"] == ("passed", "")
    assert {op: found[op][0] for op in ("cos", "tan", "neg")} == dict.fromkeys(("cos", "tan", "neg"), "contract")
    words = {
        "exp": "it holds 8796093022208 bytes",
        "sin": "it is not a regular file",
        "abs": r"its name, abs_implementation_\xdcff.py, is not printable UTF-8",
        "sqrt": "raised while loading",
        "sigmoid": "links are not followed",
        "log2": "named.bin cannot be read: it holds 8796093022208 bytes",
    }
    for op, said in words.items():
        assert found[op][0] == "error"
        assert said in found[op][1], found[op]


def test_what_a_kernel_says_does_not_alter_what_is_shown(tmp_path):
    root = make(tmp_path / "kernels")
    suite = tmp_path / "given.txt"
    suite.write_text("".join(f"Operator: aten.{op}.default\ncnt: 1, ((T([3, 4], f32),), {{}})\n" for op in OPS))
    words = ("run", "--suite", str(suite), "--backend", "directory", "--ops-directory", str(root))
    done = opforge(*words, "--out", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    markdown = (tmp_path / "run" / "OVERALL_SUMMARY.md").read_text()
    for text in (done.stdout, markdown, opforge("report", str(tmp_path / "run"), "--format", "markdown").stdout):
        assert r"\x1b[2K" in text
        assert ":boom:" in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert not re.search(r"^\s*::|##\[", text, re.MULTILINE)
