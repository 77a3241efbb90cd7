"""Floor 2: what every HTTP service here needs: listening, bearer secrets, the gate, error bodies."""
