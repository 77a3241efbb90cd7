"""Kernels for the CPU, compiled on the machine that runs them; without a compiler torch does their work, slower."""
