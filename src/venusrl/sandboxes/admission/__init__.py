"""PURE: which sandbox may run where, by footprint; the baselines beside it."""
