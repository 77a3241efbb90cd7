"""Profiles what a model needs or can spare: rates within goals, batches, steps and swap space (AQUA, section 4)."""
