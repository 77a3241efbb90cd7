"""Floodplain inside engines that others wrote."""
