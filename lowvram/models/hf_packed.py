"""Models of transformers that keep packed sequences of a row apart if their positions restart at 0.

Not all models that take positions do: opt, falcon and xglm attend to the sequence before, and recurrent models carry
their state over. tests/models/test_hf_packed.py tests each kind in the list, and opt, falcon and xglm.
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
