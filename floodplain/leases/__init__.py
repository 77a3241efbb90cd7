"""Leases of another process's memory: the coordinator's rules (``book``, ``rules``) and members' (``member``).

Sans-IO. ``states`` has the one table of lease transitions; docs/design/005-leases.md explains why they are safe.
"""
