"""Processes of instances: started, restarted, ended with the front; on this machine or a Ray cluster."""
