"""Text generation: sampling, decoding with a cache, and text as it is produced."""
