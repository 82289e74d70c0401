"""From files to batches: what is read, how it is tokenized once, packed, mixed and put in order.

Each file is one station on the way: `files`, `records`, `tokenizers`, `token_cache`, `packing`,
`batch_stream`. The public names are those of `stacked_remat.training`.
"""
