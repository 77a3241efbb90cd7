"""C++ for the CPU, compiled on the machine that runs it, and the copies that use it."""
