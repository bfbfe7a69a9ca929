"""Suspicious patterns in a kernel's source. Hints are reported and never decide the verdict."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from opforge.kernels.native.sources import without_comments

_IMPORTS = {
    "ctypes": "calls native code through ctypes",
    "cffi": "calls native code through cffi",
    "inspect": "looks at frames or source with inspect",
    "gc": "walks objects with gc",
    "threading": "starts threads",
    "concurrent.futures": "starts threads or processes",
    "multiprocessing": "starts processes",
    "subprocess": "starts processes",
    "socket": "opens sockets",
    "urllib": "opens connections",
    "requests": "opens connections",
    "httpx": "opens connections",
    "signal": "handles signals",
    "opforge": "imports opforge",
    "pickle": "reads or writes pickles",
    "time": "reads clocks",
}
_ATTRIBUTES = {
    "torch.cuda.Stream": "makes streams of its own",
    "torch.cuda.stream": "switches streams",
    "torch.cuda.CUDAGraph": "captures graphs",
    "torch.cuda.graph": "captures graphs",
    "torch.cuda.Event": "makes events",
    "torch.library.Library": "registers operators",
    "sys._getframe": "walks frames",
    "sys.settrace": "traces calls",
    "sys.setprofile": "traces calls",
    "sys.modules": "looks at loaded modules",
    "os.environ": "reads the environment",
    "os.getenv": "reads the environment",
    "os.fork": "forks",
    "os._exit": "ends its process",
    "sys.exit": "ends its process",
}
_NAMES = {"exec": "runs text as code", "eval": "runs text as code", "__import__": "imports by name at run time"}

_IN_NATIVE = {
    r"TORCH_LIBRARY_IMPL\s*\(\s*aten\b": "registers implementations of ATen's own operators",
    r"\b(?:cblas_|[sdcz]gemm_|mkl_|cublas[A-Z]|cublasLt|cudnn[A-Z]|dnnl[_:])": "calls a vendor's library",
    r"\b(?:dlopen|dlsym|dlmopen)\s*\(": "loads other libraries",
    r"\b(?:fork|vfork|execve|execvp|execl|posix_spawn|system|popen)\s*\(": "starts processes",
    r"\bstd::(?:thread|jthread|async)\b|\bpthread_create\s*\(": "starts threads",
    r"\bsocket\s*\(": "opens sockets",
    r"\b(?:secure_)?getenv\s*\(": "reads the environment",
    r"\bmprotect\s*\(|\bptrace\s*\(": "changes its process's memory",
    r"\b(?:_exit|exit|quick_exit|abort)\s*\(": "ends its process",
    r"\bstd::chrono::|\bclock_gettime\s*\(|\b__rdtsc\s*\(": "reads clocks",
    r"\bcudaStreamCreate|\bcudaGraph": "makes streams or graphs of its own",
    r"\b(?:asm|__asm__)\b": "has assembly in it",
}


def native_hints(source: str) -> list[str]:
    """Return hints on a kernel's C++ or CUDA source, each with its first line number."""
    text = without_comments(source)
    first = {what: found.start() for pattern, what in _IN_NATIVE.items() if (found := re.search(pattern, text))}
    return [
        f"{what} (line {text.count(chr(10), 0, at) + 1})"
        for what, at in sorted(first.items(), key=lambda item: item[1])
    ]


def hints(source: str) -> list[str]:
    """Return hints on a kernel's Python source, each with its first line number."""
    first: dict[str, int] = {}
    try:
        for what, line in _found(ast.parse(source)):
            first[what] = min(line, first.get(what, line))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [f"{what} (line {line})" for what, line in sorted(first.items(), key=lambda item: item[1])]


def _found(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((what, node.lineno) for n in names for what in _of_module(n.name))
            case ast.ImportFrom(module=str(module)):
                yield from ((what, node.lineno) for what in _of_module(module))
            case ast.Attribute():
                if (what := _ATTRIBUTES.get(ast.unparse(node))) is not None:
                    yield what, node.lineno
            case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
                yield _NAMES[name], node.lineno
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                yield from ((f"assigns to {ast.unparse(t)}", node.lineno) for t in targets if _foreign(t))
            case ast.ExceptHandler(type=None | ast.Name(id="Exception" | "BaseException")):
                yield "catches every exception", node.lineno


def _of_module(name: str) -> Iterator[str]:
    for known, what in _IMPORTS.items():
        if name == known or name.startswith(known + "."):
            yield what


def _foreign(target: ast.expr) -> bool:
    """Whether an assignment target is an attribute of torch, time or the like: a patch."""
    return isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in {
        "torch", "time", "numpy", "np", "triton", "builtins", "sys", "os", "opforge",
    }  # fmt: skip
