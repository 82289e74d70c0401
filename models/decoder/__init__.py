"""Decoders: attention and its cache, MLPs, experts, and the stacks of layers made of
them.
"""
