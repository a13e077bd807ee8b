"""Workloads: where the trajectories of a simulated run come from (see ``scenario.Workload``)."""
