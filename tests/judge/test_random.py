"""Random operators, judged through the real sandbox: honest kernels that draw in another way than ATen, and liars."""

from __future__ import annotations

import textwrap

import pytest

from tests.conftest import slow, verdicts

LIKE = "((T([20, 20], f32),), {})"
PROBABILITIES = "((T([15, 20], f32, low=0.0, high=1.0),), {})"

HONEST: dict[str, tuple[str, dict[str, list[str]]]] = {
    "bernoulli": (
        "def bernoulli_kernel_impl(self, *, generator=None):\n    return (1 - torch.rand(self.shape) <= self).to(self.dtype)",
        {
            "bernoulli.default": [PROBABILITIES, PROBABILITIES.replace("f32", "bf16"), "((T([], f32, low=0, high=1),), {})"],
            "bernoulli.out": ["((T([8], f32, low=0.0, high=1.0),), {'out': T([8], f32)})"],
        },
    ),
    "bernoulli_.float": (
        (
            "def bernoulli__kernel_impl(self, p=0.5, *, generator=None):\n"
            "    return self.copy_(torch.rand(self.shape) < p)"
        ),
        {"bernoulli_.float": ["((T([4, 3, 6], f32), 0.3), {})", "((T([9, 9], i64), 0.25), {})"]},
    ),
    "rand": (
        (
            "def rand_kernel_impl(size, *, dtype=None, layout=None, device=None, pin_memory=None):\n"
            "    return (torch.randint(2**53, size).double() / 2**53).clamp(max=1 - 2**-24).to(dtype)"
        ),
        {"rand.default": ["(([3, 7],), {'dtype': f32})", "(([40, 40],), {'dtype': bf16})", "(([40, 40],), {'dtype': f16})"]},
    ),
    "randn_like": (
        """
        def randn_like_kernel_impl(self, *, dtype=None, **options):
            dtype = dtype or self.dtype
            n = self.numel() * (2 if dtype.is_complex else 1)
            u, v = 1 - torch.rand(n, dtype=torch.float64), torch.rand(n, dtype=torch.float64)
            z = (-2 * u.log()).sqrt() * (2 * torch.pi * v).cos()
            if dtype.is_complex:
                return torch.view_as_complex((z / 2**0.5).reshape(*self.shape, 2)).to(dtype)
            return z.reshape(self.shape).to(dtype)
        """,
        {"randn_like.default": [LIKE, "((T([4], f32),), {})", "((T([9, 9], c64),), {})", "((T([90], bf16),), {})"]},
    ),
    "normal.Tensor_Tensor": (
        (
            "def normal_kernel_impl(mean, std, *, generator=None):\n"
            "    u, v = 1 - torch.rand(2, *torch.broadcast_shapes(mean.shape, std.shape), dtype=torch.float64)\n"
            "    return (mean + std * (-2 * u.log()).sqrt() * (2 * torch.pi * v).cos()).to(mean.dtype).contiguous()"
        ),
        {"normal.Tensor_Tensor": ["((T([6, 5], f32), T([6, 5], f32, low=0, high=3)), {})", "((T([90], bf16), T([90], bf16, low=0, high=2)), {})"]},
    ),
    "uniform_": (
        (
            "def uniform__kernel_impl(self, low=0.0, high=1.0, *, generator=None, **bounds):\n"
            "    return self.copy_(low + (high - low) * torch.randint(2**53, self.shape) / 2**53)"
        ),
        {"uniform_.default": ["((T([10], f32), -100.0, 100.0), {})", "((T([90], f64), 2.0, 3.0), {})"]},
    ),
    "exponential_": (
        (
            "def exponential__kernel_impl(self, lambd=1.0, *, generator=None):\n"
            "    return self.copy_(-torch.log(torch.rand(self.shape, dtype=torch.float64).clamp(min=1e-16)) / lambd)"
        ),
        {"exponential_.default": ["((T([10], f32), 0.5), {})", "((T([30, 30], bf16), 2.0), {})"]},
    ),
    "geometric_": (
        (
            "def geometric__kernel_impl(self, p, *, generator=None):\n"
            "    u = 1 - torch.rand(self.shape, dtype=torch.float64)\n"
            "    return self.copy_((u.log() / torch.tensor(1 - p, dtype=torch.float64).log()).ceil().clamp(min=1))"
        ),
        {"geometric_.default": ["((T([10], f32), 0.2), {})", "((T([30, 30], i64), 0.5), {})"]},
    ),
    "cauchy_": (
        (
            "def cauchy__kernel_impl(self, median=0.0, sigma=1.0, *, generator=None):\n"
            "    return self.copy_(median + sigma * torch.tan(torch.pi * (0.5 - torch.rand(self.shape, dtype=torch.float64))))"
        ),
        {"cauchy_.default": ["((T([10], f32), 0.0, 0.5), {})", "((T([40, 10], f32), 3.0, 2.0), {})"]},
    ),
    "log_normal_": (
        (
            "def log_normal__kernel_impl(self, mean=1.0, std=2.0, *, generator=None):\n"
            "    z = torch.special.ndtri(torch.rand(self.shape, dtype=torch.float64).clamp(min=2**-53))\n"
            "    return self.copy_((mean + std * z).exp())"
        ),
        {"log_normal_.default": ["((T([10], f32), 0.0, 0.25), {})", "((T([20, 20], f32),), {})"]},
    ),
    "randint.low": (
        (
            "def randint_kernel_impl(low, high, size, *, dtype=torch.int64, layout=None, device=None, pin_memory=None):\n"
            "    u = torch.rand(size, dtype=torch.float64)\n"
            "    return (low + (u * (high - low)).floor()).to(dtype or torch.int64)"
        ),
        {"randint.low": ["((2, 10, [6]), {})", "((-5, 1000, [20, 20]), {'dtype': f32})"]},
    ),
    "random_.from": (
        (
            "def random__kernel_impl(self, low, high, *, generator=None):\n"
            "    return self.copy_((low + torch.rand(self.shape, dtype=torch.float64) * (high - low)).floor())"
        ),
        {"random_.from": ["((T([30], i32), 3, 90), {})"]},
    ),
    "randperm": (
        (
            "def randperm_kernel_impl(n, *, dtype=torch.int64, layout=None, device=None, pin_memory=None):\n"
            "    return torch.rand(n, dtype=torch.float64).argsort().to(dtype or torch.int64)"
        ),
        {"randperm.default": ["((7,), {})", "((100,), {})"]},
    ),
    "multinomial": (
        """
        def multinomial_kernel_impl(self, num_samples, replacement=False, *, generator=None):
            shape = (*self.shape[:-1], num_samples, self.shape[-1]) if replacement else self.shape
            keys = -(-torch.rand(shape, dtype=torch.float64).clamp(min=1e-300).log()).log()
            if replacement:
                return (keys + self.double().log().unsqueeze(-2)).argmax(-1)
            return (keys + self.double().log()).topk(num_samples, dim=-1).indices
        """,
        {
            "multinomial.default": [
                "((T([3], f32, low=0.1, high=1.0), 3), {})",
                "((T([5, 8], f32, low=0.1, high=1.0), 4), {})",
                "((T([5, 8], f32, low=0.1, high=1.0), 10, True), {})",
            ]
        },
    ),
    "native_dropout": (
        """
        def native_dropout_kernel_impl(input, p, train):
            if train is False or p == 0:
                return input.clone(), torch.ones_like(input, dtype=torch.bool)
            mask = torch.rand(input.shape) >= p
            return input * mask / (1 - p), mask
        """,
        {"native_dropout.default": ["((T([20, 20], f32), 0.3, True), {})", "((T([6], bf16), 0.5, True), {})", "((T([6], f32), 0.5, False), {})"]},
    ),
    "rrelu_with_noise": (
        """
        def rrelu_with_noise_kernel_impl(self, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
            if not training:
                return torch.where(self <= 0, self * ((lower + upper) / 2), self)
            drawn = lower + (upper - lower) * torch.rand(self.shape, dtype=torch.float64)
            noise.copy_(torch.where(self <= 0, drawn, 1.0))
            return self * noise
        """,
        {"rrelu_with_noise.default": ["((T([20], f32), T([20], f32), 0.1, 0.9, True), {})", "((T([20], f32), T([20], f32), 0.1, 0.9, False), {})"]},
    ),
    "poisson": (
        """
        def poisson_kernel_impl(self, generator=None):
            u = torch.rand(self.shape, dtype=torch.float64)
            term = (-self.double()).exp()
            total, count = term.clone(), torch.zeros(self.shape, dtype=self.dtype)
            for k in range(1, 40):
                count += u > total
                term = term * self / k
                total += term
            return count
        """,
        {"poisson.default": ["((T([12, 6], f32, low=0.0, high=8.0),), {})"]},
    ),
}  # fmt: skip


