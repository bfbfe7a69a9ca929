"""Signatures: proofs that somebody else has written are not believed, and a package says who has signed it."""

from __future__ import annotations

import json
import multiprocessing
import stat

import pytest
import torch

import opforge
from opforge.kernels.proof import proof_path
from opforge.runtime import signing
from opforge.runtime.dispatch import KernelWarning
from opforge.runtime.proof_files import read_proof_file, sign_proof
from tests.install.proving import RELU, marked, prove, with_extents
from tests.install.test_enable import ANY

VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
]
"""The first two of RFC 8032: seed, public key, message, signature."""


@pytest.mark.parametrize(("seed", "public", "message", "signature"), VECTORS)
def test_signatures_are_those_of_the_standard(seed, public, message, signature):
    seed, public, message, signature = map(bytes.fromhex, (seed, public, message, signature))
    assert signing._public(seed) == public
    assert signing._sign(seed, message) == signature
    assert signing._verifies(public, message, signature)
    assert not signing._verifies(public, message + b"!", signature)
    for number in (0, 31, 32, 63):
        changed = bytearray(signature)
        changed[number] ^= 1
        assert not signing._verifies(public, message, bytes(changed))
    order = (int.from_bytes(signature[32:], "little") + signing._ORDER).to_bytes(32, "little")
    assert not signing._verifies(public, message, signature[:32] + order), "another signature made of this one"


def test_who_has_signed_is_known_and_what_was_changed_is_not_signed():
    signature = signing.sign(b"k" * 32, {"a": [1]})
    assert signing.signer_of({"a": [1]}, signature) == signature["signer"]
    assert signing.signer_of({"a": [2]}, signature) is None
    assert signing.signer_of({"a": [1]}, {**signature, "public": "00"}) is None
    assert signing.signer_of({"a": [1]}, {}) is None
    assert signing.sign(b"l" * 32, 1)["signer"] != signature["signer"]


def make(path, start):
    import os

    os.environ[signing.KEY_VARIABLE] = str(path)
    start.wait()
    key = signing.load_or_create_key()
    os._exit(0 if key == path.read_bytes() else 1)


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "key"
    context = multiprocessing.get_context("fork")
    start = context.Event()
    makers = [context.Process(target=make, args=(path, start)) for _ in range(8)]
    for maker in makers:
        maker.start()
    start.set()
    for maker in makers:
        maker.join()
    assert [maker.exitcode for maker in makers] == [0] * 8
    assert [found.name for found in path.parent.iterdir()] == ["key"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_no_key_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(signing.KEY_VARIABLE, str(tmp_path / "key"))
    (tmp_path / "key").write_text("short")
    with pytest.raises(OSError, match="it is not a key: it holds 5 bytes"):
        signing.load_or_create_key()


@pytest.fixture
def root(kernels):
    """Return a folder with a kernel that is proven."""
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": ANY}})
    return root


def refused(root, words):
    with pytest.warns(KernelWarning, match=words):
        made = opforge.enable(root, device="cpu")
    assert made.operators == []
    assert not marked(torch.relu(torch.ones(3)))
    made.disable()


def change(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


WIDER = with_extents({"relu.default": {"float32": {**ANY, "numel": [0, 10**12]}}})


@pytest.mark.parametrize(
    "changes", [{"operators": WIDER}, {"signature": "0" * 64}, {"signature": None}, {"signature": 3}]
)
def test_a_proof_that_was_edited_is_not_believed(root, changes):
    path = proof_path(root / "relu" / "relu_implementation_1.py")
    change(path, **changes)
    assert "was not signed by this installation" in read_proof_file(path)
    refused(root, "was not signed by this installation of opforge")


def test_a_proof_of_another_installation_is_not_believed(root, tmp_path, monkeypatch):
    monkeypatch.setenv(signing.KEY_VARIABLE, str(tmp_path / "another"))
    refused(root, "was not signed by this installation of opforge")
    signing.load_or_create_key()
    refused(root, "was not signed by this installation of opforge")


def test_what_is_signed_is_all_that_is_read(root):
    """What is added to a proof is not read; what is read cannot be changed."""
    path = proof_path(root / "relu" / "relu_implementation_1.py")
    before = read_proof_file(path)
    change(path, more="words", kernel="another")
    assert read_proof_file(path) == before
    for name in before:
        whole = sign_proof(b"k" * 32, {**before, name: before[name]})
        assert whole["signature"] != json.loads(path.read_text())["signature"]
