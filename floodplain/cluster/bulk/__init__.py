"""KV blocks and parameters that one instance pulls from another, in chunks with digests."""
