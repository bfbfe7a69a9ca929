"""Kinds of arithmetic for which devices have rates. Needs no torch."""

from __future__ import annotations

import enum


class ArithmeticKind(enum.StrEnum):
    """Kind of arithmetic; a product is of matrices, for which devices have separate units."""

    F64 = "f64"
    F32 = "f32"
    """Also f32 arithmetic with results stored in fewer bits, as in elementwise operators."""
    INTEGER = "integer"
    F64_MATMUL = "f64 product"
    F32_MATMUL = "f32 product"
    TF32_MATMUL = "tf32 product"
    """An f32 product whose factors are rounded to 10 bits; torch allows it for convolutions, on a GPU."""
    F16_MATMUL = "f16 product"
    BF16_MATMUL = "bf16 product"
    F8_MATMUL = "f8 product"
    I8_MATMUL = "i8 product"
