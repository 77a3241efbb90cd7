"""The router: admits instances, routes requests, detects stalls, and serves the routes of operators."""
