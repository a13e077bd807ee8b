"""The one error of workloads: what was asked for cannot be had; the message says why."""


class WorkloadError(Exception):
    """An unknown workload or option, or a file that holds none."""
