"""The PEER tier of a loop with real bytes: granted, used, recalled, emptied, torn away; every block proven or missed."""
