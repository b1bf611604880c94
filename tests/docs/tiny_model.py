# SPDX-License-Identifier: Apache-2.0
"""A model that loads in a moment: Qwen3's architecture with two small layers."""

import json
from pathlib import Path

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "vocab_size": 4096,
}


def write_config(folder: Path) -> Path:
    """The folder, with a config.json."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_checkpoint(folder: Path) -> Path:
    """The folder, with a config.json and weights that are 0.02 throughout."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, head = (
        CONFIG[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    heads, groups = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_norm.weight": (head,),
            f"{at}self_attn.k_norm.weight": (head,),
            f"{at}self_attn.q_proj.weight": (heads * head, hidden),
            f"{at}self_attn.k_proj.weight": (groups * head, hidden),
            f"{at}self_attn.v_proj.weight": (groups * head, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads * head),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    weights = {
        name: torch.full(shape, 0.02, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return write_config(folder)
