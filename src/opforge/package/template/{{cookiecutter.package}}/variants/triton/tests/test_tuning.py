"""What is tuned: which configs are left for which size."""

import pytest

from {{ cookiecutter.package }}.kernels.rms_norm import CONFIGS, prune


@pytest.mark.parametrize("size", [1, 5, 64, 65, 256, 257, 1000, 1025, 5000, 100_000])
def test_a_few_configs_are_left_for_every_size(size):
    left = prune(CONFIGS, {"size": size})
    assert 1 <= len(left) < len(CONFIGS) / 2
    for config in left:
        rows, block = config.kwargs["ROWS"], config.kwargs["BLOCK"]
        assert rows == 1 or size <= block
        assert rows * block >= 4 * 32 * config.num_warps


def test_a_block_is_not_far_longer_than_its_row():
    assert {config.kwargs["BLOCK"] for config in prune(CONFIGS, {"size": 100})} == {256}
    assert {config.kwargs["BLOCK"] for config in prune(CONFIGS, {"size": 1025})} == {1024, 2048, 4096}
