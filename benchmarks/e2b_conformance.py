"""The official E2B SDK's own test suite against our service: what passes, by test id.

    python benchmarks/e2b_conformance.py --tests CHECKOUT/packages/python-sdk [--python VENV/bin/python]
        [--only 'tests/sync/*'] [--out docs/e2b-conformance.json] [--update]

Starts `venusrl env serve` (or uses `--api-url` with `--key`), runs the suite, sync and async, with the `e2b` that
`--python` has, and compares with the committed results: a test that passed must pass. `--update` writes them.

The suite is fetched by whoever measures (github.com/e2b-dev/E2B, commit in COMMITS) and is never part of this
repository. Tests reach `https://{port}-{sandbox}.{domain}` through a TLS front with an authority of its own that this
script starts, as an owner of a domain would have one; names of the domain resolve to loopback (e2b_conformance_plugin).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import fnmatch
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from e2b_exclusions import EXCLUDED
from e2b_service import Service, started

ROOT = Path(__file__).resolve().parents[1]
DOMAIN = "sandboxes.test"
COMMITS = {
    "2.45.0": "f6014f17c",
    "2.63.0": "b8029973aa7da5f741f7bb1a9f833b38a0885438",
}
"""Where each SDK's tests are from. The suite of 2.63.0 itself was not to be had: that of 2.45.1 runs with it."""


IMAGES = ("ubuntu:22.04",)
"""What the suite builds on and a registry would have: imported under that name, of this machine's own packages."""
COLUMNS = ("passed", "failed", "skipped", "excluded")


def digest(tests: Path) -> str:
    """Of every file of the suite, names included."""
    total = hashlib.sha256()
    for path in sorted(tests.rglob("*.py")):
        total.update(path.relative_to(tests).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def reason(test: str, sdk: str) -> str | None:
    """Why a test is not run; None = it is. The first pattern that fits decides."""
    fits = (why for pattern, sdks, why in EXCLUDED if sdk.startswith(sdks) and fnmatch.fnmatchcase(test, pattern))
    return next(fits, None) or None


def certificate(folder: Path) -> tuple[Path, Path]:
    """For every name of the domain, signed by itself."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={DOMAIN}"]
    command += ["-addext", f"subjectAltName=DNS:*.{DOMAIN},DNS:{DOMAIN}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


@contextlib.asynccontextmanager
async def tls_front(folder: Path, front: str, host: str, port: int) -> AsyncIterator[Path]:
    """Terminates TLS before the service, on port 443 of ``front``; gives the authority's certificate."""
    key, cert = certificate(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        await asyncio.gather(carry(reader, back), carry(there, writer))

    try:
        server = await asyncio.start_server(serve, front, 443, ssl=context)
    except PermissionError:
        raise SystemExit(
            "port 443 of loopback is needed: run as root, or lower net.ipv4.ip_unprivileged_port_start"
        ) from None
    async with server:
        yield cert


def environment(service: Service, front: str, authority: Path, files: dict[str, Path]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "E2B_API_KEY": service.key,
        "E2B_API_URL": service.url,
        "E2B_SANDBOX_URL": service.url,
        "E2B_DOMAIN": DOMAIN,
        "SSL_CERT_FILE": str(authority),
        "PYTHONPATH": str(ROOT / "benchmarks"),
        "CONFORMANCE_DOMAIN": DOMAIN,
        "CONFORMANCE_FRONT": front,
        **{f"CONFORMANCE_{name.upper()}": str(path) for name, path in files.items()},
    }


async def run_suite(args: argparse.Namespace, sdk: str, service: Service, folder: Path) -> dict[str, dict[str, Any]]:
    """Every test that is not excluded: its outcome, seconds and, where it failed, why."""
    files = {"results": folder / "results.jsonl", "excluded": folder / "excluded.json"}
    # Without the checkout's own e2b beside them: the installed one is measured.
    copied(args.tests, folder / "suite")
    collected = await pytest(args, folder, ["--collect-only"], environment(service, args.front, folder / "none", files))
    files["excluded"].write_text(json.dumps([test for test in collected if reason(test, sdk) is not None]))
    where = urlsplit(service.url)
    async with tls_front(folder, args.front, where.hostname or "127.0.0.1", where.port or 80) as authority:
        return await pytest(args, folder, ["--timeout", "120"], environment(service, args.front, authority, files))


async def pytest(
    args: argparse.Namespace, folder: Path, options: list[str], variables: dict[str, str]
) -> dict[str, dict[str, Any]]:
    command = [args.python, "-m", "pytest", "-q", "-p", "e2b_conformance_plugin", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", *options]
    process = await asyncio.create_subprocess_exec(
        *command, "tests", cwd=folder / "suite", env={**variables, "CONFORMANCE_ONLY": args.only}, stdout=sys.stderr
    )
    await process.wait()
    return written(Path(variables["CONFORMANCE_RESULTS"]))


def copied(checkout: Path, to: Path) -> None:
    shutil.copytree(checkout / "tests", to / "tests")
    shutil.copy(checkout / "pytest.ini", to)


def written(results: Path) -> dict[str, dict[str, Any]]:
    """What the plugin wrote, by test id; the file is gone afterwards."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    results.unlink()
    return {line.pop("test"): line for line in lines}


def revision() -> str:
    """Of this checkout; "+" where it has changes that no revision has."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "src"], check=True, capture_output=True, text=True)
    return found.stdout.strip() + ("+" if changed.stdout else "")


def version(python: str) -> str:
    """Of the SDK that this Python has."""
    script = "import importlib.metadata as m; print(m.version('e2b'))"
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


def compare(sdk: str, found: dict[str, Any], committed: dict[str, Any], only: str) -> list[str]:
    """Tests that passed once and do not now."""
    before = committed.get("sdks", {}).get(sdk, {}).get("passed", [])
    return [
        test for test in before if fnmatch.fnmatchcase(test, only) and found.get(test, {}).get("outcome") != "passed"
    ]


def report(sdk: str, args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    excluded: dict[str, str | None] = {}
    outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for test, result in sorted(found.items()):
        outcome = result["outcome"]
        if outcome == "uncollectable":
            outcome = "excluded" if reason(test, sdk) else "failed"
        if outcome == "excluded":
            excluded[test] = reason(test, sdk)
        else:
            outcomes[outcome].append(test)
    counts = {name: len(tests) for name, tests in outcomes.items()} | {"excluded": len(excluded)}
    return {
        "tests_commit": COMMITS.get(sdk, "unknown"),
        "tests_sha256": digest(args.tests / "tests"),
        "measured": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "service": args.revision or revision(),
        "counts": counts,
        **outcomes,
        "excluded": excluded,
    }


def merged(before: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """A part that was measured again, put into the whole it is of."""
    if before.get("tests_sha256") != made["tests_sha256"]:
        raise SystemExit("the committed results are of another suite: measure all of it")
    names = ("passed", "failed", "skipped")
    again = {test for name in names for test in made[name]} | set(made["excluded"])
    lists = {name: sorted({*made[name], *(t for t in before[name] if t not in again)}) for name in names}
    excluded = {t: why for t, why in before["excluded"].items() if t not in again} | made["excluded"]
    counts = {name: len(tests) for name, tests in lists.items()} | {"excluded": len(excluded)}
    return {**made, **lists, "excluded": dict(sorted(excluded.items())), "counts": counts}


def document(results: dict[str, Any]) -> str:
    """The results as a page."""
    lines = [
        "# Conformance with E2B",
        "",
        "The official Python SDK's own test suite, sync and async, run by `benchmarks/e2b_conformance.py` against",
        "the service that `venusrl env serve` runs (`manager/serve.py`), `namespace` runtime. The suite is fetched for",
        "the run and is not part of this repository. A test that passed must go on passing; results by id are in",
        "[e2b-conformance.json](e2b-conformance.json). The rows of 2.63.0 are of 2.45.1's suite with that SDK: its own",
        "was not to be had, and most exclusions there are tests that look into changed insides of the SDK. Images that",
        f"the suite wants of a registry ({', '.join(IMAGES)}) are templates imported under those names, of the",
        "machine's own packages.",
        "",
        "| SDK | tests from commit | passed | failed | skipped by the suite | excluded | measured | service at |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sdk, one in sorted(results["sdks"].items()):
        counts = one["counts"]
        row = [sdk, f"`{one['tests_commit'][:9]}`", *(str(counts[name]) for name in COLUMNS)]
        row += [one.get("measured", ""), f"`{one['service']}`" if "service" in one else ""]
        lines.append("| " + " | ".join(row) + " |")
    for sdk, one in sorted(results["sdks"].items()):
        lines += ["", f"## Excluded with {sdk}", ""]
        for why in sorted(set(one["excluded"].values())):
            lines += [f"{why}:", ""]
            lines += [f"- `{test}`" for test, given in one["excluded"].items() if given == why] + [""]
        if one["failed"]:
            lines += ["", f"## Failed with {sdk}", "", *(f"- `{test}`" for test in one["failed"])]
    return "\n".join(lines).rstrip() + "\n"


async def measure(args: argparse.Namespace) -> int:
    sdk = version(args.python)
    with tempfile.TemporaryDirectory(prefix="venusrl-conformance-") as name:
        folder = Path(name)
        async with started(args.api_url, args.key, folder / "state", DOMAIN, IMAGES) as service:
            found = await run_suite(args, sdk, service, folder)
    committed = json.loads(args.out.read_text()) if args.out.exists() else {"sdks": {}}
    fallen = compare(sdk, found, committed, args.only)
    made = report(sdk, args, found)
    print(json.dumps({"sdk": sdk, **made["counts"], "fallen": fallen}, indent=2))
    for test in made["failed"]:
        print(f"FAILED {test}: {found[test].get('why', '')[:300]}")
    if args.update:
        before = committed["sdks"].get(sdk, {})
        committed["sdks"][sdk] = made if args.only == "*" else merged(before, made)
        args.out.write_text(json.dumps(committed, indent=1, sort_keys=True) + "\n")
        args.out.with_suffix(".md").write_text(document(committed))
    return 1 if fallen or not found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="packages/python-sdk of a checkout")
    parser.add_argument("--python", default=sys.executable, help="a Python that has e2b and the suite's requirements")
    parser.add_argument("--api-url", default="", help="a service that runs; default: start one")
    parser.add_argument("--key", default="", help="its API key")
    parser.add_argument("--front", default="127.83.0.1", help="the loopback address whose port 443 speaks TLS")
    parser.add_argument("--only", default="*", help="a pattern of test ids")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "e2b-conformance.json")
    parser.add_argument("--revision", default="", help="of the service that is measured; default: this checkout's")
    parser.add_argument("--update", action="store_true")
    sys.exit(asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
