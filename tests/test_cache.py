"""Files that are written whole or not at all."""

from __future__ import annotations

import os

import pytest

from opforge.cache import read_json, write_atomically


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_has_the_mode_that_the_umask_allows(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new" / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "file").stat().st_mode & 0o777 == mode


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_atomically(tmp_path / "file", "text")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "other", "\ud800")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_nests_too_deep_counts_as_broken(tmp_path):
    (tmp_path / "deep").write_text("[" * 200_000)
    assert read_json(tmp_path / "deep") is None
