"""Models from disk, or with random weights: configuration, weights, tokenizer."""
