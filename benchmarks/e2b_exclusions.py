"""Tests of the SDK's suite that are not run against our service, by pattern and with the reason.

Allowed reasons: it needs the internet, a cloud account of E2B's or a template registry; or the suite, older than the
SDK it runs with, looks into what that SDK changed (no service is involved then).
"""

from __future__ import annotations

INTERNET = "Needs the internet"
REGISTRY = "Needs a template registry or an image registry"
ACCOUNT = "Needs a cloud account"

EXCLUDED: tuple[tuple[str, str, str], ...] = ()
"""Pattern of test ids, start of the SDK versions it holds for ("" = all), reason."""
