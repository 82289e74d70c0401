"""Scan over layers, at any depth and any context, in the memory you have."""
