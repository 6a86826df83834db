"""How long `compare` takes for a Llama of transformers with random weights, and its verdict.

``python -m benchmarks.compare_llama`` writes ``benchmarks/results/compare_llama.json``. The kernels that PyTorch keeps
from earlier runs count for nothing: with ``executors=[]`` and without torch.compile there are none.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from thunder_mem import compare
from thunder_mem.integrations.transformers import memory_efficient

RESULT = Path(__file__).parent / "results" / "compare_llama.json"
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    torch.manual_seed(0)
    model = memory_efficient(LlamaForCausalLM(LlamaConfig(vocab_size=8000, **SIZES)), executors=[])
    tokens = torch.randint(8000, (4, 256))
    start, start_cpu = time.perf_counter(), time.process_time()
    found = compare(model, kwargs={"input_ids": tokens, "labels": tokens}, executors=[])
    took = {"wall_s": round(time.perf_counter() - start, 1), "cpu_s": round(time.process_time() - start_cpu, 1)}
    print(found, took, sep="\n")
    result = {
        "command": "python -m benchmarks.compare_llama",
        "machine": f"{os.uname().machine}, {torch.get_num_threads()} threads",
        "load": [round(load, 1) for load in os.getloadavg()],
        "versions": {"torch": torch.__version__},
        **took,
        "peak_bytes": {row.name: row.peak_bytes for row in found.rows},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
