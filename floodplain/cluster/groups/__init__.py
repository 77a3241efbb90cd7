"""Groups of instances that drop layers, run as a pipeline and restore them (KunServe)."""
