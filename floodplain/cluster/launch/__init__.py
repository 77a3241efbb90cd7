"""Processes of instances: started, restarted, ended with the router; on this machine or a Ray cluster."""
