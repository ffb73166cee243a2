"""What the n-gram lookup of a decode step costs on a GPU, from device and from pinned host memory.

    python -m benchmarks.engram [--output FILE]

Three questions, one run: microseconds of one lookup of 64 tokens x 24 columns x 264 B; its share of a whole decode
step of a hybrid model with two engram layers, whose one lookup serves both; and how much of it disappears when it runs
beside the products of a layer, on a second stream, which a compiled step does not have. Checks on the way that a table
in host memory gives the device table's bytes.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.timing import measure
from torch_replay import Engine, EngineConfig, HybridConfig, HybridModel, SamplingParams
from torch_replay.engram import DeviceTable, PinnedTable
from torch_replay.graphs.compiled import compile_alone

PATTERN = ("mamba2", "mlp", "engram", "mamba2", "mlp", "swa", "mlp", "mamba2", "mlp", "full", "mlp", "engram", "mamba2",
           "mlp", "mamba2", "mlp")
DIM, ORDER, HEADS = 256, 4, 8  # 24 columns of 256 float8 values and 8 exponents


def random_table(rows: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 rows of every byte but NaN, exponents around 2^-8."""
    values = torch.randint(0, 127, (rows, DIM), dtype=torch.uint8, device=device)
    return values.view(torch.float8_e4m3fn), torch.full((rows, DIM // 32), 119, dtype=torch.uint8, device=device)


def lookup_times(device, tokens: int, columns: int, table_rows: int, seconds: float) -> dict:
    """Microseconds by where the table is; every launch reads other rows, so that caches do not help."""
    rows, exponents = random_table(table_rows, device)
    pinned = PinnedTable(rows, exponents, device)
    tables = {"device": DeviceTable(rows, exponents), "pinned, as a CUDA view": pinned,
              "pinned, as CPU tensors": DeviceTable(*pinned.host)}
    asked = [torch.randint(0, table_rows, (tokens, columns), device=device) for _ in range(40)]
    want = tables["device"].lookup(asked[0])
    times = {}
    for name, table in tables.items():
        assert torch.equal(table.lookup(asked[0]).view(torch.int16), want.view(torch.int16)), name
        timing = measure([lambda ids=ids, table=table: table.lookup(ids) for ids in asked], device, seconds)
        size = tokens * columns * (DIM + DIM // 32)
        times[name] = {"us": timing.us, "spread": timing.spread, "GB/s": size / timing.us * 1e-3}
    return times


def prefetch_times(device, tokens: int, columns: int, table_rows: int, seconds: float) -> dict:
    """Microseconds of a lookup after its rows were prefetched into the L2 cache, alone and with products in between:
    what an early place in a step could save without a second stream."""
    from benchmarks.prefetch_kernel import prefetch_rows

    def prefetch(table, ids):
        prefetch_rows(table.weight.view(torch.uint8), ids)
        prefetch_rows(table.scales, ids)

    rows, exponents = random_table(table_rows, device)
    weight, x = (torch.randn(size, 4096, device=device, dtype=torch.bfloat16) for size in (4096, tokens))
    asked = [torch.randint(0, table_rows, (tokens, columns), device=device) for _ in range(40)]

    def layer():
        return x @ weight @ weight @ weight

    times = {"layer": measure([layer], device, seconds).us}
    for name, table in (("device", DeviceTable(rows, exponents)), ("pinned", PinnedTable(rows, exponents, device))):
        cases = {
            "lookup": lambda ids, table=table: table.lookup(ids),
            "prefetch": lambda ids, table=table: prefetch(table, ids),
            "prefetch_lookup": lambda ids, table=table: (prefetch(table, ids), table.lookup(ids)),
            "layer_lookup": lambda ids, table=table: (layer(), table.lookup(ids)),
            "prefetch_layer_lookup": lambda ids, table=table: (prefetch(table, ids), layer(), table.lookup(ids)),
        }
        times[name] = {case: measure([lambda ids=ids, call=call: call(ids) for ids in asked], device, seconds).us
                       for case, call in cases.items()}
    return times


def hybrid(device, hidden: int, table_rows: int) -> HybridModel:
    """A model of ordinary proportions in bfloat16; its table is not made yet."""
    config = HybridConfig(
        vocab_size=32768, hidden_size=hidden, pattern=PATTERN, mamba_heads=hidden // 32, mamba_head_dim=64,
        mamba_state_dim=128, mamba_groups=1, gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=64, gdn_value_dim=64,
        num_heads=hidden // 128, num_kv_heads=2, head_dim=128, sliding_window=512, mlp_hidden=3 * hidden,
        max_position=4096, eos_token_id=0, engram_order=ORDER, engram_heads=HEADS, engram_dim=DIM,
        engram_table_size=table_rows // (2 * (ORDER - 1) * HEADS))
    return HybridModel(config, device, torch.bfloat16, table_device="meta").eval().requires_grad_(False)


def step_times(device, model: HybridModel, batch: int, seconds: float) -> dict:
    """Microseconds of a decode step by where the table is, and where among its kernels the lookup stands."""
    rows, exponents = random_table(model.engram.weight.shape[0], device)
    times = {}
    for name, table in (("device", DeviceTable(rows, exponents)), ("pinned", PinnedTable(rows, exponents, device))):
        model.engram.place(table)
        config = EngineConfig(batch, 1024, dtype=torch.bfloat16, compiled=False)
        step = decoding_step(Engine(model, None, config), batch)
        with torch.no_grad():
            timing = measure([step], device, seconds)
            kernels = kernel_names(step)
        place = next(i for i, kernel in enumerate(kernels) if "look_up_rows" in kernel)
        times[name] = {"us": timing.us, "spread": timing.spread, "lookup_is_kernel": place, "of_kernels": len(kernels)}
    return times


def decoding_step(engine: Engine, batch: int):
    """The compiled greedy step in the midst of `batch` requests of about 300 tokens, to be called again and again."""
    for first in range(batch):
        prompt = [(first + place) % 1000 + 1 for place in range(300)]
        engine.add_request(prompt, SamplingParams(max_tokens=500, ignore_eos=True))
    scheduler = engine.scheduler
    while scheduler.waiting or not all(request.is_decoding for request in scheduler.running):
        engine.step()
    engine.step()
    assert int((engine.decode.inputs.query_lens > 0).sum()) == batch
    # without CUDA-graph trees: `measure` captures it
    return compile_alone(engine.decode.greedy_step, guarded=False)


def kernel_names(step) -> list[str]:
    """Kernels of one step in the order in which they ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def overlap_times(device, hidden: int, batch: int, table_rows: int, seconds: float) -> dict:
    """Microseconds of a lookup from pinned memory and of the products of one layer, alone, in turn and side by side."""
    table = PinnedTable(*random_table(table_rows, device), device)
    ids = torch.randint(0, table_rows, (batch, 2 * (ORDER - 1) * HEADS), device=device)
    x = torch.randn(batch, hidden, device=device, dtype=torch.bfloat16)
    up, down = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in
                ((hidden, 6 * hidden), (6 * hidden, hidden)))
    side = torch.cuda.Stream()

    def lookup():
        return table.lookup(ids)

    def layer():
        return (x @ up) @ down

    def beside():
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            lookup()
        layer()
        here.wait_stream(side)

    cases = {"lookup": [lookup], "layer": [layer], "beside": [beside]}
    times = {name: measure(launches, device, seconds).us for name, launches in cases.items()}
    times["in_turn"] = times["lookup"] + times["layer"]
    times["hidden_share_of_lookup"] = (times["in_turn"] - times["beside"]) / times["lookup"]
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--columns", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--table-rows", type=int, default=4_000_000, help="of 264 B each")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: this measures reads over the bus")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    shape = device, options.tokens, options.columns, options.table_rows, options.seconds
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "lookup": lookup_times(*shape)}
    results["prefetch"] = prefetch_times(*shape)
    results["step"] = step_times(device, hybrid(device, options.hidden, options.table_rows), options.tokens,
                                 options.seconds)
    for name, lookup in results["lookup"].items():
        step = results["step"]["device" if name == "device" else "pinned"]["us"]
        lookup["share_of_step"] = lookup["us"] / step
    step = results["step"]
    # both layers' columns in one launch, as the step has it
    step["pinned_costs_more_by"] = (step["pinned"]["us"] - step["device"]["us"]) / step["device"]["us"]
    results["overlap"] = overlap_times(device, options.hidden, options.tokens, options.table_rows, options.seconds)
    text = json.dumps(results, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
