"""Floor 2: what a step or a transfer costs. Pure; numpy allowed."""
