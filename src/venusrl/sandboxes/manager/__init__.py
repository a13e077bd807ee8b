"""The environment manager: the E2B control plane over one or many hosts."""