def source(body: str) -> str:
    return "import torch\n" + textwrap.dedent(body).strip() + "\n"


@pytest.mark.slow
def test_honest_kernels_that_draw_in_another_way_pass(kernel_directory, judge_tiny):
    directory = kernel_directory({op.replace(".", "__"): source(body) for op, (body, _) in HONEST.items()})
    cases = {op: texts for _, given in HONEST.values() for op, texts in given.items()}
    rows = list(judge_tiny(directory, cases, timeout_s=30.0).store.rows())
    assert {(r.op, r.case, r.reason) for r in rows if r.verdict != "passed"} == set()
    assert {row.op for row in rows} == set(cases)
    drawn = [row for row in rows if "draws" in row.figures]
    assert len(drawn) == len(rows) - 2  # two cases of dropout and rrelu draw nothing, and are judged by their numbers
    assert all(
        row.figures["draws"] >= 128 and row.figures["false_alarm"] == 1e-6 and row.figures["z"] < row.figures["z_limit"]
        for row in drawn
    )
    assert all(row.figures["ks"] < max(row.figures["ks_limit"], 0.05) for row in drawn)


LIES = {
    2: ("torch.rand(n) * 0.95", "Kolmogorov-Smirnov distance"),
    3: ("(torch.randperm(n) + torch.rand(n)) / n", "not independent"),
    4: ("(lambda u: torch.where(torch.arange(n) % 2 == 0, u, u.roll(1)))(torch.rand(n))", "repeated values"),
    5: ("(lambda z: torch.special.ndtr(0.9 * z + 0.19**0.5 * z.roll(1)))(torch.randn(n))", "1 apart are correlated"),
    6: ("torch.rand(n, generator=seeded(torch.initial_seed()))", "two calls in a row"),
    7: ("(torch.rand(n), torch.rand(n, generator=seeded(int(torch.rand(()) * 200))))[1]", "different samples from"),
    8: ("torch.rand(n, generator=seeded(3))", "the same sample for every seed"),
    9: ("torch.rand(n, generator=seeded(int.from_bytes(__import__('os').urandom(6), 'little')))", "does not determine the sample"),
    10: ("(torch.rand(n) * 512).floor() / 512", "repeated values"),
    11: ("torch.rand(n) * 1.001", "outside 0 to 1"),
    12: ("torch.cat([torch.rand(n - 1), torch.full((1,), 0.5)])", f"flat position {12 * 20 - 1}"),
    13: ("torch.where(torch.rand(n) < 1e-3, torch.nan, torch.rand(n))", "NaN among the samples"),
    14: ("(lambda u: torch.where(torch.rand(()) < 0.5, u, 1 - u))(torch.rand(n).sort().values)", "spread wider"),
    15: ("torch.special.ndtr(0.6 * torch.randn(n, generator=seeded(torch.initial_seed() // 2)) + 0.8 * torch.randn(n))", "are correlated"),
}  # fmt: skip
"""By the number of rows of the case: what a liar gives for ``rand_like``, and words of the reason it is refused with."""


