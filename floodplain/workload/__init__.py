"""Floor 2: requests from outside: arrivals, lengths, traces, prompts, load client."""
