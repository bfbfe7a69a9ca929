"""linalg_inv_ex by Gauss-Jordan elimination with row pivots, batch by batch at once, in float64 inside."""

import torch

OP = "linalg_inv_ex.default"


def linalg_inv_ex_kernel_impl(A, *, check_errors=False):
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        raise RuntimeError(f"only square matrices have an inverse, not {list(A.shape)}")
    if A.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise RuntimeError(f"linalg_inv_ex is not defined for {A.dtype}")
    n = A.shape[-1]
    wide = torch.complex128 if A.is_complex() else torch.float64
    work = A.to(wide).reshape(-1, n, n) if A.numel() else A.to(wide).reshape(0, n, n)
    work = torch.cat([work, torch.eye(n, dtype=wide).expand(len(work), n, n)], -1)
    info = torch.zeros(len(work), dtype=torch.int32)
    every = torch.arange(len(work))
    for column in range(n):
        pivot = work[:, column:, column].abs().argmax(-1) + column
        chosen, here = work[every, pivot].clone(), work[:, column].clone()
        work[every, pivot] = here
        work[:, column] = chosen
        head = work[:, column, column]
        info = torch.where((head == 0) & (info == 0), column + 1, info).int()
        work[:, column] = work[:, column] / head.unsqueeze(-1)
        factor = work[:, :, column].clone()
        factor[:, column] = 0
        work = work - factor.unsqueeze(-1) * work[:, column].unsqueeze(1)
    if check_errors and bool((info != 0).any()):
        raise torch.linalg.LinAlgError("a matrix is singular and has no inverse")
    return work[..., n:].reshape(A.shape).to(A.dtype).contiguous(), info.reshape(A.shape[:-2]).to(torch.int32)
