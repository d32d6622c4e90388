"""The target models and the block drafter, and the loader that fills them from checkpoints."""
