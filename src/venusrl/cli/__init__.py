"""The ``venusrl`` command: one module a command group. Parses, calls, prints; decides nothing of a run."""
