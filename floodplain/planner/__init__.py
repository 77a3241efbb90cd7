"""Places models so that consumers of memory share servers with producers (AQUA, section 5)."""
