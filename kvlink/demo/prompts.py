"""The texts that the demo asks about, one a request."""

from __future__ import annotations

from pathlib import Path

from kvlink.errors import ConfigError

__all__ = ["make_document", "make_prompts"]

_BUILT_IN = (
    "Explain in three sentences why the sky is blue.",
    "Name the planets of the solar system, from the Sun outwards.",
    "Write a short story about a lighthouse keeper and a storm.",
    "What is the difference between a list and a tuple in Python?",
    "Give me a simple recipe for tomato soup.",
    "Who was Ada Lovelace, and what is she known for?",
    "How does a bicycle stay upright while it moves?",
    "Describe a walk through an old city at night.",
)


def make_document(*, entries: int) -> str:
    """Return a text of about 25 tokens an entry, and a question about it."""
    log = (
        f"Day {day}: the wind turned {('north', 'east', 'south', 'west')[day % 4]} at {day % 12 + 1} o'clock, "
        f"and the keeper counted {day * 7 % 90} ships before dark."
        for day in range(1, entries + 1)
    )
    return "\n".join(["The log of a lighthouse.", *log, "", "Summarize the log above in a few sentences."])


def make_prompts(*, prompt: str | None, file: Path | None, count: int) -> list[str]:
    """Return `count` prompts, no two alike.

    A document comes first and the question about it last. With a prompt or a document of the
    user's, the requests differ by a number at the end.

    Raises
    ------
    ConfigError
        If the file is not UTF-8 text, or there is nothing in the prompt or the file.
    OSError
        If the file cannot be read.
    """
    if prompt is None and file is None:
        rounds = [f" (Answer {number}.)" if number > 1 else "" for number in range(1, count // len(_BUILT_IN) + 2)]
        return [text + suffix for suffix in rounds for text in _BUILT_IN][:count]
    text = prompt or "Summarize the text above in a few sentences."
    if file is not None:
        text = f"{_read(file)}\n\n{text}"
    if not text.strip():
        raise ConfigError("run the demo: the prompt is empty; give --prompt some text")
    return [text if number == 1 else f"{text} (Answer {number}.)" for number in range(1, count + 1)]


def _read(file: Path) -> str:
    try:
        document = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"read {file}: it is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not document.strip():
        raise ConfigError(f"read {file}: there is no text in it")
    return document
