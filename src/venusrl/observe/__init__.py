"""What people and programs see of a run: events, scalars, live view, plots, summary. Knows ``types`` only."""
