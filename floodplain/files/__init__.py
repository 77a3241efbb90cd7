"""Files that users name: read within bounds, and every fault of one is one line."""
