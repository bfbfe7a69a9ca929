"""Judge the honest kernels again and again, and count false alarms, with other contents each time: ``python -m tests.honest.repeat 20``."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.honest.cases import DRAW
from tests.honest.judging import false_alarm, judge_all, kernels


def main() -> int:
    """Return 1 when an honest kernel was not passed."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    corpus = [k for k in kernels() if len(sys.argv) < 3 or any(word in k.name for word in sys.argv[2:])]
    alarms: Counter[tuple[str, str, str]] = Counter()
    cases = declined = 0
    begun = time.monotonic()
    for number in range(repeats):
        DRAW.set(number)
        with tempfile.TemporaryDirectory() as folder:
            found = judge_all(corpus, Path(folder) / "out")
        for kernel in corpus:
            rows = found[kernel.name]
            cases += len(rows)
            declined += sum(row.verdict == "unsupported" for row in rows)
            alarms.update((kernel.name, r.verdict, f"{r.case}: {r.reason}") for r in rows if false_alarm(kernel, r))
    seconds = time.monotonic() - begun
    print(f"{len(corpus)} kernels × {cases // max(repeats, 1)} verdicts × {repeats} repeats in {seconds:.0f} s")
    print(f"{alarms.total()} false alarms among {cases} verdicts; {declined} declined (bfloat16 in Triton)")
    for (name, verdict, reason), count in alarms.most_common():
        print(f"  {count} × {name}: {verdict}: {reason}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
