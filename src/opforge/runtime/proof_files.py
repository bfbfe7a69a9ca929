"""Read and check proof files, which may be incomplete or from anyone. Needs no torch.

Outside packages, only proofs that this installation has signed are trusted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import signing, untrusted_files

PROOF_FORMAT = 5
"""Version that is written now. Older files hold no extents."""
_MAX_FORMAT_VERSION = 1_000_000


def read_proof_file(path: Path, *, packed: bool = False) -> dict[str, Any] | str | None:
    """Return a proof with all fields checked; else why it is unusable, or None if there is none.

    A ``packed`` proof belongs to a package, which its maker signs as a whole.
    """
    try:
        proof = json.loads(untrusted_files.read(path))
        version = _number(proof["opforge_proof"], _MAX_FORMAT_VERSION)
        if version != PROOF_FORMAT:
            return f"{path} is of another format ({version}); judge it again with `opforge run`."
        checked = _validated_fields(proof)
        trusted = packed or signing.verify_mac(signing.load_key(), checked, proof.get("signature"))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{path} is broken; judge the kernel again with `opforge run`."
    unsigned = f"{path} was not signed by this installation of opforge; judge it again with `opforge run`."
    return checked if trusted else unsigned


def sign_proof(key: bytes, proof: dict[str, Any]) -> dict[str, Any]:
    """Return a proof with this installation's signature of all fields that are read."""
    return {**proof, "signature": signing.mac(key, _validated_fields(proof))}


def failure_summary(failed: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how many cases of some operators failed, with an example; empty if none did."""
    rows = [row for by_signature in failed.values() for row in by_signature.values()]
    cases = [item for row in rows for item in row["cases"].items()]
    count = len(cases) + sum(sum(row["more"].values()) for row in rows)
    example = f", for example {cases[0][0]}: {cases[0][1]}" if cases else ""
    return f"{count} case{'' if count == 1 else 's'} failed{example}" if count else ""


def _validated_fields(proof: dict[str, Any]) -> dict[str, Any]:
    """Return a proof reduced to the known fields.

    Raises if a field is missing or has a wrong type or value.
    """
    return {
        "opforge_proof": PROOF_FORMAT,
        **{name: _text(proof[name]) for name in ("digest", "torch", "device")},
        "suites": [_text(suite) for suite in _list(proof["suites"])],
        "operators": {
            _text(op): {_text(signature): _row(row) for signature, row in by_signature.items()}
            for op, by_signature in proof["operators"].items()
        },
        "failed": {
            _text(op): {_text(signature): _failed(row) for signature, row in by_signature.items()}
            for op, by_signature in proof.get("failed", {}).items()
        },
    }


def _row(row: dict[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {
        "rank": _range(row["rank"]),
        "numel": _range(row["numel"]),
        "extents": [[_range(bounds) for bounds in _list(ranges)] for ranges in _list(row["extents"])],
        "layouts": [_text(word) for word in _list(row["layouts"])],
    }
    if "arguments" in row:
        checked["arguments"] = {_text(name): _value_ranges(words) for name, words in row["arguments"].items()}
    if "native" in row:  # how cases ran behind native slots, if they were judged there
        checked["native"] = {
            _text(way): {"cases": _number(part["cases"]), "numel": _range(part["numel"])}
            for way, part in row["native"].items()
        }
    timed = [[*_range(part[:2]), _flag(*part[2:])] for part in map(_list, _list(row.get("timed", [])))]
    return {**checked, "timed": timed} if timed else checked


def _value_ranges(words: dict[str, Any]) -> dict[str, list[float]]:
    ranges = {_text(word): _list(bounds) for word, bounds in words.items()}
    for bounds in ranges.values():
        if bounds and not (
            len(bounds) == 2 and all(type(n) in (int, float) for n in bounds) and bounds[0] <= bounds[1]
        ):
            raise ValueError(bounds)
    return ranges


def _failed(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "cases": {_text(case): _text(verdict) for case, verdict in row["cases"].items()},
        "more": {_text(verdict): _number(count) for verdict, count in row["more"].items()},
    }


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(value)
    return value


def _range(value: Any) -> list[int]:
    low, high = map(_number, _list(value))
    if low > high:
        raise ValueError(value)
    return [low, high]


def _number(value: Any, maximum: int | None = None) -> int:
    """Return a non-negative integer unchanged. True is not an integer here."""
    if type(value) is not int or value < 0 or (maximum is not None and value > maximum):
        raise ValueError(value)
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def _text(value: Any) -> str:
    """Return a printable text unchanged."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(value)
    return value
