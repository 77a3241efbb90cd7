"""Running requests that move to another instance with their KV (Llumnix)."""
