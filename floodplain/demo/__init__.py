"""What ``floodplain demo`` shows: one burst in three ways, then memory lent between two servers."""
