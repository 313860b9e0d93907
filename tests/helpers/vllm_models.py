"""Checkpoints of random weights that vLLM loads in a second: nothing is downloaded, and greedy answers wander."""

from __future__ import annotations

from pathlib import Path

from helpers.tiny_llama import save_model, save_tokenizer

# Heads as large as the attention kernels of a CPU want them, and two of them for KV, so that two ranks can share.
_SIZES = {
    "vocab_size": 260,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}


def save_llama(directory: Path) -> Path:
    """Every layer attends to everything: one group of KV."""
    return save_model(directory, **_SIZES)


def save_gemma(directory: Path) -> Path:
    """Three layers look back 64 tokens and one at everything, as in Gemma 3: several groups of KV."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        model = Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, sliding_window=64, layer_types=kinds))
        # Or what a token is would outweigh all that attention adds, and wrong KV would change no answer.
        model.model.embed_tokens.weight.mul_(0.05)
    return _save(model, directory)


def save_deepseek(directory: Path) -> Path:
    """Latents in place of keys and values, as in DeepSeek V2; no experts, which have no KV."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    latents = {"kv_lora_rank": 512, "q_lora_rank": None}
    latents |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes = {name: value for name, value in _SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    dense = {"first_k_dense_replace": _SIZES["num_hidden_layers"], "n_routed_experts": 2, "num_experts_per_tok": 1}
    dense |= {"n_shared_experts": 1, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**sizes, **latents, **dense, num_key_value_heads=4))
    return _save(model, directory)


def _save(model, directory: Path) -> Path:
    save_tokenizer(directory)
    model.eval().save_pretrained(directory)
    return directory


def save(name: str, directory: Path) -> None:
    """Save the model of that name. For a process that has imported torch already."""
    {"llama": save_llama, "gemma": save_gemma, "deepseek": save_deepseek}[name](directory)
