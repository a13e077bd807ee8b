"""What can go wrong with templates, beside ``TemplateNotFound``.

Owns: the errors and their stable reasons. A message names the mend.
"""

from __future__ import annotations

from venusrl.sandboxes.protocol import SandboxError


class BadTemplate(SandboxError):
    """What a template is to be made of cannot be used: a malformed archive, an instruction we do not know."""

    reason = "bad_template"


class TemplateTaken(SandboxError):
    """The name is reserved or belongs to somebody else."""

    reason = "template_taken"


class TemplateBusy(SandboxError):
    """Not now: a build runs, or the build was begun already."""

    reason = "template_busy"


class BuildFailed(SandboxError):
    """A step of a build failed. ``step`` is "base", its number from 1, or "finalize"."""

    reason = "build_failed"

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message)
        self.step = step
