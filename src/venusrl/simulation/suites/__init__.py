"""Comparisons: which scenarios, which policies, how often, and what the figures say.

Owns: everything from a suite's name to its report. ``cells`` says what is compared, ``arms`` how each policy runs,
``records`` what one run leaves, ``tuning`` and ``runner`` carry a suite out, ``analysis``, ``tables`` and ``figures``
show it.
"""
