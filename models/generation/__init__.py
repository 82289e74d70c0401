"""Text generation: sampling, the key-value cache, decoding, and text as it is produced."""
