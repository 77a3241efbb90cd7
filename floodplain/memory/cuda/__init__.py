"""A GPU by the CUDA driver: its memory, page by page, copies on streams, and neighbours' memory."""
