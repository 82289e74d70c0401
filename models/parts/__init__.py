"""What decoders are made of: attention, MLPs, experts, norms, caches, the decoder."""
