"""Ops take what Inductor gives them: rows of a product that it pads, and parts of them, without copies."""

import functools
import re

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

from torch_replay import ops
from torch_replay.graphs.compiled import compile_alone
from torch_replay.ops.registry import inlining

# padding of rows above 1,024 elements that are no multiple of 128 bytes, which Inductor else does on GPUs alone
PADDED = {"disable_padding_cpu": False, "comprehensive_padding": True}
HEADS, DIM, STATE = 24, 16, 16
WIDE, CONV = HEADS * DIM, HEADS * DIM + 2 * STATE


class Step(torch.nn.Module):
    """The middle of a Mamba-2 layer: one product, whose parts the ops read."""

    def __init__(self, device: str = "cpu"):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        self.weight, self.conv_weight = draw(64, 2 * WIDE + CONV + HEADS), draw(CONV, 4)
        self.x, self.A, self.D, self.bias = draw(3, 64), -draw(HEADS).abs(), draw(HEADS), draw(HEADS)
        zeros = functools.partial(torch.zeros, device=device)
        self.conv_ring, self.state = zeros(4, CONV, 4), zeros(4, HEADS, DIM, STATE)
        self.rings = [zeros(4, HEADS, 9, DIM), zeros(4, 1, 9, STATE), zeros(4, HEADS, 9)]
        self.cursors = [zeros(4, dtype=torch.int32) for _ in range(2)]
        self.slots = torch.arange(1, 4, dtype=torch.int32, device=device)
        self.lens, self.first = torch.ones_like(self.slots), zeros(3, dtype=torch.int64)

    def forward(self):
        z, raw, dt, _ = (self.x @ self.weight).unsqueeze(1).split([WIDE, CONV, HEADS, WIDE], -1)
        mixed = ops.conv_replay(self.conv_ring, raw, self.conv_weight, None, self.first, self.slots, self.lens,
                                silu=True)
        x, B, C = mixed.split([WIDE, STATE, STATE], -1)
        by_head = (HEADS, DIM)
        return ops.mamba2_replay(
            self.state, *self.rings, *self.cursors, x.unflatten(-1, by_head), dt, self.A, B.unsqueeze(2),
            C.unsqueeze(2), self.D, z.unflatten(-1, by_head), self.bias, self.slots, self.lens, window=8)


def generated(compiled) -> tuple[torch.Tensor, list[str]]:
    """The result, and the kernels that Inductor generated."""
    torch._dynamo.reset()
    with torch.no_grad(), fresh_cache(), inlining(False):
        out, (code,) = run_and_get_code(compiled)
    return out, re.findall(r"^ +(cpp_fused\w*\(|triton_\w+\.run)", code[code.index("def call"):], re.M)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CASES = {"padded": ("cpu", PADDED), "packed": ("cpu", {}), "gpu": ("cuda", {})}


@pytest.mark.parametrize("device, options", [pytest.param(*case, marks=GPU * (case[0] == "cuda"))
                                             for case in CASES.values()], ids=CASES)
def test_no_copies(device, options):
    """Nothing is generated between the product and the ops, whose results are the eager ones."""
    want = Step(device)()
    got, kernels = generated(torch.compile(Step(device), fullgraph=True, options=options))
    assert not kernels and torch.equal(got, want)


def test_negative_control():
    """Ops that want the exact strides get copies."""
    library = torch.library.Library("layout_test", "FRAGMENT")
    library.define("total(Tensor x) -> Tensor", tags=(torch.Tag.needs_exact_strides,))
    library.impl("total", lambda x: x.sum(-1), "CPU")
    torch.library.register_fake("layout_test::total", lambda x: x.new_empty(x.shape[:-1]), lib=library)
    step = Step()

    def run():
        return torch.ops.layout_test.total((step.x @ step.weight)[..., WIDE : WIDE + CONV])

    assert generated(torch.compile(run, fullgraph=True, options=PADDED))[1]
    assert not generated(torch.compile(run, fullgraph=True))[1]


def test_steps_are_not_padded():
    """A step's products are as wide as in eager mode, whatever reads them."""
    step = Step()

    class Sum:
        def run(self):
            return (step.x @ step.weight)[..., WIDE : WIDE + CONV].sum(-1)

    counts = []
    for compiled in (compile_alone(Sum().run), torch.compile(Sum().run, fullgraph=True)):
        torch._inductor.metrics.reset()
        with torch._inductor.config.patch(PADDED):
            generated(compiled)
        counts.append(torch._inductor.metrics.num_comprehensive_padding)
    assert counts[0] == 0 < counts[1]
