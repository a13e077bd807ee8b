"""The trainer: pulls complete groups, takes one GRPO step a batch, publishes weights.

Runs as its own process (``launch.trainer_command``) and talks to the coordinator only over the trainer API
(``docs/architecture.md``) and through the run directory:

- ``recipe.json`` (written by the coordinator before the trainer starts) is the resolved recipe;
- ``checkpoints/v000000/model`` exists before the trainer's first request for a batch, and
  ``checkpoints/v%06d/model`` before it reports that version as trained;
- ``checkpoints/v%06d.keep`` (made by whoever reads a version for long) protects that version from pruning;
- exit code 0: the run is over (HTTP 410). ``errors.EXIT_FAILED``: the last line of stderr is the cause, and starting it
  again would change nothing. Anything else: a crash.

This package and ``launch`` import no torch; the other modules do.
"""
