"""PyTorch's operator-input logs, with their oddities, both ways."""

from __future__ import annotations

import json

import torch

from opforge.cases.case_files import open_blob
from opforge.cases.text import parse_arguments
from opforge.traces.formats import read_calls, write_blob
from opforge.traces.log import from_log, is_log, to_log
from opforge.traces.trace_file import CallCount, Trace, TracedCall
from tests.command import opforge

LOG = """\
Operator: aten._softmax_backward_data.default
cnt: 6, ((T([3, 5, 20], f16), T([3, 5, 20], f16), -1, f16), {})
Operator: aten._to_copy.default
cnt: 7, ((T([6, 2], i32),), {'dtype': i64, 'device': 'cuda'})
Operator: aten.add.Tensor
cnt: 12, ((T([2, 10, 30], f16), 2.5), {})
cnt: 2, ((T([], f16), T([], f16)), {})
cnt: 2, ((T([], f16), T([], f16)), {})
Operator: aten.cat.default
cnt: 4, (([T([2, 9], f16), T([2, 5], f16, stride=(1, 2))], 1), {})
Operator: aten.embedding.default
cnt: 1, ((T([321, 16], f16), T([2, 11], i64), 0), {})
Operator: aten.new_ones.default
cnt: 8, ((T([1, 8], f16), [1, 4]), {'dtype': f16, 'layout': torch.strided, 'device': device('cuda:0'), 'pin_memory': False})
Operator: aten.pow.Tensor_Scalar
cnt: 1, ((T([3], f16), inf), {})
Operator: aten.sum.SymInt
cnt: 9, ((T([40, 7], f16), [0], True), {})
Operator: aten.an_old_operator.default
cnt: 3, ((T([3], f32),), {})
cnt: 1, ((T([4], f32),), {})
Operator: aten.gelu.default
cnt: 1, ((T([3], f32), T([3], f32)), {})
cnt: 1, ((T([3], f32),), {'speed': 1})
Operator: aten.index_copy.default
cnt: 1, ((T([5], f32), 0, T([2], i64), T([2], f32)), {})
Operator: aten.mm.default
cnt: 1, ((T([3, 3], f32),), {})
cnt: 1, ((ST([3, 3], f32, torch.sparse_coo, True, 2), T([3, 3], f32)), {})
cnt: x, ((T([3, 3], f32),), {})
Operator: torchvision.nms.default
cnt: 1, ((T([3, 4], f32), T([3], f32), 0.5), {})
"""


def test_a_log_is_read_and_what_is_of_no_use_is_counted_with_its_reason():
    read = from_log(LOG.splitlines(), "a model")
    calls = {c.op: c for c in read.calls}
    assert set(calls) == {
        "_softmax_backward_data.default", "_to_copy.default", "add.Tensor", "cat.default", "embedding.default",
        "new_ones.default", "pow.Tensor_Scalar", "sum.dim_IntList",
    }  # fmt: skip
    assert calls["sum.dim_IntList"].count == 9
    assert "high=321" in calls["embedding.default"].args
    assert "'device': device('cuda')" in calls["_to_copy.default"].args
    assert sum(c.count for c in read.calls if c.op == "add.Tensor") == 12 + 4
    reasons = "\n".join(read.losses)
    for words in (
        "aten.an_old_operator.default: no such operator in torch",
        "2 positional arguments, and it takes 1",
        "no argument 'speed'",
        "aten.index_copy.default: needs the exact contents",
        "'mat2' is missing",
        "not read: a sparse tensor",
        "expected 'Operator: NAME' or 'cnt: N, (…)'",
        "torchvision.nms.default: not an operator of ATen",
    ):
        assert words in reasons
    lines = sum(1 for line in LOG.splitlines() if line.startswith("cnt"))
    assert len(read.calls) + 1 + sum(read.losses.values()) == lines  # one line stands there twice


BACKWARDS = """\
Operator: aten.unsqueeze_.default
cnt: 4, ((T([2, 3], f32), 1), {})
Operator: aten.upsample_nearest2d_backward.vec
cnt: 1, ((T([2, 3, 8, 6], f32), None, [2, 3, 4, 3], [2.0, 2.5]), {})
Operator: aten.upsample_bilinear2d_backward.vec
cnt: 1, ((T([2, 3, 8, 6], f32), [8, 6], [2, 3, 4, 3], True, None), {})
cnt: 1, ((T([2, 3, 8, 6], f32), [8, 6], [2, 3, 4, 3], True, [2.0]), {})
Operator: aten.max_pool2d_with_indices_backward.default
cnt: 3, ((T([1, 4, 4, 3], f16), T([1, 4, 7, 6], f16), [3], [2], [1, 1], [1, 1], False, T([1, 4, 4, 3], i64, stride=(48, 1, 12, 4))), {})
cnt: 1, ((T([64, 64, 56, 56], f16), T([64, 64, 112, 112], f16), [3, 3], [2, 2], [1, 1], [1, 1], False, T([64, 64, 56, 56], i64)), {})
"""


