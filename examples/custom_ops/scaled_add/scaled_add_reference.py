def scaled_add_reference(x, y, scale):
    return x + scale * y
