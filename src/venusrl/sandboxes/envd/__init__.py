"""E2B's in-sandbox services (processes, files, ports), answered on the host through a sandbox's agent."""
