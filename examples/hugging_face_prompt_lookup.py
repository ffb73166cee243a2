"""Drafts for a Hugging Face model with recurrent layers: prompt lookup, and a second model as assistant.

    python examples/hugging_face_prompt_lookup.py

transformers refuses both for models with a state, which it cannot take back. After `replace`, what was drafted and
rejected is a move of cursors. The model is tiny and random; needs pip install 'torch_replay[hf]'.
"""

import torch
from transformers import BambaConfig, BambaForCausalLM

from torch_replay.integrations.transformers import replace


def tiny() -> BambaForCausalLM:
    torch.manual_seed(0)
    return BambaForCausalLM(BambaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16,
        mamba_chunk_size=16, pad_token_id=None, eos_token_id=None)).eval()


model, assistant = tiny(), tiny()  # an assistant is a smaller model; this one agrees in everything
forwards = []
model.register_forward_hook(lambda *call: forwards.append(1))
prompt = torch.randint(1, 64, (1, 8)).repeat(1, 3)  # text that repeats itself is what lookup finds drafts in
settings = dict(max_new_tokens=60, do_sample=False)


def generate(what: str, **drafts) -> torch.Tensor:
    forwards.clear()
    text = model.generate(prompt, **settings, **drafts)
    print(f"{what}: {len(forwards)} forwards for {text.shape[1] - prompt.shape[1]} tokens")
    return text


plain = generate("transformers")
try:
    generate("transformers, prompt lookup", prompt_lookup_num_tokens=4)
except ValueError as error:
    print(f"transformers, prompt lookup: {error}")

replace(model, window=16, num_spec=4)
lookup = generate("prompt lookup", prompt_lookup_num_tokens=4)
replace(assistant)  # its drafts are taken back too
drafting = assistant.generation_config
drafting.num_assistant_tokens, drafting.assistant_confidence_threshold = 4, 0.0
helped = generate("assistant", assistant_model=assistant)
print("same tokens:", torch.equal(plain, lookup) and torch.equal(plain, helped))
