"""The lease service: a coordinator's book in a store, served over HTTP, and the agent that talks to it."""
