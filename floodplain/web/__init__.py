"""HTTP for any service: listening, bearer secrets, the gate, error bodies."""
