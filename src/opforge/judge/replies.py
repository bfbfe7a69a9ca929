"""Parse what a worker replies about its results; everything is checked before it is trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opforge.judge.kernel_worker import WorkerConfig

MALFORMED_REPLY = "the worker's reply is malformed"


def parse_replies(reply: Any, count: int) -> list[dict[str, Any]] | None:
    """Return the worker's answers to the cases of a batch, or None if it sent something else."""
    replies = reply.get("results") if isinstance(reply, dict) else None
    if isinstance(replies, list) and len(replies) == count and all(isinstance(r, dict) for r in replies):
        return replies
    return None


def results_end(replies: list[dict[str, Any]], config: WorkerConfig) -> int:
    """Return where the results in the replies end, within the arena."""
    rows = (row for row in _result_rows(replies) if isinstance(row[0], int) and isinstance(row[1], int))
    ends: list[int] = [config.input_bytes, *(row[0] + row[1] for row in rows)]
    return min(max(ends), config.arena_bytes)


def without_locations(tree: Any) -> Any:
    """Return a reply without the locations of its tensors; the rest is the same in every draw."""
    if isinstance(tree, dict):
        return {k: _without_location(v, k) for k, v in tree.items()}
    return [without_locations(v) for v in tree] if isinstance(tree, list) else tree


def _without_location(value: Any, key: str) -> Any:
    if key == "T" and isinstance(value, list):
        return value[1:]
    if key == "inputs" and isinstance(value, list):
        return [row[1:] if isinstance(row, list) else row for row in value]
    return without_locations(value)


def _result_rows(tree: Any) -> Iterator[list[Any]]:
    """Yield the rows of all tensors in the replies; the replies may hold anything."""
    if isinstance(tree, dict):
        inputs = tree.get("inputs")
        for row in [tree.get("T"), *(inputs if isinstance(inputs, list) else [])]:
            if isinstance(row, list) and len(row) > 1:
                yield row
        yield from _result_rows(tree.get("returned"))
    elif isinstance(tree, list):
        for value in tree:
            yield from _result_rows(value)
