"""Floor 4: the sans-IO step loop and the frozen view it shows to policies. Pure."""
