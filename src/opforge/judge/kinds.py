"""The kinds of arithmetic that a device has rates for. Needs no torch."""

from __future__ import annotations

import enum


class Kind(enum.StrEnum):
    """Which arithmetic; a product is of matrices, for which devices have units of their own."""

    F64 = "f64"
    F32 = "f32"
    """Also what is computed in f32 and stored in fewer bits, as the elementwise operators do."""
    INTEGER = "integer"
    F64_PRODUCT = "f64 product"
    F32_PRODUCT = "f32 product"
    TF32_PRODUCT = "tf32 product"
    """An f32 product whose factors are rounded to 10 bits; the judge does not allow it."""
    F16_PRODUCT = "f16 product"
    BF16_PRODUCT = "bf16 product"
    F8_PRODUCT = "f8 product"
    I8_PRODUCT = "i8 product"
