"""bmm: products elementwise, summed over the inner dimension."""


def bmm_kernel_impl(self, mat2):
    return (self.unsqueeze(-1) * mat2.unsqueeze(1)).sum(2)
