"""Launch plans with copies and fills, and those of in-place and out variants."""

from __future__ import annotations

import pytest
import torch

from tests.runtime import standin
from tests.runtime.test_launch_plans import HELPERS, enabled, gpu, libcuda, same_bits  # noqa: F401

NEG = standin.KERNELS["neg"].partition("def neg_kernel_impl")[0] + HELPERS
COPIES = {
    "contiguous": "source = self.contiguous(); target = torch.empty_like(source); launch(source, target, 2.0)",
    "clone": "target = self.clone(); launch(target, target, 2.0)",
    "conversions": "target = self.to(torch.float64).to(torch.float16).to(torch.float32)",
    "broadcast": "rows = torch.empty(2, 50); rows.copy_(self[:1]); target = rows.view(100)",
    "transposed": "rows = torch.empty(4, 25).t(); rows.copy_(self.view(25, 4)); target = rows.t().view(100)",
    "inside an allocation": "target = torch.ones(100); target[:10].copy_(target[20:30]); target[3:7].copy_(self[30:34])",
    "numbers": "target = self.new_full((100,), 2.5); target[::2].zero_(); target[1::2].fill_(-0.0); target[3:9].fill_(7)",
    "not a number": "target = torch.full((100,), float('nan'))",
    "integers and flags": (
        "whole = torch.full((50,), 2**62 + 1); whole[1:9].fill_(True); target = whole.view(torch.float32)"
    ),
    "layouts": (
        "pixels = torch.zeros_like(torch.empty(2, 2, 5, 5).to(memory_format=torch.channels_last)); "
        "pixels[0].fill_(3); target = pixels.permute(0, 2, 3, 1).reshape(100)"
    ),
    "gaps": "rows = torch.empty_strided((100,), (2,)).zero_(); rows[:9].fill_(1); target = rows.contiguous()",
    "nothing": "torch.empty(0).copy_(self[:0]); torch.zeros(0); torch.full((0,), 2); target = self.new_ones(100)",
}
PARTS = [slice(0, 100), slice(8, 208, 2), slice(3, 103)]


