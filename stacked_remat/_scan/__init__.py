"""Fold, scan and map over a named axis."""
