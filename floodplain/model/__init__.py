"""A model from its files to logits: tokenizers, weights, networks, attention, the CPU's kernels, sampling."""
