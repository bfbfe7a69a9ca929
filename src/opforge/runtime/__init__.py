"""Kernels in ATen's place in a running process, inside what is proven of them, with ATen's own behind them.

Needs torch and nothing else, and imports nothing of opforge: `opforge pack` takes these files along as they are.
"""

RUNTIME = 4
"""Its number: packages of one number share the runtime in a process."""