@pytest.mark.slow
def test_liars_about_rand_like_are_caught(kernel_directory, judge_tiny):
    table = ", ".join(f"{rows}: lambda n: {lie}" for rows, (lie, _) in LIES.items())
    body = f"""
seeded = lambda seed: torch.Generator().manual_seed(seed)
LIES = {{{table}}}
def rand_like_kernel_impl(self, **options):
    return LIES[self.shape[0]](self.numel()).reshape(self.shape)
"""
    cases = [f"((T([{rows}, 20], f32),), {{}})" for rows in LIES]
    ended = judge_tiny(kernel_directory({"rand_like": source(body)}), {"rand_like.default": cases}, timeout_s=30.0)
    found = {row.case: (row.verdict, row.reason) for row in ended.store.rows()}
    expected = {
        text: ("contract" if "determine" in words else "wrong", words)
        for text, (_, words) in zip(cases, LIES.values(), strict=True)
    }
    assert {t: v for t, v in found.items() if v[0] != expected[t][0] or expected[t][1] not in v[1]} == {}


@pytest.mark.parametrize(
    ("op", "case", "body", "words"),
    [
        ("bernoulli", PROBABILITIES, "(self, *, generator=None): return (torch.rand_like(self) < 0.9 * self).float()", "Kolmogorov"),
        slow("bernoulli", PROBABILITIES, "(self, *, generator=None): return (torch.rand_like(self) < self.flip(-1)).float()", "the means of the elements"),
        ("bernoulli", PROBABILITIES, "(self, *, generator=None): return self.clone()", "whole numbers"),
        (
            "normal.Tensor_float",
            "((T([20, 20], f32), 0.1), {})",
            "(mean, std=1.0, *, generator=None): return torch.special.ndtri(torch.rand_like(mean)) * std + mean.t()",
            "the means of the elements",
        ),
        slow(
            "normal.float_Tensor",
            "((0.5, T([20, 20], f32, low=0.1, high=2.0)), {})",
            "(mean, std, *, generator=None): return torch.special.ndtri(torch.rand_like(std)) * std.t() + mean",
            "the variances of the elements",
        ),
        ("randint", "((10, [30]), {})", "(high, size, **options): return (torch.rand(size) * (high + 1)).long()", "outside 0 to 9"),
        slow(
            "randint",
            "((1000, [300]), {})",
            "(high, size, **options): return (torch.rand(size) * high).long() // 2 * 2 + (torch.rand(size) < 0.4)",
            "modulo 2",
        ),
        ("randperm", "((20,), {})", "(n, **options): return torch.randint(0, n, (n,))", "not a permutation"),
        slow("randperm", "((20,), {})", "(n, **options): return (torch.arange(n) + int(torch.randint(0, n, ()))) % n", "the same sample"),
        (
            "multinomial",
            "((T([5, 8], f32, low=0.1, high=1.0), 4), {})",
            "(self, num_samples, replacement=False, *, generator=None): return torch.rand(5, 4, 8).add(self.log().unsqueeze(1)).argmax(-1)",
            "twice",
        ),
        (
            "native_dropout",
            "((T([20, 20], f32), 0.3, True), {})",
            "(input, p, train): return input * (torch.rand(input.shape) >= p) / (1 - p), torch.rand(input.shape) >= p",
            "mask",
        ),
        slow(
            "native_dropout",
            "((T([20, 20], f32), 0.3, True), {})",
            "(input, p, train):\n    m = torch.rand(input.shape) >= p\n    return input * m, m",
            "times the mask",
        ),
        slow(
            "exponential_",
            "((T([20, 20], f32), 2.0), {})",
            "(self, lambd=1.0, *, generator=None): return self.copy_(-torch.log(1 - torch.rand(self.shape)))",
            "Kolmogorov",
        ),
        (
            "rrelu_with_noise",
            "((T([20], f32), T([20], f32), 0.1, 0.9, True), {})",
            "(self, noise, lower=0, upper=1, training=False, generator=None): return torch.where(self <= 0, self * (0.1 + 0.8 * torch.rand(20)), self)",
            "`noise` is not 1",
        ),
        (
            "dropout",
            "((T([30, 30], f32), 0.3, True), {})",
            "(input, p, train): return torch.where(torch.rand(30, 1) >= p, input / (1 - p), 0.0)",
            "differently from ATen's",
        ),
        slow(
            "_scaled_dot_product_flash_attention_for_cpu",
            "((T([2, 2, 4, 8], f32), T([2, 2, 6, 8], f32), T([2, 2, 6, 8], f32)), {})",
            "(q, k, v, *args, **named):\n    s = q @ k.mT / 8**0.5\n    return (s.softmax(-1) * 1.001) @ v, s.logsumexp(-1)",
            "allowed",
        ),
    ],
)  # fmt: skip
def test_a_liar_is_caught(kernel_directory, judge_tiny, op, case, body, words):
    base, _, overload = op.partition(".")
    directory = kernel_directory({op.replace(".", "__"): f"import torch\ndef {base}_kernel_impl{body}\n"})
    full = f"{base}.{overload or 'default'}"
    ((verdict, reason),) = verdicts(judge_tiny(directory, {full: [case]}, timeout_s=30.0))[full]
    assert (verdict, words in reason) == ("wrong", True), reason


