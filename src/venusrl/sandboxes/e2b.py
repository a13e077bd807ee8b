"""A run's sandboxes at any E2B endpoint: ours (``venusrl env serve``) or another.

Owns: ``E2BSandboxes``, which implements ``protocol.Sandboxes`` over ``e2b_wire``.

Must not know: which service is at the other end.

Guarantees: those of the protocol. What E2B does not do itself is done here: processes that a command left behind are
ended by a mark in their environment, output is capped here, a cancelled create asks for its answer with the same
Idempotency-Key and removes what was made. Sandboxes live ``ttl_s`` at a time and are extended while this object is
open: a driver that dies leaks none for longer.

Not E2B's: limits a sandbox. Memory, processors and disk are the template's. Whether a command ended for want of memory
or disk is known of our own service only.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import posixpath
import secrets
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from venusrl.sandboxes.e2b_wire import Ended, Made, Printed, Wire
from venusrl.sandboxes.protocol import BadPath, CommandResult, Limits, Mount, SandboxError, SandboxGone
from venusrl.sandboxes.runtimes.namespace.output import Capture

_log = logging.getLogger(__name__)
_MARK = "VENUSRL_COMMAND"
_CREATE_S = 120.0
_CALL_S = 60.0
_TIDY_S = 15.0
_AT_ONCE = 8
_SWEEP = """
n=0
while [ $n -lt 5 ]; do
  found=
  for e in /proc/[0-9]*/environ; do
    p=${e#/proc/}; p=${p%/environ}
    [ "$p" = "$$" ] && continue
    if grep -qs "$MARKED" "$e"; then kill -9 "$p" 2>/dev/null && found=1; fi
  done
  [ -z "$found" ] && break
  n=$((n+1))
done
"""
_WRAPPER = '/bin/sh -c "$1" </dev/null &\nwait $!\ncode=$?\nMARKED=$2\n' + _SWEEP + "exit $code\n"
_TEMPLATES = {"host": "base"}
"""A run's ``host`` is any Linux with a shell and Python; mounts need a root that can be written to."""
_KEPT = frozenset(
    {"/", "/bin", "/dev", "/etc", "/home", "/lib", "/logs", "/proc", "/sys", "/tmp", "/usr", "/var", "/work"}
)
"""What a mount must not take the place of: E2B has none, so that what is in the way is removed."""
_PLACES = "mkdir -p /work /logs && chmod 1777 /work /logs"


class E2BSandboxes:
    """Implements ``Sandboxes``. Use it as an asynchronous context manager, or ``await close()``."""

    def __init__(
        self,
        api_url: str,
        api_key: str,
        *,
        sandbox_url: str = "",
        user: str = "root",
        ttl_s: int = 300,
        templates: Mapping[str, str] = _TEMPLATES,
    ) -> None:
        """``sandbox_url``: one address for all sandboxes, as E2B_SANDBOX_URL. ``user``: whose commands and files.
        ``templates``: what a run's templates are called there (others have the same name)."""
        self._wire = Wire(api_url, api_key, sandbox_url)
        self._user = user
        self._ttl_s = ttl_s
        self._templates = dict(templates)
        self._made: dict[str, tuple[Made, Limits]] = {}
        self._tidying: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> E2BSandboxes:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove every sandbox of ours."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(sandbox: str) -> None:
            async with room:
                await self.kill(sandbox)

        results = await asyncio.gather(*(one(name) for name in list(self._made)), return_exceptions=True)
        if self._tidying:
            await asyncio.wait(self._tidying)
        await self._wire.close()
        for error in results:
            if isinstance(error, BaseException):
                _log.warning("a sandbox could not be removed (it ends within %s s): %s", self._ttl_s, error)

    # The protocol

    async def create(self, template: str, limits: Limits, metadata: dict[str, str]) -> str:
        repeat = secrets.token_hex(16)
        asked = asyncio.create_task(
            self._wire.create(self._templates.get(template, template), self._ttl_s, metadata, repeat, _CREATE_S),
            name="create a sandbox",
        )
        try:
            made = await asyncio.shield(asked)
        except asyncio.CancelledError:
            # What was asked for may be made, now or soon: its answer is awaited, then undone.
            await self._tidied(self._abandon(asked))
            raise
        self._made[made.id] = (made, limits)
        try:
            await self._prepare(made)
        except BaseException:  # whatever it was, a cancelled create too: nothing stays
            del self._made[made.id]
            await self._tidied(self._remove(made.id))
            raise
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="keep sandboxes alive")
        return made.id

    async def run(
        self,
        sandbox: str,
        command: str,
        *,
        timeout_s: float | None = None,
        env: dict[str, str] | None = None,
        mounts: tuple[Mount, ...] = (),
        cwd: str = "/work",
    ) -> CommandResult:
        made, limits = self._known(sandbox)
        timeout = limits.command_timeout_s if timeout_s is None else timeout_s
        for mount in mounts:
            await self._lend(made, mount)
        try:
            return await self._run(made, limits, command, timeout, env or {}, cwd)
        finally:
            if mounts:
                targets = " ".join(_quoted(mount.target) for mount in mounts)
                await self._tidied(self._quietly(made, f"chmod -R u+w {targets}; rm -rf {targets}"))

    async def write(self, sandbox: str, files: dict[str, bytes]) -> None:
        made, _ = self._known(sandbox)
        for path, data in files.items():
            await self._wire.write(made, self._user, _placed(path), data, _CALL_S)

    async def read(self, sandbox: str, path: str, max_bytes: int = 1 << 20) -> bytes:
        made, _ = self._known(sandbox)
        return await self._wire.read(made, self._user, _placed(path), max_bytes, _CALL_S)

    async def kill(self, sandbox: str) -> None:
        self._made.pop(sandbox, None)
        await self._wire.kill(sandbox, _CALL_S)

    # Inside

    def _known(self, sandbox: str) -> tuple[Made, Limits]:
        found = self._made.get(sandbox)
        if found is None:
            raise SandboxGone(f"there is no sandbox {sandbox}")
        return found

    async def _run(
        self, made: Made, limits: Limits, command: str, timeout_s: float, env: dict[str, str], cwd: str
    ) -> CommandResult:
        mark = f"{_MARK}={secrets.token_hex(12)}"
        output = Capture(limits.output_bytes)
        began = time.monotonic()
        code, timed_out = 137, False
        args = ["/bin/sh", "-c", _WRAPPER, "sh", command, mark]
        marked = {**env, _MARK: mark.partition("=")[2]}
        ended, cause = False, ""
        try:
            async with asyncio.timeout(
                timeout_s + _TIDY_S
            ):  # the service keeps the time; this is for one that does not
                async for event in self._wire.start(made, self._user, args, marked, cwd, timeout_s):
                    if isinstance(event, Printed):
                        output.feed(event.data)
                    elif isinstance(event, Ended):
                        code, ended, cause = event.code, True, event.cause
        except TimeoutError:
            timed_out = True
        except SandboxGone:
            self._made.pop(made.id, None)
            raise
        finally:
            if not ended and made.id in self._made:
                await self._tidied(self._quietly(made, f"MARKED={_quoted(mark)}\n{_SWEEP}"))
        wall_s = time.monotonic() - began
        return CommandResult(
            code,
            output.text(),
            output.dropped,
            wall_s,
            timed_out=timed_out,
            out_of_memory=cause == "out_of_memory" and not timed_out,
            out_of_disk=cause == "out_of_disk" and not timed_out,
        )

    async def _prepare(self, made: Made) -> None:
        """The directories that the protocol promises."""
        code, text = await self._plain(made, _PLACES)
        if code != 0:
            raise SandboxError(f"the template cannot have /work and /logs made: {text.strip()}")

    async def _lend(self, made: Made, mount: Mount) -> None:
        """E2B binds nothing: a copy, read-only, for as long as the command."""
        packed = await asyncio.to_thread(_packed, Path(mount.source))
        if posixpath.normpath(mount.target) in _KEPT or not mount.target.startswith("/"):
            raise BadPath(f"{mount.target} cannot be mounted over")
        target, parcel = _quoted(posixpath.normpath(mount.target)), f"/tmp/.lent-{secrets.token_hex(8)}.tar"
        code, text = await self._plain(made, f"rm -rf {target} && mkdir -p {target}")
        if code != 0:
            raise BadPath(f"{mount.target} cannot be mounted over: {text.strip()}")
        await self._wire.write(made, "root", parcel, packed, _CALL_S)
        code, text = await self._plain(
            made, f"tar -xf {parcel} -C {target} && rm {parcel} && chmod -R a-w,a+rX {target}"
        )
        if code != 0:
            raise SandboxError(f"{mount.source} could not be put into the sandbox: {text.strip()}")

    async def _plain(self, made: Made, script: str) -> tuple[int, str]:
        """A command of ours, as root."""
        output, code = Capture(4096), 137
        async for event in self._wire.start(made, "root", ["/bin/sh", "-c", script], {}, "/", _CALL_S):
            if isinstance(event, Printed):
                output.feed(event.data)
            elif isinstance(event, Ended):
                code = event.code
        return code, output.text()

    async def _quietly(self, made: Made, script: str) -> None:
        try:
            await self._plain(made, script)
        except (SandboxError, TimeoutError) as error:
            _log.info("tidying up in %s: %s", made.id, error)

    async def _abandon(self, asked: asyncio.Task[Made]) -> None:
        try:
            made = await asked
        except SandboxError:
            return  # nothing was made, or its time to live ends it
        await self._remove(made.id)

    async def _remove(self, sandbox: str) -> None:
        try:
            await self._wire.kill(sandbox, _CALL_S)
        except SandboxError as error:
            _log.warning("%s could not be removed (it ends within %s s): %s", sandbox, self._ttl_s, error)

    async def _tidied(self, work: object) -> None:
        """Await ``work`` even while we are being cancelled; cancelled again, it goes on by itself."""
        assert asyncio.iscoroutine(work)
        task: asyncio.Task[None] = asyncio.create_task(work, name="tidy up")
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)
        await asyncio.shield(task)

    async def _keep(self) -> None:
        """Extend what lives. One that is gone is forgotten: its next use says so."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            for sandbox in list(self._made):
                try:
                    await self._wire.extend(sandbox, self._ttl_s, _CALL_S)
                except SandboxGone:
                    self._made.pop(sandbox, None)
                except SandboxError as error:
                    _log.warning("%s could not be kept alive: %s", sandbox, error)


def _placed(path: str) -> str:
    """Absolute; relative paths start at /work and stay there."""
    joined = posixpath.normpath(posixpath.join("/work", path))
    if not path.startswith("/") and not joined.startswith("/work/"):
        raise BadPath(f"{path!r} leads out of /work")
    return joined


def _packed(source: Path) -> bytes:
    if not source.is_dir():
        raise BadPath(f"{source} is no directory")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(source.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                archive.add(path, path.relative_to(source), recursive=False, filter=_anonymous)
    return buffer.getvalue()


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
