"""Code is found in replies of every shape."""

from __future__ import annotations

import pytest

from opforge.generate.extract import Code, NoCode, extract

KERNEL = "import torch\n\n\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"
BROKEN = "def relu_kernel_impl(self:\n"
SHELL = "pip install triton\n"
USE = "print(relu_kernel_impl(torch.ones(2)))\n"
INDENTED = "".join(f"    {line}" if line.strip() else line for line in KERNEL.splitlines(keepends=True))
NATIVE = (
    "#include <torch/csrc/stable/library.h>\nTensor f(Tensor x) { return x; }\n"
    'STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) { m.def("relu_kernel_impl(Tensor self) -> Tensor"); }\n'
)


def fenced(text: str, tag: str = "python", fence: str = "```") -> str:
    return f"{fence}{tag}\n{text}{fence}\n"


@pytest.mark.parametrize(
    "reply",
    [
        fenced(KERNEL),
        fenced(KERNEL, ""),
        fenced(KERNEL, "Python title=relu.py"),
        fenced(KERNEL, "triton", "~~~~"),
        f"First the idea.\n\n{fenced(KERNEL)}\nThis is right because …",
        f"{fenced(SHELL, 'bash')}{fenced(KERNEL)}{fenced(USE)}",
        f"{fenced(KERNEL.replace('<=', '<'))}No, NaN:\n{fenced(KERNEL)}",
        f"{fenced(KERNEL)}Earlier I had, and it does not parse:\n{fenced(BROKEN)}",
        f"1. like this:\n\n    ```python\n{INDENTED}    ```\n",
        f"```python\n{KERNEL}",
        KERNEL,
        f"Here is the kernel.\n\n{KERNEL}\nIt keeps NaN, as ATen does.\n",
        fenced(KERNEL).replace("\n", "\r\n"),
        fenced("text = '''\n```\n'''\n" + KERNEL, fence="````"),
    ],
    ids=range(14),
)
def test_the_block_that_has_the_function_is_taken(reply):
    code = extract(reply, "relu_kernel_impl", ".py")
    assert isinstance(code, Code), code
    assert code.text.endswith(KERNEL)
    names: dict[str, object] = {}
    exec(code.text, names)
    assert callable(names["relu_kernel_impl"])


def test_what_is_shown_in_pieces_is_put_together():
    pieces = ["import torch\n", "def helper(x):\n    return torch.where(x <= 0, 0, x)\n", "relu_kernel_impl = helper\n"]
    code = extract("and then\n".join(map(fenced, pieces)), "relu_kernel_impl", ".py")
    assert isinstance(code, Code)
    assert "relu_kernel_impl = helper" in code.text


def test_a_function_under_a_condition_or_by_another_name_counts():
    assert isinstance(
        extract(fenced("if True:\n    def relu_kernel_impl(self): ...\n"), "relu_kernel_impl", ".py"), Code
    )
    assert isinstance(extract(fenced("f = 1\nrelu_kernel_impl = f\n"), "relu_kernel_impl", ".py"), Code)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("I am sorry, I cannot do that.", "no code block"),
        ("", "no code block"),
        (fenced("def relu(self): ...\n"), "none of the 1 code blocks"),
        (fenced("# relu_kernel_impl(self) goes here\n"), "none of the 1 code blocks"),
        (f"```python\n{KERNEL.rstrip()[:-9]}", "ends inside the code"),
        (fenced(NATIVE, "cpp"), "none of the 1 code blocks"),
    ],
)
def test_a_reply_without_the_function_says_what_is_missing(reply, words):
    code = extract(reply, "relu_kernel_impl", ".py")
    assert isinstance(code, NoCode)
    assert words in code.reason


@pytest.mark.parametrize(
    "reply", [fenced(NATIVE, "cpp"), f"{fenced(KERNEL)}{fenced(NATIVE, '')}", f"So:\n{NATIVE}\nDone."]
)
def test_native_code_is_the_block_that_registers(reply):
    code = extract(reply, "relu_kernel_impl", ".cpp")
    assert isinstance(code, Code)
    assert code.text == NATIVE
