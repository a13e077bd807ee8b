"""The embedded engine: one model, one thread, continuous batching with a paged prefix cache, on the CPU.

``pages`` and ``batcher`` decide (pure), ``rows`` holds and attends, ``model`` computes, ``sampling`` draws,
``engine`` puts them together, ``server`` speaks HTTP. Only ``rows``, ``model``, ``sampling`` and ``engine``
import torch, and nothing outside this package imports those.
"""
