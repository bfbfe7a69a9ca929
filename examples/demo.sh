#!/bin/sh
# Judge the honest example kernels and the wrong ones. Needs `opforge` on the PATH.
# Keeps its runs in a new folder under TMPDIR (default: /tmp), and names the page to open at the end.
# The first run records PyTorch's OpInfo samples (a minute or two); later ones read them from the cache.
here=$(dirname "$0")
if ! out=$(mktemp -d "${TMPDIR:-/tmp}/opforge-demo.XXXXXX") || [ ! -d "$out" ]; then
    echo "no folder for the runs can be made in ${TMPDIR:-/tmp}; set TMPDIR to a folder that you can write to" >&2
    exit 1
fi

echo "== Honest kernels: all of them must be right"
opforge run --suite opinfo --backend directory --ops-directory "$here/generated_kernels" \
    --ops relu,sigmoid,sum.default,sum.out,_softmax,native_layer_norm,mm,silu --dtypes f32,bf16 --out "$out/honest" || exit 1

echo
echo "== Wrong kernels: every one must be caught"
opforge run --suite opinfo --backend directory --ops-directory "$here/wrong_kernels" \
    --ops relu,sigmoid,neg,abs --dtypes f32,bf16 --out "$out/wrong"

echo
for op in relu sigmoid neg abs; do
    # operator_summary.csv: op,kernel,cases,passed,…
    if ! awk -F, -v op="$op.default" '$1 == op && $4 < $3 { found = 1 } END { exit !found }' "$out/wrong/operator_summary.csv"; then
        echo "the wrong kernel for $op was not caught" >&2
        exit 1
    fi
    echo "caught: $here/wrong_kernels/$op ($(sed -n '1s/"""//gp' "$here/wrong_kernels/$op/${op}_implementation_1.py"))"
done

echo
echo "== Cheating kernels: every one must be named"
opforge run --suite opinfo --backend directory --ops-directory "$here/cheating_kernels" \
    --ops abs,neg,exp --dtypes f32 --out "$out/cheating"
if [ "$(grep -c '"verdict":"cheated"' "$out/cheating/results.jsonl")" -eq 0 ]; then
    echo "no cheat was named" >&2
    exit 1
fi

echo
echo "The runs are kept in $out. Open this page to see one, with the reasons:"
echo "  $out/wrong/report.html"
