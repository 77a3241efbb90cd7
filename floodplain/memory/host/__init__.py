"""The emulated device: memory in a shared file that a process may die with, locks, links that are paced."""
