"""The audit of a Hugging Face model folder: its decode step is found, run and judged like any other."""

import json

import pytest
import torch

from torch_replay_command import main

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")


@pytest.fixture
def folder(tmp_path):
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_folder(folder, capsys):
    """A model with a static cache: six calls, one graph, every rule that a CPU can check."""
    status = main(["audit", str(folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == 0 and report["ok"] and report["calls"] == 6
    values = {result["rule"]: result["value"] for result in report["results"] if result["value"] is not None}
    assert values["graphs"] == 1
    assert not any(values[rule] for rule in ("breaks", "recompiles", "clones", "syncs", "ops"))


def test_a_break_in_the_model_shows(folder, capsys, monkeypatch):
    """Negative control: a layer that breaks the graph is found, with its line."""
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def breaking(self, x):
        torch._dynamo.graph_break()  # line of the break
        return forward(self, x)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", breaking)
    assert main(["audit", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "breaks" in report["broken"] and "line of the break" in json.dumps(report)


def test_not_a_model(tmp_path, capsys):
    """A folder without a model is one line on stderr."""
    assert main(["audit", str(tmp_path)]) == 2
    assert "transformers cannot load it" in capsys.readouterr().err
