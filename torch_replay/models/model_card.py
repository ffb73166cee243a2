"""The README.md of a trained model folder."""

from pathlib import Path

from .config import HybridConfig

_COST = "zeroed_state_next_"
_TEMPLATE = """# Small hybrid model of torch_replay

A language model of {parameters:,} parameters, trained to show real text on a CPU. It writes what looks like Python
source or like the King James Bible. It knows nothing else and is fit for demonstrations and tests only.

| | |
| --- | --- |
| sublayers | {pattern} |
| width, MLP width, vocabulary | {hidden_size}, {mlp_hidden}, {vocab_size} (byte-level BPE) |
| Mamba-2 | {mamba_heads} heads of {mamba_head_dim}, state {mamba_state_dim}, {mamba_groups} groups |
| gated delta rule | {gdn_key_heads} key and {gdn_value_heads} value heads, K {gdn_key_dim}, V {gdn_value_dim} |
| attention | {num_heads} heads of {head_dim}, {num_kv_heads} for keys and values, sliding window {sliding_window} |
{engram}| context | {max_position} tokens |
| weights | float16 on disk |

## Corpus

{corpus}

The library is that of Python {corpus_python}. Held out were whole files of it and whole runs of four chapters, chosen
by a hash of the name; they are listed in `benchmarks/results/train_small.json`. `torch_replay/models/corpus.py` builds
the arrays again. The library's sources are Copyright Python Software Foundation, under the PSF License Version 2; the
King James text is in the public domain (its Debian package says that its copyright has expired). Neither text is part
of this folder.

## Training

{steps:,} steps, {tokens:,} tokens, {seconds:.0f} s without compilation on {device}; torch {torch}, Python {python}.

    python -m torch_replay.models.train_small {command}

## Measured on the held-out text

Nats per token, of the float16 weights in this folder; the held-out text also chose which step's weights were kept, so
the losses flatter them a little. The last columns: after a prompt of {prompt} tokens the
states of all Mamba-2 and gated-delta-rule layers are set to zero (attention and short convolutions keep their memory),
and this is by how much the mean loss of the next {horizons} tokens rises. It falls with distance, since the
tokens that follow fill the state again. Measured on {measured_on}.

| part | loss | bits per byte |{horizon_names}
| --- | --- | --- |{horizon_rules}
{losses}

| weights | {part_names} |
| --- |{rules}
{rounding}
"""


def write_model_card(path: Path, config: HybridConfig, results: dict) -> None:
    """Writes the card from the configuration and the results that `train_small` collected."""
    fields = config.to_dict() | {"pattern": " ".join(config.pattern)}
    shipped = results["shipped"]
    parts = list(shipped)
    costs = [key for key in shipped[parts[0]] if key.startswith(_COST)]
    horizons = [key.removeprefix(_COST) for key in costs]
    names = {
        "valid_float32": "float32, as trained",
        "valid_rounded_to_bfloat16": "rounded to bfloat16",
        "valid_rounded_to_float16": "rounded to float16, shipped",
    }
    corpus = ["| part | source | training bytes / tokens | held out bytes / tokens |", "| --- | --- | --- | --- |"]
    for part, info in results["corpus"]["parts"].items():
        counts = [f"{info[split]['bytes']:,} / {info[split]['tokens']:,}" for split in ("train", "valid")]
        corpus.append(f"| {part} | {info['source']} | {counts[0]} | {counts[1]} |")
    text = _TEMPLATE.format(
        **fields,
        **{key: results[key] for key in ("parameters", "steps", "tokens", "seconds", "device", "torch", "python")},
        command=results["command"],
        engram=_engram_rows(config, shipped),
        corpus="\n".join(corpus),
        corpus_python=results["corpus"]["python"],
        prompt=shipped[parts[0]][costs[0]]["prompt"],
        losses="\n".join(_loss_row(part, shipped[part], costs) for part in parts),
        horizons=", ".join(horizons),
        horizon_names="".join(f" zeroed state, next {horizon} |" for horizon in horizons),
        horizon_rules=" --- |" * len(horizons),
        measured_on="{device}, torch {torch}".format(**results["shipped_measured_on"]),
        part_names=" | ".join(parts),
        rules=" --- |" * len(parts),
        rounding="\n".join(_row(label, (f"{results[key][p]:.4f}" for p in parts)) for key, label in names.items()),
    )
    path.write_text(text, encoding="utf-8")


def _engram_rows(config, shipped):
    if "engram" not in config.pattern:
        return ""
    rises = ", ".join(f"{values['engram']['increase']:+.3f} ({part})" for part, values in shipped.items())
    sizes = f"{config.engram_heads} heads, about {config.engram_table_size:,} rows of {config.engram_dim} each"
    return (f"| engram | orders 2 to {config.engram_order}, {sizes}, {config.engram_vocab_size} compressed ids |\n"
            f"| loss when its gate is shut | {rises} nats per token |\n")


def _row(label, cells):
    return f"| {label} | " + " | ".join(cells) + " |"


def _loss_row(part, values, costs):
    rises = (f"{values[cost]['increase']:+.3f}" for cost in costs)
    return _row(part, (f"{values['loss']:.4f}", f"{values['bits_per_byte']:.3f}", *rises))
