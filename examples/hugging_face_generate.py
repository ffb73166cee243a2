"""A Hugging Face model that decodes through rings: `replace`, and then `generate` as ever, or a compiled step.

    python examples/hugging_face_generate.py

The model is made on the spot, tiny and with random weights, so that nothing is fetched; one of your own comes from
`AutoModelForCausalLM.from_pretrained(folder)`. Needs pip install 'torch_replay[hf]'.
"""

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from torch_replay.integrations.transformers import make_cache, replace

torch.manual_seed(0)
model = Qwen3NextForCausalLM(Qwen3NextConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, pad_token_id=0, eos_token_id=None)).eval()
prompt = torch.randint(1, 256, (2, 12))
settings = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
before = model.generate(prompt, **settings)

replace(model)
after = model.generate(prompt, **settings)
print("same tokens:", torch.equal(before, after))

# The same in a loop of one's own. A compiled step wants fixed addresses, so the attention layers get room for max_len.
step = torch.compile(model, fullgraph=True)
cache = make_cache(model, max_batch=2, max_len=64)
with torch.no_grad():
    tokens = [model(prompt, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)]
    for at in range(prompt.shape[1], prompt.shape[1] + 39):
        places = torch.full((2, 1), at)
        tokens.append(step(tokens[-1], cache=cache, use_cache=True, position_ids=places).logits.argmax(-1))
print("same tokens, compiled:", torch.equal(before[:, prompt.shape[1] :], torch.cat(tokens, 1)))
