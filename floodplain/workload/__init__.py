"""Workloads: arrivals, lengths, traces, prompts, load client."""
