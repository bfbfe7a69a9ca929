"""Signatures of proofs and packages. Needs no torch.

Proofs are signed with this installation's key, which no confined kernel can read. Anyone can verify
the signature of a package.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY_VARIABLE = "OPFORGE_KEY"
_KEY_BYTES = 32


def key_file() -> Path:
    """Return the path of this installation's key: ``$OPFORGE_KEY``, else in the data folder."""
    if configured := os.environ.get(KEY_VARIABLE):
        return Path(configured)
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "opforge" / "key"


def load_key() -> bytes | None:
    """Return this installation's key; None if it has none yet.

    Raises OSError if the key cannot be read or is invalid.
    """
    path = key_file()
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(key) != _KEY_BYTES:
        raise OSError(
            0, f"it is not a key: it holds {len(key)} bytes, and a key has {_KEY_BYTES}; delete it", str(path)
        )
    return key


def load_or_create_key() -> bytes:
    """Return this installation's key. Creates it if there is none."""
    path = key_file()
    while (key := load_key()) is None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            os.link(draft, path)  # atomic, and never over the key of a faster process
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return key


def canonical_bytes(value: Any) -> bytes:
    """Return the bytes to sign for a JSON value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def mac(key: bytes, value: Any) -> str:
    """Return this installation's own signature of a value. Only it can verify that."""
    return hmac.new(_derive_key(key, b"proofs"), canonical_bytes(value), hashlib.sha256).hexdigest()


def verify_mac(key: bytes | None, value: Any, signature: Any) -> bool:
    """Whether a signature of a value is this installation's own."""
    return key is not None and isinstance(signature, str) and hmac.compare_digest(mac(key, value), signature)


def sign(key: bytes, value: Any) -> dict[str, str]:
    """Return a signature that anyone can verify, with the public key and the signer's name."""
    seed = _derive_key(key, b"packages")
    public = _public(seed)
    return {
        "signer": signer_name(public.hex()),
        "public": public.hex(),
        "signature": _sign(seed, canonical_bytes(value)).hex(),
    }


def signer_of(value: Any, signature: Mapping[str, Any]) -> str | None:
    """Return the name of a value's signer; None if the signature is invalid."""
    try:
        public, signed_by = bytes.fromhex(signature["public"]), bytes.fromhex(signature["signature"])
    except (KeyError, TypeError, ValueError):
        return None
    return signer_name(public.hex()) if _verifies(public, canonical_bytes(value), signed_by) else None


def signer_name(public_key: str) -> str:
    """Return a signer's name: the beginning of the digest of the public key."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:16]


def _derive_key(key: bytes, purpose: bytes) -> bytes:
    return hmac.new(key, purpose, hashlib.sha256).digest()


# ── Ed25519 (RFC 8032), for few signatures. Not constant-time: only the owner of the key signs. ──

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_SQRT_MINUS_ONE = pow(2, (_P - 1) // 4, _P)
"""A square root of -1."""

_Point = tuple[int, int, int, int]
"""X, Y, Z, T with x = X/Z, y = Y/Z and x·y = T/Z."""


def _recover_x(y: int, odd: int) -> int | None:
    """Return the x of a curve point, odd or even as requested; None if there is none."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * _SQRT_MINUS_ONE % _P
    if x * x % _P != square or (x == 0 and odd):
        return None
    return x if x % 2 == odd else _P - x


def _point_from_y(y: int, odd: int) -> _Point | None:
    x = _recover_x(y, odd) if y < _P else None
    return None if x is None else (x, y, 1, x * y % _P)


def _add(one: _Point, other: _Point) -> _Point:
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c = 2 * one[3] * other[3] * _D % _P
    d = 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(number: int, point: _Point) -> _Point:
    total: _Point = (0, 1, 1, 0)
    while number:
        if number & 1:
            total = _add(total, point)
        point = _add(point, point)
        number >>= 1
    return total


def _base_point() -> _Point:
    point = _point_from_y(4 * pow(5, -1, _P) % _P, 0)
    if point is None:
        raise AssertionError("the base point lies on the curve")
    return point


_BASE_POINT = _base_point()


def _packed(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _unpacked(data: bytes) -> _Point | None:
    number = int.from_bytes(data, "little")
    return _point_from_y(number & (2**255 - 1), number >> 255) if len(data) == 32 else None


def _secret_scalar(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | 1 << 254
    return scalar, digest[32:]


def _hash_to_scalar(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


def _public(seed: bytes) -> bytes:
    return _packed(_times(_secret_scalar(seed)[0], _BASE_POINT))


def _sign(seed: bytes, message: bytes) -> bytes:
    scalar, prefix = _secret_scalar(seed)
    public = _packed(_times(scalar, _BASE_POINT))
    nonce = _hash_to_scalar(prefix, message)
    commitment = _packed(_times(nonce, _BASE_POINT))
    answer = (nonce + _hash_to_scalar(commitment, public, message) * scalar) % _ORDER
    return commitment + answer.to_bytes(32, "little")


def _verifies(public: bytes, message: bytes, signature: bytes) -> bool:
    key, commitment = _unpacked(public), _unpacked(signature[:32])
    answer = int.from_bytes(signature[32:], "little")
    if len(signature) != 64 or key is None or commitment is None or answer >= _ORDER:
        return False
    expected = _add(commitment, _times(_hash_to_scalar(signature[:32], public, message), key))
    return _packed(_times(answer, _BASE_POINT)) == _packed(expected)
