"""Floor 2: workloads: arrivals, lengths, traces, prompts, load client."""
