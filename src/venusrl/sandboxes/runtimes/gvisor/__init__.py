"""Sandboxes in gVisor, where runsc is installed."""
