"""Tiny transformers models with weights under which the recurrent state matters; random, nothing is fetched.

With the initialisation of transformers the state of such models hardly reaches their logits, and a test of it would
pass whatever the state is. These weights keep activations of order one; `test_state_matters` checks it.
"""

import torch
import transformers

COMMON = dict(vocab_size=64, hidden_size=32, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
              eos_token_id=None)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2)
LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=12, mamba_expand=2, mamba_chunk_size=8)
GDN = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

SETTINGS = {
    "Mamba2": dict(num_heads=8, head_dim=8, expand=2, state_size=12, n_groups=2, num_hidden_layers=3, chunk_size=8),
    "Bamba": dict(**ATTENTION, **MAMBA2, intermediate_size=48, num_hidden_layers=4, attn_layer_indices=[1],
                  mamba_n_groups=2),
    "NemotronH": dict(**ATTENTION, layers_block_type=["mamba", "moe", "mamba", "attention", "mamba"], head_dim=8,
                      mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=12, chunk_size=8,
                      intermediate_size=48, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
                      n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1),
    "Qwen3Next": dict(**ATTENTION, **GDN, **MOE, head_dim=16, intermediate_size=48, num_hidden_layers=4,
                      layer_types=LAYERS),
    "KimiLinear": dict(num_attention_heads=4, num_key_value_heads=4, intermediate_size=48, moe_intermediate_size=16,
                       num_hidden_layers=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                       num_local_experts=4, num_experts_per_tok=2, linear_head_dim=8, linear_num_heads=4,
                       layer_types=LAYERS, model_max_length=512),
    "GraniteMoeHybrid": dict(**ATTENTION, **MAMBA2, intermediate_size=32, num_hidden_layers=4, num_local_experts=4,
                             num_experts_per_tok=2, shared_intermediate_size=32, layer_types=LAYERS, mamba_n_groups=1),
    "FalconH1": dict(**ATTENTION, **MAMBA2, intermediate_size=48, num_hidden_layers=3, head_dim=8, mamba_d_ssm=64,
                     mamba_n_groups=2, ssm_in_multiplier=0.8, ssm_multipliers=[0.9, 1.1, 0.7, 1.2, 1.3]),
    "Zamba2": dict(num_attention_heads=4, num_key_value_heads=4, n_mamba_heads=8, mamba_d_state=12, mamba_ngroups=2,
                   intermediate_size=48, num_hidden_layers=4, chunk_size=8, num_mem_blocks=1, adapter_rank=4,
                   layers_block_type=["linear_attention", "linear_attention", "hybrid", "linear_attention"]),
    "Qwen3_5": dict(**ATTENTION, **GDN, head_dim=16, intermediate_size=48, num_hidden_layers=4, layer_types=LAYERS),
    "Qwen3_5Moe": dict(**ATTENTION, **GDN, **MOE, head_dim=16, num_hidden_layers=4, layer_types=LAYERS),
    "OlmoHybrid": dict(**ATTENTION, **GDN, intermediate_size=48, num_hidden_layers=4, layer_types=LAYERS),
}
FAMILIES = list(SETTINGS)


def config_of(name: str, **changes):
    kind = getattr(transformers, f"{name}TextConfig" if name.startswith("Qwen3_5") else f"{name}Config")
    return kind(**{**COMMON, **SETTINGS[name], **changes})


def build(name: str, seed: int = 0, dtype=torch.float32, **changes):
    """A model of the family, in eval mode."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config_of(name, **changes))
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if parameter_name.endswith("A_log"):
                p.uniform_(0.05, 1).log_()
            elif parameter_name.endswith("dt_bias"):
                p.uniform_(-3, -0.5)
            elif "conv1d" in parameter_name:
                p.normal_(std=0.5 if p.dim() == 3 else 0.1)
            elif parameter_name.endswith(".D"):
                p.normal_(1, 0.2)
            elif "embed" in parameter_name:
                p.normal_()
            elif p.dim() >= 2:
                p.normal_(std=p.shape[-1] ** -0.5)
            elif "norm" in parameter_name:
                p.add_(torch.randn_like(p) * 0.1)
    return model.eval().to(dtype)


def prompts(rows: int, length: int, padded: bool = False, seed: int = 1):
    """Random token ids [rows, length] and their mask; `padded`: rows begin with different numbers of padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(1, rows):
            mask[row, : (5 * row) % (length - 2)] = 0
    return ids * mask, mask


def positions(model, at: int, count: int, rows: int) -> dict:
    """position_ids for models that take them: some count from 0 at every direct call."""
    import inspect

    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.arange(at, at + count).expand(rows, -1).contiguous()}


def feed(model, cache, ids, chunks: list[int], step=None) -> torch.Tensor:
    """Logits [rows, sum of chunks, vocabulary] of ids in forwards of so many tokens each, with a cache."""
    outputs, at = [], 0
    for count in chunks:
        places = positions(model, at, count, ids.shape[0])
        call = model if step is None or not outputs else step
        outputs.append(call(ids[:, at : at + count].contiguous(), cache=cache, use_cache=True, **places).logits)
        at += count
    return torch.cat(outputs, 1)
