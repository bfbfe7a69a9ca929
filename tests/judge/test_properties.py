"""Results that need not be ATen's own, judged through the real sandbox by what makes them right."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch.nn import functional

from opforge.cases import Case
from opforge.judge.compare.properties.property_check import Results
from opforge.judge.facts import OPERATOR_FACTS
from opforge.judge.verdict import RejectedError
from tests.conftest import slow
from tests.corpora import disjoint, judge

SQUARE = ["((T([5, 5], f32),), {})", "((T([3, 4, 4], f64),), {})", "((T([4, 4], c64),), {})"]
TALL = ["((T([6, 4], f32),), {})", "((T([2, 5, 5], f32),), {})", "((T([3, 6], c64),), {})"]
TIED = ["((T([6, 9], i64, low=0, high=4), 1), {})", "((T([6, 9], i64, low=0, high=4), 0), {})"]

EIGH = """
    def HERE(A, UPLO='L', compute_v=True, **rest):
        if not compute_v:
            raise NotImplementedError("eigenvalues alone")
        w, v = np.linalg.eigh(A.numpy(), UPLO)
        sign = torch.where(torch.arange(v.shape[-1]) % 2 == 0, -1.0, 1.0).to(A.dtype)
        return t(w), t(v) * sign{}
"""
EIG = """
    def HERE(self):
        w, v = np.linalg.eig(self.numpy().astype('complex128'))
        w, v = w[..., ::-1].copy(), v[..., ::-1].copy()
        return cast(self, w), cast(self, v){}
    def cast(self, x):
        return t(x).to(torch.complex128 if self.dtype in (torch.float64, torch.complex128) else torch.complex64)
"""
SVD = """
    def HERE(A, full_matrices=True, *, driver=None):
        if not locals().get("compute_uv", True):
            raise NotImplementedError("singular values alone")
        u, s, vh = np.linalg.svd(A.numpy(), full_matrices)
        u, vh = t(u), t(vh)
        u[..., :, :1] *= -1
        vh[..., :1, :] *= -1
        return u{}, t(s), vh
"""
QR = """
    def HERE(A, mode='reduced'):
        q, r = np.linalg.qr(A.numpy(), mode)
        sign = torch.where(torch.arange(r.shape[-2]) % 2 == 0, -1.0, 1.0).to(A.dtype)
        return t(q) * sign{}, t(r) * sign[:, None]
"""
LU = """
    def HERE(A, *, pivot=True, check_errors=False):
        if A.numel() == 0 or torch.linalg.matrix_rank(A) < A.shape[-1]:
            raise NotImplementedError("a matrix without an inverse")
        a, n = A.double().clone(), A.shape[-1]
        pivots = torch.zeros(n, dtype=torch.int32)
        for k in range(n):
            size = a[k:, k].abs()
            row = k + int(({}).nonzero()[0])
            pivots[k] = row + 1
            a[[k, row]] = a[[row, k]]
            a[k + 1:, k] /= a[k, k]
            a[k + 1:, k + 1:] -= a[k + 1:, k:k + 1] * a[k:k + 1, k + 1:]
        return a.to(A.dtype).mT.contiguous().mT, pivots, torch.zeros((), dtype=torch.int32)
"""
SORT = """
    def HERE(self, dim=-1, descending=False):
        if self.dim() == 0:
            raise NotImplementedError("one number alone")
        n = self.shape[dim]
        shape = [-1 if d == dim % self.dim() else 1 for d in range(self.dim())]
        keys = self * n + torch.arange(n - 1, -1, -1).reshape(shape)
        keys = -keys if descending else keys
        at = t(np.argsort(keys.numpy(), axis=dim)){}
        return self.gather(dim, at), at
