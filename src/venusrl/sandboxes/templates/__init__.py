"""Templates: what sandboxes start from. ``roots`` names directories of this machine; the rest keeps images."""