@pytest.mark.parametrize("body", COPIES.values(), ids=COPIES)
def test_copies_and_fills_are_replayed(enabled, monkeypatch, body):  # noqa: F811
    parts = PARTS if ".view(25" not in body else PARTS[::2]
    values = [torch.randn(300, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    made = enabled(neg=NEG + f"    {body}\n    return target\n")
    expected = [torch.neg(value[part]) for value in values for part in parts]
    assert made.learn()["neg.default"] == {"plans": len(parts), "refused": {}}
    monkeypatch.setattr("opforge.runtime.native_slots._PythonPart._run", None)
    for value in values:
        before = value.clone()
        for part in parts:
            assert same_bits(torch.neg(value[part]), expected.pop(0))
        assert torch.equal(value, before)
    assert made.counters()["neg.default"]["replayed"] == 3 * len(parts)


def test_a_copy_without_conversion_is_made_by_the_driver(enabled, gpu):  # noqa: F811
    made = enabled(neg=NEG + "    return self.clone()\n")
    torch.neg(torch.ones(100))
    torch.neg(torch.ones(200)[::2])
    made.learn()
    before = gpu.library.standin_copies()
    torch.neg(torch.ones(100))
    assert gpu.library.standin_copies() == before + 1
    torch.neg(torch.ones(200)[::2])  # a tensor with gaps is ATen's
    assert gpu.library.standin_copies() == before + 1
    assert made.counters()["neg.default"]["replayed"] == 2


def outcome(call):
    """Return what a call does: result, memory afterwards and version; or how it fails."""
    memory = torch.arange(600.0)
    try:
        written = call(memory)
    except RuntimeError as error:
        return str(error).partition("\n")[0], memory.tolist()
    return written.tolist(), written.shape, written.stride(), written._version, memory._version, memory.tolist()


WRITTEN = {
    "in place": lambda m: m.neg_(),
    "in place, a part": lambda m: m[100:200].neg_(),
    "in place, with an offset": lambda m: m[1:102].neg_(),
    "in place, rows": lambda m: m[:100].view(10, 10).neg_(),
    "in place, of another": lambda m: m[:100].add_(torch.ones(100)),
    "in place, of itself": lambda m: m[:100].add_(m[:100]),
    "in place, of its neighbour": lambda m: m[:100].add_(m[100:200]),
    "in place, with gaps": lambda m: m[:200:2].add_(m[1:201:2]),
    "out": lambda m: torch.neg(m[:100], out=torch.empty(100)),
    "out, with gaps": lambda m: torch.neg(m[:100], out=m[200:500:3]),
    "out, of another part": lambda m: torch.neg(m[:100], out=m[100:200]),
    "out, of itself": lambda m: torch.neg(m[:100], out=m[:100]),
    "out of two": lambda m: torch.add(m[:100], m[200:300], out=torch.empty(100)),
    "out of two, into one": lambda m: torch.add(m[:100], m[200:300], out=m[200:300]),
    "a number in place": lambda m: m[:100].mul_(3),
}
"""Calls that have plans."""
ANSWERED_BY_ATEN = {
    "partial overlap, in place": lambda m: m[:100].add_(m[50:150]),
    "partial overlap, out": lambda m: torch.neg(m[:100], out=m[50:150]),
    "partial overlap, out of two": lambda m: torch.add(m[:100], m[200:300], out=m[250:350]),
    "expanded": lambda m: m[:1].expand(100).neg_(),
    "expanded out": lambda m: torch.neg(m[:100], out=m[500:501].expand(100)),
    "resized out": lambda m: torch.neg(m[:100], out=torch.empty(0)),
    "out of another size": lambda m: torch.neg(m[:100], out=m[100:300].view(100, 2)[:, 0]),
    "other dtype": lambda m: torch.neg(m[:100], out=torch.empty(100, dtype=torch.float64)),
}
"""Calls whose kernels decline, or whose tensors are resized."""


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_in_place_and_out_variants_are_replayed_as_aten_does_them(enabled):  # noqa: F811
    expected = {name: outcome(call) for name, call in (WRITTEN | ANSWERED_BY_ATEN).items()}
    made = enabled("neg", "add", "mul")
    for planned in (False, True):
        for name, call in (WRITTEN | ANSWERED_BY_ATEN).items():
            assert outcome(call) == expected[name], name
        made.learn()
        replayed = sum(counts.get("replayed", 0) for counts in made.counters().values())
        assert replayed == len(WRITTEN) * planned
    assert sum(row["plans"] for row in made.learn().values()) == len(WRITTEN)


def test_a_broadcast_in_place_has_a_plan(enabled):  # noqa: F811
    add = (
        standin.KERNELS["add"]
        .replace("self.shape != other.shape or ", "")
        .replace("target = self", "other = other.expand(self.shape); target = self")
    )
    made = enabled(add=add)
    for planned in (False, True):
        values = torch.arange(100.0)
        values.add_(torch.ones(1))
        assert torch.equal(values, torch.arange(1.0, 101))
        with pytest.raises(RuntimeError, match="output with shape"):
            torch.ones(1).add_(torch.arange(100.0))
        made.learn()
        assert made.counters()["add_.Tensor"].get("replayed", 0) == planned


def test_gradients_flow_through_replays_in_place(enabled):  # noqa: F811
    made = enabled("neg")
    for planned in (False, True):
        leaf = torch.arange(100.0, requires_grad=True)
        (leaf * leaf).neg_().sum().backward()
        assert torch.equal(leaf.grad, -2 * torch.arange(100.0))
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            leaf.neg_()
        made.learn()
        assert made.counters()["neg_.default"]["served"] == 1 + planned
    assert made.counters()["neg_.default"]["replayed"] == 1


def test_saved_tensors_that_a_replay_has_written_are_noticed(enabled):  # noqa: F811
    made = enabled("neg")
    torch.arange(100.0).neg_()
    made.learn()
    leaf = torch.arange(100.0, requires_grad=True)
    value = leaf.exp()
    with torch.no_grad():
        value.detach().neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


def test_two_storages_of_the_same_memory_are_not_replayed(enabled):  # noqa: F811
    """The geometry says which storage tensors share, and not that two storages are of the same memory."""
    made = enabled("add")
    apart, shared = torch.arange(100.0).numpy(), torch.arange(150.0).numpy()
    torch.from_numpy(apart).add_(torch.from_numpy(torch.ones(100).numpy()))
    made.learn()
    torch.from_numpy(apart).add_(torch.from_numpy(torch.ones(100).numpy()))
    assert made.counters()["add_.Tensor"]["replayed"] == 1
    torch.from_numpy(shared[:100]).add_(torch.from_numpy(shared[48:148]))
    assert made.counters()["add_.Tensor"]["replayed"] == 1
    assert made.counters()["add_.Tensor"]["aten"] == {
        "declined: NotImplementedError: a read and a written tensor share memory": 1
    }


def test_a_refused_launch_before_anything_is_written_is_answered_by_python(enabled, gpu):  # noqa: F811
    made = enabled("neg")
    torch.arange(100.0).neg_()
    made.learn()
    gpu.library.standin_fail_with(701)
    assert torch.equal(torch.arange(100.0).neg_(), -torch.arange(100.0))
    assert made.counters()["neg_.default"]["replayed"] == 0
    assert made.counters()["neg_.default"]["served"] == 2


def test_inside_a_replay_copies_and_fills_are_atens_own(enabled):  # noqa: F811
    """As inside the kernel, even if kernels for these operators are enabled."""
    ruin = "import torch\ndef fill__kernel_impl(self, value):\n    return self.zero_().add_(MARK)\n"
    made = enabled(neg=NEG + "    return torch.full_like(self, 2.0)\n", fill_=ruin.replace("MARK", "1000"))
    assert "fill_.Scalar" in made.operators
    assert float(torch.zeros(2).fill_(3.0)[0]) == 1000
    for planned in (False, True):
        assert torch.neg(torch.zeros(100)).tolist() == [2.0] * 100
        made.learn()
        assert made.counters()["neg.default"].get("replayed", 0) == planned
    assert made.counters()["fill_.Scalar"]["served"] == 1
    assert float(torch.zeros(2).fill_(3.0)[0]) == 1000


def test_calls_with_more_tensors_than_are_compared_have_no_plan(enabled):  # noqa: F811
    """A geometry does not say of the seventeenth tensor whether it shares memory with the eighteenth."""
    cat = NEG.replace("def neg_kernel_impl(self):", "def cat_kernel_impl(tensors, dim=0):") + (
        "    target = torch.zeros(8 * len(tensors)); launch(tensors[-2], target[:8], 1.0)\n"
        "    launch(tensors[-1], target[8:16], 1.0); return target\n"
    )
    made = enabled(cat=cat)
    tensors = [torch.full((8,), float(i)) for i in range(18)]
    for count, plans in ((16, 1), (18, 2)):  # the second one is for sixteen tensors that are apart
        torch.cat([*tensors[: count - 2], tensors[0], tensors[0]])
        assert made.learn()["cat.default"]["plans"] == plans
        result = torch.cat(tensors[:count])  # the last two are apart
        assert result[:16].tolist() == [count - 2] * 8 + [count - 1] * 8
    assert "more than 16 tensors" in " ".join(made.learn()["cat.default"]["refused"])
    assert made.counters()["cat.default"].get("replayed", 0) == 0
