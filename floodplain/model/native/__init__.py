"""CPU kernels, compiled on the machine that runs them. Without a compiler torch is used instead, which is slower."""
