"""Compact decoders of our own: the Llama family and OPT, for inference only."""
