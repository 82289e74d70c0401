"""Layers over devices: a pipeline of stages, as a way to run the fold of a loss."""
