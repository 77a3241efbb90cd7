"""The emulated device: memory in a shared file, locks that end with their process, and paced links."""
