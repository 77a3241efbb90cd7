"""Files that users name: read within bounds, with every fault as a one-line error."""