"""
POOL = """
    def HERE(self, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        if (stride and list(stride) != list(kernel_size)) or ceil_mode or padding not in (0, [0, 0]) or dilation not in (1, [1, 1]):
            raise NotImplementedError("plain windows only")
        B, C, H, W = self.shape
        k = kernel_size[0]
        blocks = self.reshape(B, C, H // k, k, W // k, k).permute(0, 1, 2, 4, 3, 5).reshape(B, C, H // k, W // k, k * k)
        best = k * k - 1 - blocks.flip(-1).argmax(-1)
        rows = torch.arange(H // k)[:, None] * k + best // k
        columns = torch.arange(W // k) * k + best % k
        return blocks.amax(-1), {}
"""
UNIQUE = """
    def HERE(self, sorted=True, return_inverse=False, return_counts=False):
        if sorted or not return_inverse or not return_counts:
            raise NotImplementedError("unsorted, with all that can be asked for")
        values, inverse, counts = (t(x) for x in np.unique(self.numpy(), return_inverse=True, return_counts=True))
        n = len(values)
        return values.flip(0){}, {}, {}
"""
TOPK = """
    def HERE(self, k, dim=-1, largest=True, sorted=True):
        if sorted or not largest:
            raise NotImplementedError("unsorted, the largest")
        at = t(np.argsort(self.numpy(), axis=dim, kind='stable')).flip(dim).narrow(dim, 0, k).flip(dim)
        {}
        return self.gather(dim, at), at
"""
RUNNING = """
    def HERE(self, dim):
        values = t(np.maximum.accumulate(self.numpy(), axis=dim))
        same = (self.unsqueeze(dim) == values.unsqueeze(dim + 1)).int()
        return values, {}
"""
POSITION = """
    def HERE(self, dim, keepdim=False):
        if self.dim() == 0 or keepdim:
            raise NotImplementedError("one number alone")
        best = self.amax(dim, keepdim=True)
        last = self.shape[dim] - 1 - (self == best).int().flip(dim).argmax(dim)
        return best.squeeze(dim), {}
"""

RIGHT = [
    ("linalg_eig", SQUARE, EIG.format(""), "A V = V Λ holds"),
    ("linalg_svd", TALL, SVD.format(""), "U S Vh = A holds"),
    ("linalg_qr", [*TALL, "((T([6, 4], f32), 'complete'), {})"], QR.format(""), "Q R = A holds"),
    ("linalg_lu_factor_ex", ["((T([6, 6], f32),), {})"], LU.format("size == size.max()"), ""),
    ("sort", TIED, SORT.format(""), "ties are broken"),
    ("max_pool2d_with_indices", ["((T([2, 2, 6, 6], i64, low=0, high=3), [2, 2]), {})"], POOL.format("rows * W + columns"), "ties are broken"),
    ("_unique2", ["((T([40], i64), False, True, True), {})"], UNIQUE.format("", "n - 1 - inverse.reshape(self.shape)", "counts.flip(0)"), ""),
    ("topk", ["((T([6, 9], i64, low=0, high=4), 4, 1, True, False), {})"], TOPK.format(""), "sorted=False allows"),
]  # fmt: skip
MORE_RIGHT = [
    ("linalg_eigh", SQUARE, EIGH.format(""), "A V = V Λ holds"),
    ("_linalg_eigh", SQUARE, EIGH.format(""), "A V = V Λ holds"),
    ("linalg_eig", SQUARE[2:], EIG.format(" * 1j"), "A V = V Λ holds"),
    ("linalg_eigvals", SQUARE, EIG.replace("return cast(self, w), cast(self, v)", "return cast(self, w)").format(""), "another order"),
    ("_linalg_svd", TALL, SVD.replace("full_matrices=True", "full_matrices=False, compute_uv=True").format(""), "U S Vh = A holds"),
    ("cummax", ["((T([6, 9], i64, low=0, high=4), 1), {})"], RUNNING.format("same.argmax(dim + 1)"), "ties are broken"),
    ("max.dim", TIED, POSITION.format("last"), "ties are broken"),
]  # fmt: skip


def source(op: str, body: str) -> str:
    head = "import numpy as np\nimport torch\nt = lambda x: torch.from_numpy(np.ascontiguousarray(x))\n"
    return head + textwrap.dedent(body).replace("HERE", f"{op.partition('.')[0]}_kernel_impl")


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Return a function that gives the rows of a kernel of the tables. Kernels of different operators are judged in one run."""
    groups = [
        group
        for tables in ((*RIGHT, *WRONG), (*MORE_RIGHT, *MORE_WRONG))
        for group in disjoint([kernel[:3] for kernel in tables], lambda kernel: kernel[0])
    ]
    rows = {}

    def judge_group(group):
        root = tmp_path_factory.mktemp("properties")
        files, made = {}, {}
        for op, cases, body in group:
            full = op if "." in op else f"{op}.default"
            files[full] = root / f"{full}.py"
            files[full].write_text(source(op, body))
            made[full] = [Case.make(full, text) for text in cases]
        found = judge(files, made, root, timeout_s=30.0, allow_fallback=True)
        for op, _cases, body in group:
            rows[op, body] = [row for row in found if row.op in (op, f"{op}.default")]

    def rows_of(op, body):
        if (op, body) not in rows:
            judge_group(next(group for group in groups if any((o, b) == (op, body) for o, _, b in group)))
        return rows[op, body]

    return rows_of


@pytest.mark.parametrize(("op", "cases", "body", "note"), [*RIGHT, *(slow(*kernel) for kernel in MORE_RIGHT)])
def test_another_right_answer_passes_and_a_note_says_so(judged, op, cases, body, note):
    rows = judged(op, body)
    assert len(rows) == len(cases)
    assert {(row.verdict, row.reason) for row in rows} == {("passed", "")}
    assert any(note in text for row in rows for text in (row.notes or [""]))


PLANE = ["((T([2, 2, 6, 6], i64, low=0, high=3), [2, 2]), {})"]
SIX = ["((T([6, 6], f32),), {})"]
SOME = ["((T([40], i64), False, True, True), {})"]
FOUR = ["((T([6, 9], i64, low=0, high=4), 4, 1, True, False), {})"]

WRONG = [
    ("linalg_eigh", SQUARE, EIGH.format(" * 1.01"), "orthonormality of its columns"),
    ("linalg_eig", SQUARE, EIG.format(".roll(1, -1)"), "A V = V Λ is off"),
    ("linalg_svd", TALL, SVD.replace("return u{}, t(s), vh", "return u * 1.01, t(s), vh / 1.01"), "orthonormality"),
    ("linalg_qr", TALL, QR.format(" * -1"), "Q R = A is off"),
    ("linalg_lu_factor_ex", SIX, LU.format("size == size.min()"), "pivoting keeps them at most 1"),
    ("sort", TIED, SORT.format(".clamp(min=1)"), "occurs twice along dimension"),
    ("max_pool2d_with_indices", PLANE, POOL.format("rows * W"), "do not hold the maximum"),
    ("_unique2", SOME, UNIQUE.format("", "inverse.reshape(self.shape)", "counts.flip(0)"), "reconstruct the input"),
    ("topk", FOUR, TOPK.format("return self.gather(dim, at), at.flip(dim)"), "point at other values than"),
]  # fmt: skip
MORE_WRONG = [
    ("linalg_eigh", SQUARE, EIGH.replace("t(v) *", "t(v).roll(1, -1) *").format(""), "A V = V Λ is off"),
    ("linalg_eigh", SQUARE, EIGH.replace("t(v) *", "torch.zeros_like(t(v)) *").format(""), "orthonormality"),
    ("linalg_eig", SQUARE, EIG.format(" * 2"), "norm of an eigenvector"),
    ("linalg_eig", ["((T([4, 4], f32, stride=(0, 0)),), {})"], EIG.format("[..., :1].expand(4, 4).contiguous()"), ""),
    ("linalg_eig", SQUARE, EIG.replace("return cast(self, w)", "return cast(self, w) * 1.001").format(""), "an eigenvalue is off"),
    ("linalg_svd", TALL, SVD.replace("u[..., :, :1] *= -1", "").format(""), "U S Vh = A is off"),
    ("linalg_qr", TALL, QR.replace("t(r) * sign[:, None]", "t(r) * sign[:, None] + 1e-6").format(""), "not upper triangular"),
    ("linalg_lu_factor_ex", SIX, LU.replace("a[k, k]", "a[k, k] * 2").format("size == size.max()"), "P L U = A is off"),
    ("sort", TIED, SORT.format("").replace("dim, at), at", "dim, at), at.flip(dim)"), "point at other values"),
    ("max_pool2d_with_indices", ["((T([1, 1, 8, 8], i64, low=5, high=6), [2, 2]), {})"], POOL.format("(rows * W + columns).flip(-1)"), "outside its window"),
    ("_unique2", SOME, UNIQUE.format("", "n - 1 - inverse.reshape(self.shape)", "counts"), "counts do not match"),
    ("_unique2", SOME, UNIQUE.format(" + 1", "n - 1 - inverse.reshape(self.shape)", "counts.flip(0)"), "in any order"),
    ("topk", ["((T([6, 9], i64, low=0, high=9), 4, 1, True, False), {})"], TOPK.replace(".flip(dim).narrow", ".narrow").format(""), "in any order"),
    ("cummax", TIED[:1], RUNNING.format("self.shape[dim] - 1 - same.flip(dim + 1).argmax(dim + 1)"), "comes after the element"),
    ("max.dim", TIED, POSITION.format("(last - 1) % self.shape[dim]"), "point at other values"),
    ("max.dim", TIED, POSITION.format("last + self.shape[dim]"), "outside a dimension"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "cases", "body", "words"), [*WRONG, *(slow(*kernel) for kernel in MORE_WRONG)])
def test_a_wrong_answer_is_refused_with_what_is_broken(judged, op, cases, body, words):
    found = {(row.verdict, row.reason) for row in judged(op, body)}
    assert {verdict for verdict, _ in found} == {"wrong"}
    assert all(words in reason for _, reason in found), found


def test_stable_sorting_leaves_no_choice(kernel_directory, judge_tiny):
    body = SORT.replace("self, dim=-1, descending=False", "self, *, stable=None, dim=-1, descending=False").format("")
    cases = {
        "sort.stable": [
            "((T([6, 9], i64, low=0, high=4),), {'stable': True})",
            "((T([6, 9], i64, low=0, high=4),), {'stable': False})",
        ]
    }
    rows = list(judge_tiny(kernel_directory({"sort__stable": source("sort", body)}), cases).store.rows())
    assert {("True" in row.case, row.verdict) for row in rows} == {(True, "wrong"), (False, "passed")}


@pytest.mark.parametrize(("body", "verdict"), [(EIGH.format(""), "passed"), (EIGH.format(" * 1.01"), "wrong")])
def test_out_forms_are_judged_by_their_property_too(kernel_directory, judge_tiny, body, verdict):
    cases = {"linalg_eigh.eigvals": ["((T([5, 5], f32),), {'eigvals': T([5], f32), 'eigvecs': T([5, 5], f32)})"]}
    rows = list(judge_tiny(kernel_directory({"linalg_eigh": source("linalg_eigh", body)}), cases).store.rows())
    assert {row.verdict for row in rows} == {verdict}


def rule(packet, given, kernel, aten):
    names = [f"result[{i}]" for i in range(len(aten))]
    return OPERATOR_FACTS[packet].property_check(Results(packet, given, list(kernel), list(aten), names))


TWO_WAYS = torch.tensor([[1.0, 2.0], [-1.0, 1.0]])
"""Either row may be the first pivot."""


def test_lu_may_pivot_otherwise_where_rows_tie():
    aten = torch.linalg.lu(TWO_WAYS)
    other = (torch.eye(2).flip(0), torch.tensor([[1.0, 0.0], [-1.0, 1.0]]), torch.tensor([[-1.0, 1.0], [0.0, 3.0]]))
    assert not torch.equal(other[0], aten[0])
    accepted = rule("linalg_lu", {"A": TWO_WAYS}, other, aten)
    assert accepted.result_indices == {0, 1, 2}
    assert "P L U = A holds" in accepted.note
    packed = (torch.tensor([[-1.0, 1.0], [-1.0, 3.0]]), torch.tensor([2, 2], dtype=torch.int32))
    assert rule("linalg_lu_factor", {"A": TWO_WAYS}, packed, torch.linalg.lu_factor(TWO_WAYS)).result_indices == {0, 1}
    for broken, words in (
        ((torch.ones(2, 2), *other[1:]), "not a permutation"),
        ((other[0], other[1] + torch.eye(2), other[2]), "ones on the diagonal"),
        ((other[0], other[1], other[2] + 1), "not upper triangular"),
        ((torch.eye(2), *other[1:]), "P L U = A is off"),
    ):
        with pytest.raises(RejectedError, match=words):
            rule("linalg_lu", {"A": TWO_WAYS}, broken, aten)
    with pytest.raises(RejectedError, match="not one of the remaining rows"):
        rule("linalg_lu_factor", {"A": TWO_WAYS}, (packed[0], packed[1] * 0), torch.linalg.lu_factor(TWO_WAYS))


@pytest.mark.parametrize("packet", ["_linalg_det", "_linalg_slogdet", "_linalg_solve_ex"])
def test_factors_beside_another_result_may_be_those_of_the_transposed_matrix(packet):
    torch.manual_seed(0)
    matrix = torch.randn(5, 5)
    given = {"A": matrix, "B": torch.randn(5, 2)}
    aten = (
        getattr(torch.ops.aten, packet)(*given.values())
        if "solve" in packet
        else getattr(torch.ops.aten, packet)(matrix)
    )
    at = 2 if "slog" in packet else 1
    for taken in (matrix, matrix.mT):
        factors = [t.float() for t in torch.linalg.lu_factor(taken.double())]
        kernel = [*aten[:at], factors[0] * (1 + 1e-7), factors[1].int(), *aten[at + 2 :]]
        same_way = torch.equal(kernel[at + 1], aten[at + 1])
        if same_way:
            assert rule(packet, given, kernel, aten).result_indices == {at, at + 1}
        else:
            with pytest.raises(RejectedError, match="P L U = A is off"):
                rule(packet, given, kernel, aten)


def test_bases_of_a_matrix_without_elements_are_free():
    empty = torch.zeros(3, 0)
    aten = torch.linalg.svd(empty)
    assert rule("linalg_svd", {"A": empty}, (-aten[0], aten[1], aten[2]), aten).result_indices == {0, 2}
    with pytest.raises(RejectedError, match="orthonormality"):
        rule("linalg_svd", {"A": empty}, (aten[0] * 2, aten[1], aten[2]), aten)
    q, r = torch.linalg.qr(empty, mode="complete")
    assert rule("linalg_qr", {"A": empty, "mode": "complete"}, (-q, r), (q, r)).result_indices == {0, 1}


def test_reflections_may_have_other_signs():
    torch.manual_seed(0)
    matrix = torch.randn(6, 4)
    aten = torch.geqrf(matrix)
    wide = tuple(t.float() for t in torch.geqrf(matrix.double()))
    assert rule("geqrf", {"self": matrix}, wide, aten).result_indices == {0, 1}
    with pytest.raises(RejectedError, match="Q R = A is off"):
        rule("geqrf", {"self": matrix}, (wide[0], wide[1] * 0.9), aten)


def test_equal_eigenvalues_want_independent_vectors():
    matrix = torch.diag(torch.tensor([2.0, 2.0, 1.0]))
    aten = torch.linalg.eig(matrix)
    with pytest.raises(RejectedError, match="not independent"):
        rule("linalg_eig", {"self": matrix}, (aten[0], aten[1][:, [0, 0, 2]]), aten)
    turned = torch.tensor([[0.6, 0.8, 0], [0.8, -0.6, 0], [0, 0, 1]], dtype=torch.complex64)
    assert rule("linalg_eig", {"self": matrix}, (aten[0], turned), aten).result_indices == {0, 1}


def test_any_nan_may_be_pointed_at():
    x = torch.tensor([1.0, torch.nan, 0.0, torch.nan])
    assert rule("argmax", {"self": x}, [torch.tensor(3)], [torch.tensor(1)]).result_indices == {0}
    with pytest.raises(RejectedError, match="point at other values"):
        rule("argmax", {"self": x}, [torch.tensor(0)], [torch.tensor(1)])


@pytest.mark.parametrize(
    ("packet", "given", "run"),
    [
        (
            "max_pool2d_with_indices",
            {"kernel_size": [3], "stride": [2], "padding": [1], "dilation": [2]},
            lambda x: functional.max_pool2d(x, 3, 2, 1, 2, return_indices=True),
        ),
        ("max_pool1d_with_indices", {"kernel_size": [3], "stride": []}, lambda x: functional.max_pool1d(x[0], 3, return_indices=True)),
        ("adaptive_max_pool2d", {"output_size": [3, 5]}, lambda x: functional.adaptive_max_pool2d(x, (3, 5), return_indices=True)),
        ("adaptive_max_pool1d", {"output_size": [4]}, lambda x: functional.adaptive_max_pool1d(x[0], 4, return_indices=True)),
        ("fractional_max_pool2d", {"kernel_size": [2, 2], "output_size": [4, 4]}, lambda x: functional.fractional_max_pool2d(x, 2, 4, return_indices=True)),
    ],
)  # fmt: skip
def test_windows_are_where_aten_has_them(packet, given, run):
    """ATen's own maxima of distinct values lie in the windows that other choices would be held to."""
    torch.manual_seed(0)
    distinct, alike = torch.randperm(2 * 11 * 13).reshape(1, 2, 11, 13).float(), torch.ones(1, 2, 11, 13)
    elsewhere, first = run(distinct)[1], run(alike)
    source = alike[0] if "1d" in packet else alike
    if "fractional" in packet:
        elsewhere = first[1].flip(-1)
    assert rule(packet, {"self": source, **given}, [first[0], elsewhere], first).result_indices == {1}
    if "fractional" not in packet:
        with pytest.raises(RejectedError, match="outside its window"):
            rule(packet, {"self": source, **given}, [first[0], elsewhere.flip(-1)], first)


def test_unique_slices_may_stand_in_any_order():
    x = torch.tensor([[1.0, 0.0, 1.0], [2.0, 5.0, 2.0]])
    aten = torch.ops.aten.unique_dim(x, 1, True, True, True)
    kernel = (aten[0].flip(1), 1 - aten[1], aten[2].flip(0))
    given = {"self": x, "dim": 1, "sorted": False}
    assert rule("unique_dim", given, kernel, aten).result_indices == {0, 1, 2}
    assert rule("unique_dim", {**given, "sorted": True}, kernel, aten) is None
    with pytest.raises(RejectedError, match="reconstruct the input"):
        rule("unique_dim", given, (kernel[0], aten[1], kernel[2]), aten)
