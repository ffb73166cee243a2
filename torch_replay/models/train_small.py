"""Trains the small model that ships with the package, on the arrays that `corpus.py` wrote.

    python -m torch_replay.models.train_small --corpus .corpus --out torch_replay/models/small

Made for one run of under ten minutes on one GPU; a CPU with `--trial` shows that the script works. Products run in
bfloat16 on CUDA, the scans' state always in float32. The weights kept are those of the best validation loss.
"""

import argparse
import json
import math
import platform
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from ..engram import compress_vocabulary
from .config import HybridConfig
from .evaluate import forgetting_losses, generate_slow, shut_engram, token_losses
from .hybrid import TOKENIZER_FILE, HybridModel, load_tokenizer
from .model_card import write_model_card

PATTERN = "mamba2 mlp gdn mlp swa mlp mamba2 mlp full mlp gdn mlp swa mlp mamba2 mlp"
ENGRAM_PLACE = 2  # where --engram puts its sublayer: early, for what it knows needs no context but the last tokens
TABLE_RATE = 5  # an n-gram table learns at this multiple of the rate: a row is seen in few steps (arXiv 2601.07372)
PROMPTS = (
    "import os\nimport sys\n\ndef read_file(path",
    'class Stack:\n    """A last-in first-out container.',
    "def main():\n    parser = argparse.ArgumentParser(",
    "Genesis 1\n\n  1 In the beginning God created",
    "  1 And it came to pass in the days of",
    "  7 Blessed are they that",
)
TEXT_SHARE = 0.27  # of the sequences of a batch; the rest is code
WARM_UP_STEPS = 200
HORIZONS = (8, 16, 64, 256)  # how many tokens after a zeroed state are looked at


def small_config(vocab_size: int, eos: int, trial: bool = False, engram: dict | None = None) -> HybridConfig:
    """The shipped geometry: 16 sublayers of every kind, width 256; `trial` is a tiny one for a quick look on a CPU.

    engram: fields of the configuration for one more sublayer, an engram layer.
    """
    small = HybridConfig(
        vocab_size=vocab_size, hidden_size=256, pattern=tuple(PATTERN.split()), max_position=2048, eos_token_id=eos,
        mamba_heads=8, mamba_head_dim=64, mamba_state_dim=64, mamba_groups=2,
        gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=64, gdn_value_dim=64,
        num_heads=4, num_kv_heads=2, head_dim=64, sliding_window=64, mlp_hidden=320,
    )  # fmt: skip
    if engram is not None:
        pattern = [*small.pattern[:ENGRAM_PLACE], "engram", *small.pattern[ENGRAM_PLACE:]]
        small = HybridConfig.from_dict(small.to_dict() | {"pattern": pattern} | engram)
    if not trial:
        return small
    changes = {"hidden_size": 32, "mamba_heads": 2, "mamba_head_dim": 16, "mamba_state_dim": 8, "mamba_groups": 1}
    changes |= {"gdn_key_dim": 8, "gdn_value_dim": 8, "head_dim": 8, "mlp_hidden": 48, "sliding_window": 16}
    pattern = ["mamba2", "mlp", *(["engram"] if engram else []), "gdn", "mlp", "swa", "mlp", "full", "mlp"]
    return HybridConfig.from_dict(small.to_dict() | changes | {"pattern": pattern})


class Corpus:
    """The id arrays of a corpus folder on one device; samples training batches and cuts validation windows."""

    def __init__(self, folder: Path, device: torch.device, seed: int):
        self.info = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        self.device, self.generator = device, torch.Generator().manual_seed(seed)
        self.ids = {
            (split, part): torch.from_numpy(np.load(folder / f"{split}_{part}.npy").astype(np.int32)).to(device)
            for split in ("train", "valid")
            for part in self.info["parts"]
        }

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """Random training windows `[rows, length + 1]` int64, code rows first."""
        text_rows = round(rows * TEXT_SHARE)
        pieces = []
        for part, count in (("code", rows - text_rows), ("text", text_rows)):
            ids = self.ids["train", part]
            starts = torch.randint(len(ids) - length, (count, 1), generator=self.generator).to(self.device)
            pieces.append(ids[starts + torch.arange(length + 1, device=self.device)])
        return torch.cat(pieces).long()

    def windows(self, part: str, length: int) -> torch.Tensor:
        """The validation stream of a part in windows `[N, length + 1]` int64, each starting at the last one's end."""
        ids = self.ids["valid", part]
        return ids[: (len(ids) - 1) // length * length + 1].unfold(0, length + 1, length).long()

    def tokens_per_byte(self, part: str) -> float:
        valid = self.info["parts"][part]["valid"]
        return valid["tokens"] / valid["bytes"]


def make_optimizer(model, lr):
    """AdamW; only matrices decay: a decayed norm weight or A_log would be pulled off its scale, and an n-gram table
    would lose its rare rows."""
    tables = [] if model.engram is None else [model.engram.weight]
    others = [p for p in model.parameters() if not any(p is table for table in tables)]
    matrices = [p for p in others if p.dim() == 2 and min(p.shape) > 8]
    chosen = {id(p) for p in matrices}
    vectors = [p for p in others if id(p) not in chosen]
    groups = [{"params": matrices, "weight_decay": 0.1, "scale": 1}, {"params": vectors, "weight_decay": 0, "scale": 1}]
    if tables:
        groups.append({"params": tables, "weight_decay": 0, "scale": TABLE_RATE})
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def head_loss(hidden, norm_weight, embedding, eps, targets):
    """Mean cross-entropy from the residual stream, written out so that Inductor fuses norm, logits and loss."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm_weight
    return F.cross_entropy(F.linear(normed, embedding).float().flatten(0, -2), targets.flatten())


class Trainer:
    """One training run: `run()` trains, `curve` and `valid_curve` hold what it saw, `best` the weights to keep."""

    def __init__(self, options, model, corpus):
        self.options, self.model, self.corpus = options, model, corpus
        self.optimizer = make_optimizer(model, options.lr)
        self.cuda = corpus.device.type == "cuda"
        self.head = torch.compile(head_loss) if options.compile else head_loss
        self.curve, self.valid_curve, self.best, self.best_loss = [], [], None, math.inf
        self.tokens = 0
        for layer in model.layers:
            layer.dropout = options.dropout
            layer.skip = {"full": options.full_skip, "swa": options.window_skip}.get(layer.kind, 0.0)
            if options.compile:  # one layer at a time: layers of a kind share their compiled code
                layer.compile()

    def autocast(self):
        return torch.autocast(self.corpus.device.type, torch.bfloat16, enabled=self.cuda)

    def loss(self, ids):
        """Training loss of windows `[B, T + 1]`, through the compiled layers."""
        hidden = self.model.hidden(ids[:, :-1])
        head = (self.model.norm.weight, self.model.embedding.weight, self.model.norm.eps)
        return self.head(hidden, *head, ids[:, 1:])

    def step(self, progress, step):
        """One update; `progress` in [0, 1] places it on the cosine. Returns the loss as a tensor."""
        rate = 0.5 * (1 + math.cos(math.pi * progress)) * 0.98 + 0.02
        rate *= min(1.0, (step + 1) / min(WARM_UP_STEPS, max(1, self.options.steps // 10)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * rate * group["scale"]
        ids = self.corpus.batch(self.options.batch, self.options.length)
        with self.autocast():
            loss = self.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += self.options.batch * self.options.length
        return loss.detach()

    def validate(self, step):
        """Loss per part, uncompiled; remembers the weights if their mean over parts is the best so far."""
        self.model.eval()
        with torch.compiler.set_stance("force_eager"), self.autocast():
            parts = validation_losses(self.model, self.corpus, self.options.length)
        self.model.train()
        mean = sum(parts.values()) / len(parts)
        if mean < self.best_loss:
            self.best_loss = mean
            self.best = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.valid_curve.append({"step": step, "tokens": self.tokens, **{k: round(v, 4) for k, v in parts.items()}})
        return parts

    def run(self):
        """Trains for `--steps` updates, or fewer when `--minutes` pass first: the rate's cosine ends with either."""
        self.model.train()
        limit, begin = self.options.minutes * 60, None
        progress = step = 0
        bar = tqdm(total=self.options.steps, desc="train", mininterval=2.0, file=sys.stdout)
        started = time.monotonic()
        while step < self.options.steps and progress < 1:
            loss = self.step(progress, step)
            step += 1
            if begin is None:
                loss.item()
                begin = time.monotonic()
                print(f"first step (compilation included): {begin - started:.1f} s", flush=True)
            # the time that counts is the device's, so the queue is drained now and then
            if step % 10 == 0:
                value = loss.item()
                self.curve.append({"step": step, "loss": round(value, 4)})
                bar.set_postfix(loss=f"{value:.3f}", refresh=False)
            progress = max(step / self.options.steps, (time.monotonic() - begin) / limit)
            bar.update()
            if step % self.options.valid_every == 0 or step == self.options.steps or progress >= 1:
                parts = self.validate(step)
                tqdm.write(f"step {step} train {loss.item():.4f} valid {parts}", file=sys.stdout)
        bar.close()
        self.seconds = time.monotonic() - begin
        self.steps_done = step
        self.model.load_state_dict(self.best)
        self.model.eval()


def validation_losses(model, corpus, length) -> dict[str, float]:
    """Mean loss in nats per token of each corpus part's held-out documents."""
    batch = 32 if corpus.device.type == "cuda" else 4
    parts = corpus.info["parts"]
    return {part: token_losses(model, corpus.windows(part, length), batch).mean().item() for part in parts}


def measure(model, corpus, length) -> dict:
    """The numbers of the model card: loss, bits per byte and the cost of a zeroed state, per corpus part."""
    results = {}
    for part, loss in validation_losses(model, corpus, length).items():
        bits = loss / math.log(2) * corpus.tokens_per_byte(part)
        results[part] = {"loss": loss, "bits_per_byte": bits}
        if model.engram is not None:
            with shut_engram(model):
                shut = token_losses(model, corpus.windows(part, length)[:16], batch=4).mean().item()
            kept = token_losses(model, corpus.windows(part, length)[:16], batch=4).mean().item()
            results[part]["engram"] = {"kept": kept, "shut": shut, "increase": shut - kept}
        prompt = min(256, length // 2)
        windows = corpus.windows(part, prompt + max(HORIZONS))[:128]
        kept, zeroed = forgetting_losses(model, windows, prompt, batch=4)
        for following in HORIZONS:
            means = {"kept": kept[:, :following].mean().item(), "zeroed": zeroed[:, :following].mean().item()}
            cost = means | {"increase": means["zeroed"] - means["kept"], "prompt": prompt, "windows": len(windows)}
            results[part][f"zeroed_state_next_{following}"] = cost
    return results


def write_samples(model, tokenizer, tokens) -> str:
    """Greedy and sampled continuations of the built-in prompts as one text."""
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    lines = []
    for temperature in (0.0, 0.7):
        outputs = generate_slow(model, prompts, tokens, temperature)
        for prompt, ids in zip(PROMPTS, outputs):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            lines.append(f"=== temperature {temperature}, prompt {prompt!r}\n{prompt}[|]{text}\n")
    return "\n".join(lines)


def versions(device) -> dict:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def main():
    options = parse_options()
    if options.measure_only:
        measure_again(options)
    else:
        train(options)


def measure_again(options):
    """Measures the folder's weights again, on any device, and rewrites the card and the results from it."""
    device = torch.device(options.device)
    results = json.loads(options.results.read_text(encoding="utf-8"))
    model = HybridModel.from_pretrained(options.out, device)
    with torch.inference_mode():
        results["shipped"] = measure(model, Corpus(options.corpus, device, 0), options.length)
    results["shipped_measured_on"] = versions(device)
    write_model_card(options.out / "README.md", model.config, results)
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results["shipped"], indent=1))


def train(options):
    """The whole run: train, round, measure, write the folder, the results and the samples."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(options.corpus, device, options.seed)
    tokenizer = load_tokenizer(options.corpus)
    token_map = compress_vocabulary(tokenizer)
    engram = {"engram_table_size": options.engram, "engram_dim": options.engram_dim,
              "engram_vocab_size": int(token_map.max()) + 1} if options.engram else None
    eos = tokenizer.token_to_id(corpus.info["eos"])
    config = small_config(tokenizer.get_vocab_size(), eos, options.trial, engram)
    model = HybridModel(config, device)
    if engram:
        model.engram.set_token_map(token_map.to(device))
    print(f"{model.num_parameters():,} parameters on {versions(device)}", flush=True)
    trainer = Trainer(options, model, corpus)
    trainer.run()

    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(options.corpus / TOKENIZER_FILE, options.out / TOKENIZER_FILE)
    torch.set_float32_matmul_precision("highest")
    results = {"parameters": model.num_parameters(), "steps": trainer.steps_done, "tokens": trainer.tokens}
    results |= {"seconds": round(trainer.seconds, 1), **versions(device), "command": command_line(options)}
    with torch.compiler.set_stance("force_eager"):
        results["valid_float32"] = validation_losses(model, corpus, options.length)
        for dtype in (torch.bfloat16, torch.float16):  # the second one is what stays in the folder
            model.save_pretrained(options.out, dtype)
            rounded = HybridModel.from_pretrained(options.out, device)
            name = f"valid_rounded_to_{str(dtype).removeprefix('torch.')}"
            results[name] = validation_losses(rounded, corpus, options.length)
        results["shipped"] = measure(rounded, corpus, options.length)
        results["shipped_measured_on"] = versions(device)
        results |= {"corpus": corpus.info, "curve": trainer.curve, "valid_curve": trainer.valid_curve}
        write_model_card(options.out / "README.md", config, results)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        shown = {k: v for k, v in results.items() if k not in ("corpus", "curve")}
        print(json.dumps(shown, indent=1), flush=True)
        samples = write_samples(rounded, tokenizer, options.sample_tokens)
    options.results.with_name("train_small_samples.txt").write_text(samples, encoding="utf-8")
    print(samples)


def command_line(options) -> str:
    """The options of this run as one would type them in a clone: folders of the machine it ran on are left out."""
    names = ("steps", "minutes", "batch", "length", "lr", "dropout", "full_skip", "window_skip", "valid_every", "seed",
             *(("engram", "engram_dim") if options.engram else ()))
    folders = "--corpus .corpus --out torch_replay/models/small"
    return " ".join([folders, *(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in names)])


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/train_small.json"))
    parser.add_argument("--minutes", type=float, default=7.0, help="training stops after this, compilation not counted")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--full-skip", type=float, default=0.3, help="chance that a sequence skips full attention")
    parser.add_argument("--window-skip", type=float, default=0.0, help="the same chance for each window layer")
    parser.add_argument("--engram", type=int, default=0, metavar="ROWS",
                        help="add an engram layer with about so many rows a column (7000 make 11.5 MB in all)")
    parser.add_argument("--engram-dim", type=int, default=16, help="values of a row")
    parser.add_argument("--valid-every", type=int, default=250)
    parser.add_argument("--sample-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trial", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--measure-only", action="store_true", help="measure --out again, rewrite card and results")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    return parser.parse_args()


if __name__ == "__main__":
    main()
