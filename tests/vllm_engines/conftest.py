"""Real vLLM engines for the tests of this folder, which needs the environment of `make test-vllm`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import vllm_models
from helpers.vllm_engine import Start
from helpers.vllm_fleet import START_TIMEOUT_S, RemoteEngine, forking


class Models:
    """Checkpoints by name, each saved once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> str:
        """Where `name` is; it is made first if need be."""
        path = self._folder / name
        if not path.exists():
            saving = forking().Process(target=vllm_models.save, args=(name, path))
            saving.start()
            saving.join(START_TIMEOUT_S)
            assert saving.exitcode == 0, f"{name} was not saved: {saving.exitcode}"
        return str(path)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models."""
    return Models(tmp_path_factory.mktemp("models"))


class Fleet:
    """Engines of one module of tests. They start together, and at the end each must exit with 0."""

    def __init__(self, models: Models, logs: Path) -> None:
        self._models = models
        self._logs = logs
        self._running: dict[str, RemoteEngine] = {}

    def begin(
        self,
        name: str,
        connector: dict[str, Any] | None = None,
        *,
        model: str = "llama",
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> RemoteEngine:
        """Start an engine, without waiting for it."""
        start = Start(
            name=name,
            model=self._models.path(model),
            log=str(self._logs / f"{name}.log"),
            connector=connector,
            options=options,
            environment=environment or {},
        )
        self._running[name] = engine = RemoteEngine(start)
        return engine

    def kill(self, engine: RemoteEngine) -> None:
        """Let an engine die; its exit code is nobody's business then."""
        del self._running[engine.start.name]
        engine.kill()

    def stop(self, engine: RemoteEngine) -> None:
        """End an engine before the others; it must exit with 0."""
        del self._running[engine.start.name]
        code = engine.stop()
        assert code == 0, f"{engine} ended with {code}"

    def close(self) -> None:
        """Stop them all, at the same time."""
        for engine in self._running.values():
            engine.ask_to_stop()
        codes = {name: engine.stop() for name, engine in self._running.items()}
        wrong = [engine.last_words() for name, engine in self._running.items() if codes[name] != 0]
        assert not wrong, f"exit codes {codes} (None: it had to be killed)\n" + "\n\n".join(wrong)


@pytest.fixture(scope="module")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A place to start engines in."""
    found = Fleet(models, tmp_path_factory.mktemp("engines"))
    try:
        yield found
    finally:
        found.close()
