"""The data pipeline: files, records, tokenizers, token cache, packing, batch stream,
one after the other.
"""
