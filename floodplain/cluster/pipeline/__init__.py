"""Stages of a pipeline: forming it, its links, and the execution of plans through it."""
