"""An engine's side of leases: its agent, what it lends of its pool, what it borrows from neighbours."""
