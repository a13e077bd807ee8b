"""E2B's in-sandbox services (process, filesystem, files), translated onto the agent."""