def test_a_draw_of_atens_own_passes_at_once_and_says_so(judge_tiny):
    cases = {
        "rand_like.default": [LIKE],
        "bernoulli_.float": ["((T([4], f32),), {})"],
        "randperm.default": ["((5,), {})"],
    }
    rows = list(judge_tiny(None, cases).store.rows())
    assert [(row.verdict, row.figures["identical_draws"]) for row in rows] == [("passed", 5)] * 3


def test_a_kernel_that_leaves_atens_path_after_its_first_draw_is_drawn_from(kernel_directory, judge_tiny):
    body = """
        calls = [0]
        def rand_like_kernel_impl(self, **options):
            calls[0] += 1
            return torch.rand(self.shape) ** (1 if calls[0] == 1 else 2)
    """
    found = verdicts(judge_tiny(kernel_directory({"rand_like": source(body)}), {"rand_like.default": [LIKE]}))
    ((verdict, reason),) = found["rand_like.default"]
    assert verdict == "wrong"
    assert "Kolmogorov" in reason


def test_a_later_draw_that_breaks_the_contract_is_a_breach(kernel_directory, judge_tiny):
    body = """
        calls = [0]
        def bernoulli_kernel_impl(self, *, generator=None):
            calls[0] += 1
            drawn = 1 - torch.rand_like(self) <= self
            if self.numel() == 5 and calls[0] % 90 == 0:
                self.fill_(0.5)
            return drawn if self.numel() == 4 and calls[0] % 90 == 0 else drawn.float()
    """
    cases = {"bernoulli.default": [f"((T([{n}], f32, low=0, high=1),), {{}})" for n in (4, 5)]}
    found = verdicts(judge_tiny(kernel_directory({"bernoulli": source(body)}), cases))
    assert found["bernoulli.default"] == {
        ("contract", "result has dtype b8, ATen's has f32"),
        ("contract", "wrote to `self`, which bernoulli.default must not change"),
    }
