"""Models of transformers that keep sequences of one row apart, told by positions that begin anew.

Not all do that take such positions: opt, falcon and xglm see the sequence before, and so do those that carry a state
from token to token. tests/models/test_hf_packed.py tries each kind of the list, and the three.
"""

from __future__ import annotations

PACKED_KINDS = frozenset(  # model_type of their configurations
    {
        "codegen",
        "cohere",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
