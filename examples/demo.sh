#!/bin/sh
# Judge the honest example kernels and the wrong ones. Needs `opforge` on the PATH.
# The first run records PyTorch's OpInfo samples (a minute or two); later ones read them from the cache.
set -u
here=$(dirname "$0")
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

echo "== Honest kernels: all of them must be right"
opforge run --suite opinfo --backend directory --ops-directory "$here/generated_kernels" \
    --ops relu,sigmoid,sum.default,sum.out,_softmax,native_layer_norm,mm,silu --dtypes f32,bf16 --out "$out/honest" || exit 1

echo
echo "== Wrong kernels: every one must be caught"
opforge run --suite opinfo --backend directory --ops-directory "$here/wrong_kernels" \
    --ops relu,sigmoid,neg,abs --dtypes f32,bf16 --out "$out/wrong"
if [ $? -ne 1 ]; then
    echo "the wrong kernels were not all caught" >&2
    exit 1
fi
echo
echo "The honest kernels are right; the wrong ones were caught (exit code 1 is what a pipeline would see)."
