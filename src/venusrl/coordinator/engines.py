"""How engine workers come into being: as child processes of this machine, or already there.

Owns: ``LocalEngines`` and ``RemoteEngines``, both an ``EngineStarter``.

Must not know: why a worker is started, what it is used for.

Guarantees: a start that fails or is cancelled leaves no process behind; a process that dies while it starts is
reported at once with the last lines of its log, not after the time limit.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path

from venusrl.coordinator.errors import ProcessError
from venusrl.coordinator.processes import Command, ProcessExit, SupervisedProcess
from venusrl.coordinator.publish import Weights
from venusrl.recipe import Recipe
from venusrl.rollout.engines.causes import first_failure
from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.launch import EngineSettings, engine_command

_STOP_GRACE_S = 3.0
_REMOTE_READY_S = 60.0


class LocalEngine:
    """One engine process and its client. Implements ``RunningEngine``."""

    def __init__(self, process: SupervisedProcess, client: HttpEngineClient) -> None:
        self._process = process
        self.client = client

    async def wait_exit(self) -> str:
        return _told(await self._process.wait_exit())

    async def stop(self) -> None:
        try:
            await self._process.stop(_STOP_GRACE_S)
        finally:
            await self.client.close()

    async def ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises ProcessError when it dies first, EngineLost when it takes too long."""
        serves = asyncio.create_task(self.client.wait_ready(timeout_s))
        dies = asyncio.create_task(self._process.wait_exit())
        try:
            await asyncio.wait({serves, dies}, return_when=asyncio.FIRST_COMPLETED)
            if dies.done():
                raise ProcessError(_told(dies.result()))
            serves.result()
        finally:
            for task in (serves, dies):
                task.cancel()
            await asyncio.gather(serves, dies, return_exceptions=True)


class LocalEngines:
    """Starts engine processes of the recipe's kind, with a log file each."""

    def __init__(self, recipe: Recipe, logs: Path, api_key: str, *, nice: int = 0, slots: int | None = None) -> None:
        """``nice`` > 0 and another number of ``slots`` make an evaluation worker; only the others are pinned."""
        self._recipe = recipe
        self._logs = logs
        self._api_key = api_key
        self._nice = nice
        self._slots = slots or recipe.rollout.slots

    async def start(self, name: str, weights: Weights) -> LocalEngine:
        rollout = self._recipe.rollout
        settings = EngineSettings(
            model_path=str(weights.path),
            kv_capacity_tokens=rollout.kv_capacity_tokens,
            slots=self._slots,
            context_tokens=rollout.context_tokens,
            threads=rollout.threads,
            cpus=() if self._nice else rollout.cpus,
            nice=self._nice,
            dtype=self._recipe.model.dtype,
            seed=_seed(self._recipe.run.seed, name, weights.version),
        )
        launch = engine_command(rollout.engine, settings, port=_free_port(), api_key=self._api_key)
        process = SupervisedProcess(name, Command(launch.argv, launch.env), log_path=self._logs / f"{name}.log")
        client = HttpEngineClient(
            launch.base_url,
            self._api_key,
            version=weights.version,
            slots=self._slots,
            context_tokens=rollout.context_tokens,
            weight_timeout_s=rollout.weight_sync_timeout_s,
            generate_timeout_s=2 * rollout.turn_timeout_s,
        )
        engine = LocalEngine(process, client)
        try:
            await process.start()
            await engine.ready(launch.start_timeout_s)
        except BaseException:  # whatever it is, cancellation too: raised again below
            await engine.stop()
            raise
        return engine


class RemoteEngine:
    """An engine that somebody else runs. It is lost when it stops answering, which measurements notice."""

    def __init__(self, client: HttpEngineClient) -> None:
        self.client = client

    async def wait_exit(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        await self.client.close()


class RemoteEngines:
    """Takes the engines at ``urls`` (by worker name) into use; their weights are loaded by path, so the run
    directory has to be readable to them."""

    def __init__(self, recipe: Recipe, urls: Mapping[str, str], api_key: str) -> None:
        self._recipe = recipe
        self._urls = urls
        self._api_key = api_key

    async def start(self, name: str, weights: Weights) -> RemoteEngine:
        rollout = self._recipe.rollout
        client = HttpEngineClient(
            self._urls[name],
            self._api_key,
            slots=rollout.slots,
            context_tokens=rollout.context_tokens,
            weight_timeout_s=rollout.weight_sync_timeout_s,
            generate_timeout_s=2 * rollout.turn_timeout_s,
        )
        try:
            await client.wait_ready(_REMOTE_READY_S)
            await client.pause()
            try:
                await client.load_weights(str(weights.path.resolve()), weights.version)
            finally:
                await client.resume()
        except BaseException:  # whatever it is, cancellation too: raised again below
            await client.close()
            raise
        return RemoteEngine(client)


def _told(end: ProcessExit) -> str:
    """How a worker ended, with the error that vLLM wrote far above the last lines of its log."""
    failure = None if end.asked else first_failure(end.log_path)
    return f"{failure}; {end}" if failure else str(end)


def _free_port() -> int:
    """A port that was free a moment ago; a worker that finds it taken dies with that cause and is started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _seed(run_seed: int, name: str, version: int) -> int:
    """Sampling differs between workers and between sessions of a run, and is the same for the same start."""
    return (run_seed * 1_000_003 + version * 1_009 + sum(name.encode())) % 2**31
