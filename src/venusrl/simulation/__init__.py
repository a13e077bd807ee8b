"""The simulator: the real ``Scheduler`` on a virtual clock, with modelled engines, trainer, tools and sandboxes.

Owns: everything that turns a ``Scenario``, a ``Policy`` and a seed into a ``Result``. Must not know: the real planes.

Guarantees: deterministic (same arguments, same result, byte for byte); the same ordered tasks with the same scripts
for every policy, since a script depends on its place in the order and never on who asked for it first.
"""
