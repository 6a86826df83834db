"""The largest batch that fits: ``python -m benchmarks.bert_batch``.

A BERT-style encoder of four layers with dropout, as ONNX Runtime's memory optimizer was measured on
(attention written out as products, softmax and dropout), with its language-model loss and AdamW, bf16,
sequences of 512, on a simulated A100 of 40 GB: the largest batch of a whole training step under Thunder
alone and under MemEfficient, and the sequences a second of each by the roofline. Writes
``benchmarks/results/bert_batch.json``. ONNX Runtime reports twice the batch and 1.17 times the throughput
for DeBERTa-V2 on A100s (microsoft/onnxruntime PR 12852).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import thunder
import torch
from rich.console import Console
from torch.nn import functional

from thunder_mem import MemEfficient, largest_batch, predict, simulate
from thunder_mem.costs.plan_time import trace_seconds
from thunder_mem.memory.device_models import device_model

RESULTS = Path(__file__).parent / "results"
DEVICE = "A100-40GB"
TOKENS, WIDTH, HEADS, VOCABULARY = 512, 768, 12, 30522


class Layer(torch.nn.Module):
    """Self-attention and a GELU MLP, each with dropout, a residual and a LayerNorm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            t.view(batch, tokens, HEADS, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(x).split(WIDTH, -1)
        )
        scores = query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        weights = functional.dropout(torch.softmax(scores, -1), 0.1)
        mixed = (weights @ value).transpose(1, 2).reshape(batch, tokens, WIDTH)
        x = self.norm1(x + functional.dropout(self.out(mixed), 0.1))
        return self.norm2(x + functional.dropout(self.down(functional.gelu(self.up(x))), 0.1))


class Bert(torch.nn.Module):
    """Embeddings, the layers, and the loss of the masked-language-model head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(TOKENS, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.transform, self.last_norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.norm(self.words(tokens) + self.places.weight), 0.1)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last_norm(functional.gelu(self.transform(x))))
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


WAYS = {
    "Thunder": [],
    "MemEfficient()": [MemEfficient(strict=True)],
    "MemEfficient(recompute='layerwise')": [MemEfficient(strict=True, recompute="layerwise")],
}


def step_seconds(layers: int, batch: int, transforms: list) -> float:
    """Forward, backward and AdamW by the roofline, one kernel after the other."""
    model = device_model(DEVICE)
    with simulate(DEVICE):
        with torch.device("cuda"):
            bert = Bert(layers).to(torch.bfloat16)
            tokens = torch.zeros(batch, TOKENS, dtype=torch.long)
        jitted = thunder.jit(bert, transforms=transforms)
        predict(jitted, tokens, tokens)
        traces = (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1])
        # AdamW reads and writes parameters and both moments, and reads gradients.
        moved = 7 * sum(p.numel() * p.element_size() for p in bert.parameters())
        return sum(trace_seconds(t, model) for t in traces) + moved / model.bandwidth_bytes_per_s


def measure(layers: int, way: str) -> dict[str, object]:
    start = time.process_time()
    shape = (("B", TOKENS), torch.long)
    found = largest_batch(
        lambda: Bert(layers).to(torch.bfloat16),
        torch.optim.AdamW,
        [shape, shape],
        multiple=4,
        device=DEVICE,
        transforms=WAYS[way],
    )
    seconds = step_seconds(layers, found.size, WAYS[way])
    return {
        "way": way,
        "batch": found.size,
        "allocated_peak_bytes": None if found.fit is None else found.fit.allocation.allocated_peak_bytes,
        "step_ms": round(seconds * 1e3, 1),
        "sequences_per_s": round(found.size / seconds, 1),
        "tried": found.tried,
        "cpu_s": round(time.process_time() - start, 1),
    }


def main(layers: int) -> None:
    rows: list[dict] = []
    for way in WAYS:
        rows.append(measure(layers, way))
        for name, key in (("batch", "batch_ratio"), ("sequences_per_s", "throughput_ratio")):
            rows[-1][key] = round(rows[-1][name] / rows[0][name], 3)
        Console().print(rows[-1])
        record = {
            "command": "python -m benchmarks.bert_batch",
            "torch": torch.__version__,
            "device": DEVICE,
            "layers": layers,
            "tokens": TOKENS,
            "rows": rows,
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "bert_batch.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 4)
