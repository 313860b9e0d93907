"""A random Llama of a few thousand weights, so that tests of the engine and the demo download nothing."""

from pathlib import Path

# Wide enough an initialisation that the greedy answer wanders, in place of repeating one token.
_CONFIG = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}


def make_model(**changes):
    """Return the model, the same at every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(20)
        return LlamaForCausalLM(LlamaConfig(**_CONFIG | changes)).eval()


def save_model(directory: Path, **changes) -> Path:
    """Save the model to `directory` with a tokenizer that has a token for each byte."""
    save_tokenizer(directory)
    make_model(**changes).save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer that has a token for each byte, and no template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
