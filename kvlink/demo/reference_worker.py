"""The worker that answers every prompt the ordinary way: stock ``generate`` with its own cache."""

from __future__ import annotations

import time

from kvlink.demo.channel import Channel
from kvlink.demo.messages import Answer, Generate
from kvlink.demo.model import LanguageModel

__all__ = ["run_reference"]


def run_reference(language_model: LanguageModel, channel: Channel) -> None:
    """Answer each ``Generate``."""
    for message in channel:
        if isinstance(message, Generate):
            channel.send(_generate(language_model, message))


def _generate(language_model: LanguageModel, message: Generate) -> Answer:
    import torch
    from transformers import GenerationConfig

    model = language_model.model
    own = model.generation_config
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=message.max_new_tokens,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
    )
    prompt = torch.tensor([language_model.encode(message.prompt)], dtype=torch.int64)
    start = time.perf_counter()
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)
    generate_s = time.perf_counter() - start
    tokens = output[0, prompt.shape[1] :].tolist()
    return Answer(
        request=message.request,
        prompt_tokens=prompt.shape[1],
        tokens=tokens,
        text=language_model.text_of(tokens),
        generate_s=generate_s,
    )
