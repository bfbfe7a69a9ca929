"""A model writes C++: it is compiled, the compiler's errors are told, and it is judged."""

from __future__ import annotations

import pytest

from tests.conftest import verdicts
from tests.generate.making import fenced, making
from tests.generate.servers import AnthropicServer, Say
from tests.native import RELU

__all__ = ["making"]


@pytest.mark.slow
def test_a_source_that_does_not_compile_is_mended_after_the_compilers_words(making):
    replies = [fenced(RELU.replace("const int64_t count", "const int64_t cuont"), "cpp"), fenced(RELU, "c++")]
    with AnthropicServer([Say(text) for text in replies]) as server:
        ended = making.run(server, dsl="cpp", rounds=2, timeout_s=30.0)
    assert verdicts(ended) == {"relu.default": {("passed", "")}}
    assert "STABLE_TORCH_LIBRARY" in str(server.requests[0].body["system"])
    assert "It could not be run:" in server.requests[1].text
    assert "‘count’" in server.requests[1].text or "'count'" in server.requests[1].text
    assert (making.out / "generated_kernels" / "relu" / "relu_implementation_1.cpp").read_text().strip() == RELU.strip()
