"""Sandboxes as QEMU virtual machines: clones of one template memory, movable while they run."""
