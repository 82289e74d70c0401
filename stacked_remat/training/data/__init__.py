"""The data pipeline, from files to training batches.

Its steps, in order: `files`, `records`, `tokenizers`, `token_cache`, `packing`, `batch_stream`. The public
names are in `stacked_remat.training`.
"""
