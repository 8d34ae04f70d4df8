"""Training: batches, the loop, run folders, checkpoints and model folders."""
