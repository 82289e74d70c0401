"""Measurements of this library beside its peers; run from a checkout."""
