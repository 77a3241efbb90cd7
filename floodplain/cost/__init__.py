"""What a step or a transfer costs. Pure; numpy allowed."""
