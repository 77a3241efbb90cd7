"""The sans-IO step loop and the frozen view it shows to policies. Pure."""
