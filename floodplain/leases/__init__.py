"""Leases of a neighbour's memory: the rules of the coordinator (``book``) and of members (``lender``, ``borrower``).

Sans-IO. ``states`` has the one table of what can happen to a lease; docs/design/005-leases.md says why it is safe.
"""
