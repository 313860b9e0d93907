"""Loading the model inside a worker, and the text's way to tokens and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LanguageModel", "TextStream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A causal model in float32 on the CPU, and its tokenizer."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, directory: Path, *, threads: int) -> LanguageModel:
        """Load from `directory` only, never from the network.

        The number of threads and the attention implementation are fixed, because both decide the
        order of floating-point sums: all workers must agree on them to agree on every token.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        return cls(model=model.eval(), tokenizer=tokenizer)

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens, that the model was made for."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 1 << 30))

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of `prompt` as a user's message, or as plain text if the model does not chat."""
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(prompt)["input_ids"])
        message = [{"role": "user", "content": prompt}]
        encoded = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def text_of(self, tokens: list[int]) -> str:
        """Return the text of `tokens` without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class TextStream:
    """Turns tokens into text piece by piece; a character that spans tokens waits for its last one."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._language_model = language_model
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """Return the text that `token` completes."""
        self._tokens.append(token)
        text = self._language_model.text_of(self._tokens)
        if text.endswith("\ufffd") or not text.startswith(self._shown):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece
