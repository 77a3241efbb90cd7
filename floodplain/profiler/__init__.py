"""What a model needs or can spare: the highest rate within goals, batches, steps and swap space (AQUA, section 4)."""
