"""A training step of GPT-2 small over chunk counts, predicted on a GPU that is not there.

PyTorch PR 136702 reports the peak of such a step (124M parameters, B=32, T=1024) with Inductor's chunker:
`INDUCTOR_MIB`. Here the step holds bfloat16 parameters, their gradients and AdamW's two moments. The PR says
neither in which dtypes its trainer keeps them nor what it takes unchunked. So both totals are set side by
side, and each of ours beside our unchunked one; a ratio of theirs cannot be formed.
"""

from __future__ import annotations

import thunder
import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import predict_step
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead
from thunder_mem.transforms.mem_efficient import MemEfficient

INDUCTOR_MIB = {8: 14049, 16: 13267, 32: 12880, 64: 12603}
MIB = 2**20


def build() -> torch.nn.Module:
    """GPT-2 small with tied embeddings and its loss inside, as litgpt has it."""
    from litgpt import GPT, Config

    config = Config(
        name="gpt2", block_size=1024, vocab_size=50257, padded_vocab_size=50304, n_layer=12, n_head=12, n_embd=768,
        rotary_percentage=0.25, bias=True, norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP",
        intermediate_size=3072, parallel_residual=False,
    )  # fmt: skip

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(config)
            self.model.lm_head.weight = self.model.transformer.wte.weight

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = self.model(tokens)
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return Step()
    finally:
        torch.set_default_dtype(default)


def gpt2() -> list[tuple[str, int, str]]:
    """(contender, peak bytes of a whole training step, note) by chunk count."""
    rows: list[tuple[str, int, str]] = []
    whole = 0
    for chunks in (None, 8, 16, 32, 64, "plan"):
        chunk = ChunkLossHead(chunks=chunks) if isinstance(chunks, int) else None
        transforms = [] if chunks is None else [chunk or MemEfficient()]
        with simulate("H100-80GB"):
            model = build()
            tokens = torch.empty(32, 1024, device="cuda", dtype=torch.int64)
            compiled = thunder.jit(model, transforms=transforms)
            optimizer = torch.optim.AdamW(model.parameters())
            made = predict_step(compiled, optimizer, None, tokens, tokens)
        peak_bytes = made.peak_bytes
        whole = whole or peak_bytes
        note = "" if chunks is None else f"{peak_bytes / whole:.3f} of unchunked"
        if chunk is not None:
            refusals = "; ".join(map(str, chunk.record.refusals))
            note += f"; Inductor's chunker {INDUCTOR_MIB[chunks]} MiB; {refusals}"
        name = {None: "Thunder, unchunked", "plan": "MemEfficient()"}.get(chunks, f"{chunks} chunks")
        rows.append((name, peak_bytes, note.rstrip("; ")))
    return rows