def test_backwards_of_old_torch_are_calls_of_today():
    read = from_log(BACKWARDS.splitlines(), "a model")
    calls = {c.op: c for c in read.calls}
    assert calls["unsqueeze_.default"].args == "((T([2, 3], f32), 1), {})"
    nearest = calls["upsample_nearest2d_backward.default"].args
    assert nearest == "((T([2, 3, 8, 6], f32), [8, 6], [2, 3, 4, 3], 2.0, 2.5), {})"
    bilinear = calls["upsample_bilinear2d_backward.default"].args
    assert bilinear == "((T([2, 3, 8, 6], f32), [8, 6], [2, 3, 4, 3], True, None, None), {})"
    assert sorted(reason.partition(": ")[2] for reason in read.losses) == [
        "its sizes or scale factors are not those of 2 dimensions",
        "needs the exact contents of a tensor of more than 1048576 bytes",
    ]


def test_indices_of_a_pooling_are_places_in_its_windows(tmp_path):
    (tmp_path / "log.txt").write_text(BACKWARDS)
    (call,) = (c for c in read_calls(tmp_path / "log.txt").calls if c.op.startswith("max_pool2d"))
    write_blob(tmp_path / "log.txt", tmp_path / "blob.safetensors")
    spec = parse_arguments(call.args)[0][7]
    stored = bytes(open_blob(tmp_path / "blob.safetensors")[spec.at : spec.at + spec.storage_nbytes])
    assert stored == call.stored[: spec.storage_nbytes]
    indices = torch.frombuffer(bytearray(stored), dtype=torch.int64).as_strided(spec.shape, spec.strides)
    rows, columns = indices // 6, indices % 6
    first_row = torch.arange(4).view(-1, 1) * 2 - 1
    first_column = torch.arange(3) * 2 - 1
    assert ((rows >= first_row.clamp(0)) & (rows < (first_row + 3).clamp(max=7))).all()
    assert ((columns >= first_column.clamp(0)) & (columns < (first_column + 3).clamp(max=6))).all()
    assert len(indices.unique()) > 20


def test_a_trace_goes_out_as_pytorch_writes_logs_and_comes_back():
    call = TracedCall(
        "index_select.default",
        "((T([9, 4], f32, stride=(1, 9), offset=3), 0, T([5], i64, low=0, high=9, at=64)), {})",
        7,
        seen=(CallCount("model", "forward", 7),),
    )
    moved = TracedCall("_to_copy.default", "((T([2], f32),), {'device': device('cuda:0'), 'dtype': bf16})", 2)
    custom = TracedCall("mine::twice.default", "((T([2], f32),), {})", 1)
    lines = list(to_log(Trace([call, moved, custom])))
    assert lines == [
        "Operator: aten._to_copy.default",
        "cnt: 2, ((T([2], f32),), {'device': 'cuda', 'dtype': bf16})",
        "Operator: aten.index_select.default",
        "cnt: 7, ((T([9, 4], f32, stride=(1, 9)), 0, T([5], i64)), {})",
        "Operator: mine.twice.default",
        "cnt: 1, ((T([2], f32),), {})",
    ]
    back = from_log(lines, "model")
    (again,) = (c for c in back.calls if c.op == "index_select.default")
    assert parse_arguments(again.args)[0][2].high == 9
    assert again.count == 7


def test_files_are_told_apart_by_how_they_begin(tmp_path):
    (tmp_path / "log.txt").write_text("\n" + LOG)
    (tmp_path / "other.txt").write_text("hello\n")
    assert is_log(tmp_path / "log.txt")
    assert not is_log(tmp_path / "other.txt")


def test_the_command_makes_a_trace_of_a_log_and_a_log_of_a_trace(tmp_path):
    (tmp_path / "log.txt").write_text(LOG)
    done = opforge("trace", "log.txt", "--out", "log.parquet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "models       log",
        "calls        52: 52 log",
        "distinct     9 calls of 8 operators",
        "lost         9 calls",
    ]
    assert "             aten.an_old_operator.default: no such operator in torch" in done.stdout
    assert lines[-1] == "written      log.parquet"
    back = opforge("trace", "log.parquet", "--to-log", "back.txt", "--format", "json", cwd=tmp_path)
    row = json.loads(back.stdout)
    assert (row["calls"], row["distinct"], row["operators"]) == (52, 9, 8)
    assert (row["out"], row["log"], row["error"]) == (None, "back.txt", "")
    log = (tmp_path / "back.txt").read_text()
    assert "Operator: aten.sum.dim_IntList\ncnt: 9, ((T([40, 7], f16), [0], True), {})" in log
