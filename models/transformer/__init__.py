"""Decoders: attention, MLPs, experts, and the stacks of layers made of them."""
