"""The examples for Hugging Face models print what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

pytestmark = [pytest.mark.hf, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent.parent


def run(code: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str) -> str:
    return (ROOT / "examples" / name).read_text(encoding="utf-8")


def test_generate():
    # the compiled step is Inductor's in test_compile.py
    code = example("hugging_face_generate.py").replace("fullgraph=True)", 'fullgraph=True, backend="eager")')
    assert 'backend="eager"' in code
    lines = run(code).splitlines()
    assert lines[0].startswith("torch_replay: Qwen3NextForCausalLM") and "3 Qwen3NextGatedDeltaNet" in lines[0]
    assert lines[1:] == ["same tokens: True", "same tokens, compiled: True"]


def test_prompt_lookup():
    lines = run(example("hugging_face_prompt_lookup.py")).splitlines()
    forwards = {line.split(":")[0]: int(re.search(r"(\d+) forwards for 60", line)[1])
                for line in lines if "forwards" in line}
    assert "transformers, prompt lookup: assisted generation is not supported with stateful models" in lines[1]
    assert forwards["transformers"] == 60 and forwards["prompt lookup"] < 60 and forwards["assistant"] < 20
    assert lines[-1] == "same tokens: True"


def test_readme():
    """The README's lines for a Hugging Face model run as printed, on a folder of a tiny model."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```py\n(.*?from_pretrained.*?)```", readme, re.S)[1]
    assert len(code.splitlines()) == 5
    scope = """
import torch, transformers
torch.manual_seed(0)
class Model:
    @staticmethod
    def from_pretrained(name):
        assert name == "ibm-ai-platform/Bamba-9B-v2"
        return transformers.BambaForCausalLM(transformers.BambaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16,
            pad_token_id=None, eos_token_id=None)).eval()
transformers.AutoModelForCausalLM = Model
inputs = {"input_ids": torch.randint(3, 64, (1, 12))}
"""
    out = run(scope + code + "print(text.shape[1] - 12)\n")
    assert out.splitlines()[0].startswith("torch_replay: BambaForCausalLM") and out.splitlines()[-1] == "100"
