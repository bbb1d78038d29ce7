"""A diffusion transformer as a fork of a Megatron code base might write it, each file in another style."""
