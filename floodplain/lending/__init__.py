"""An engine's side of leases: its agent, what it lends of its pool, and what it borrows."""
