"""Suspicious patterns in a kernel's source. Hints are reported and never decide the verdict."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from opforge.kernels.native.sources import without_comments

_IMPORT_HINTS = {
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
_ATTRIBUTE_HINTS = {
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
_CALL_HINTS = {"exec": "runs text as code", "eval": "runs text as code", "__import__": "imports by name at run time"}

_NATIVE_HINTS = {
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
    first_offsets = {
        hint: match.start() for pattern, hint in _NATIVE_HINTS.items() if (match := re.search(pattern, text))
    }
    return [
        f"{hint} (line {text.count(chr(10), 0, offset) + 1})"
        for hint, offset in sorted(first_offsets.items(), key=lambda item: item[1])
    ]


def python_hints(source: str) -> list[str]:
    """Return hints on a kernel's Python source, each with its first line number."""
    first_lines: dict[str, int] = {}
    try:
        for hint, line in _hints_with_lines(ast.parse(source)):
            first_lines[hint] = min(line, first_lines.get(hint, line))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [f"{hint} (line {line})" for hint, line in sorted(first_lines.items(), key=lambda item: item[1])]


def _hints_with_lines(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((hint, node.lineno) for n in names for hint in _module_hints(n.name))
            case ast.ImportFrom(module=str(module)):
                yield from ((hint, node.lineno) for hint in _module_hints(module))
            case ast.Attribute():
                if (hint := _ATTRIBUTE_HINTS.get(ast.unparse(node))) is not None:
                    yield hint, node.lineno
            case ast.Call(func=ast.Name(id=name)) if name in _CALL_HINTS:
                yield _CALL_HINTS[name], node.lineno
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                yield from ((f"assigns to {ast.unparse(t)}", node.lineno) for t in targets if _is_patch(t))
            case ast.ExceptHandler(type=None | ast.Name(id="Exception" | "BaseException")):
                yield "catches every exception", node.lineno


def _module_hints(name: str) -> Iterator[str]:
    for module, hint in _IMPORT_HINTS.items():
        if name == module or name.startswith(module + "."):
            yield hint


def _is_patch(target: ast.expr) -> bool:
    """Whether an assignment target is an attribute of torch, time or the like: a patch."""
    return isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in {
        "torch", "time", "numpy", "np", "triton", "builtins", "sys", "os", "opforge",
    }  # fmt: skip
