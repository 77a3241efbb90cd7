"""Where models are placed in a cluster, so that consumers of memory sit beside producers of it (AQUA, section 5)."""
