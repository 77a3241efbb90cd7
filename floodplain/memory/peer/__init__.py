"""Memory on neighbours' devices: bytes within a lease, and slots of swap space in them."""
