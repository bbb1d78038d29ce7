"""Free functions that other files import."""


def modulate(x, shift, scale):
    """Samples first: the modulation has no token axis yet."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def add_gated(x, update, gate):
    return x + gate.unsqueeze(1) * update
