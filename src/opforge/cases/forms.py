"""What is known of the forms of a case without making them. Needs no torch."""

from __future__ import annotations

from opforge.runtime import layouts

SAME_ELEMENTS = frozenset(
    {
        layouts.TRANSPOSED,
        layouts.PITCHED,
        layouts.STRIDED,
        layouts.PERMUTED,
        layouts.OFFSET,
        layouts.CHANNELS_LAST,
    }
)
"""Forms that change how elements lie in memory, and nothing else."""
LAYOUT_FORMS = SAME_ELEMENTS | {layouts.EXPANDED, layouts.EXPANDED_LAST, layouts.EMPTY}
"""Forms that are layouts, by the names that the runtime has for them."""
