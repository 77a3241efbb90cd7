"""Models as they lie on disk, or made up: configuration, weights, tokenizer."""
