"""Wrong on purpose: it computes in half precision, whatever the dtype promises."""


def scaled_add_kernel_impl(x, y, scale):
    if not x.is_floating_point():
        return x + scale * y
    return (x.half() + scale * y.half()).to(x.dtype)
