"""The checkpointed sweep over layers: forward, and backward with a visitor."""
