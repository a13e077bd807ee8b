"""The namespace runtime: bubblewrap, cgroups and seccomp, driven by one small launcher process a node."""
