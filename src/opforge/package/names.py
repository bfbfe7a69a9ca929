"""Allowed names of operators and arguments, which appear in Python, C++ and ``torch.ops``."""

from __future__ import annotations

import keyword
import re

from opforge.errors import OpforgeError

_CPP_KEYWORDS = """
    alignas alignof and asm auto bitand bitor bool break case catch char class compl concept const constexpr continue
    decltype default delete do double else enum explicit export extern false float for friend goto if inline int long
    mutable namespace new noexcept not nullptr operator or private protected public register requires return short
    signed sizeof static struct switch template this throw true try typedef typeid typename union unsigned using
    virtual void volatile while xor main std
"""
_RESERVED_OPERATOR_NAMES = """
    torch triton tl ops kernels namespace checks batching launch package name blocks on_device wrap_triton to_front
    apart x support conftest common cuda_common library pytest tensors expected called choices close exact layouts
    check_fake check_compiled sum zip map range enumerate tuple
"""
"""Names with another meaning in a package's files or in ``torch.ops``."""
_RESERVED_ARGUMENT_NAMES = """
    torch triton tl self ops checks ctx grad info in_dims inputs output out result results count inside at dense place x
    batched to_x to_each extra wide blocks on_device wrap_triton to_front apart float int sum list range sorted math
    order found every mapped moved
"""
"""Names with another meaning in an operator's files."""
_MAX_NAME_LENGTH = 64


def check_operator_name(name: str) -> None:
    """Reject an invalid operator name."""
    _check_name("operator", name, _RESERVED_OPERATOR_NAMES)


def check_argument_name(name: str, op: str, label: str = "optional argument") -> None:
    """Reject an invalid name of an operator's argument."""
    _check_name(label, name, _RESERVED_ARGUMENT_NAMES)
    if name == op or re.fullmatch(r"(y|grad|out)_?\d+|grad_?|out_?|y_", name):
        raise OpforgeError(f"{label} {name!r} is a name that the operator's files use themselves; choose another")


def _check_name(label: str, name: str, taken: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise OpforgeError(
            f"{label} {name!r} cannot be used: it must begin with a small letter and hold small letters, digits and "
            "underscores only"
        )
    if len(name) > _MAX_NAME_LENGTH:
        raise OpforgeError(
            f"{label} {name[:20] + '…'!r} is too long: it has {len(name)} characters and may have {_MAX_NAME_LENGTH}; "
            "choose a shorter name"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in _CPP_KEYWORDS.split():
        raise OpforgeError(f"{label} {name!r} is a word of Python or C++; choose another name")
    if name in taken.split():
        raise OpforgeError(f"{label} {name!r} is a name that means something else in a package; choose another")
