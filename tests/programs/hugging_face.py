"""Small models of transformers with random weights, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor

WORDS = 384
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Batch = dict[str, Tensor | bool]


def tokens(rows: int = 2, columns: int = 16) -> Tensor:
    return torch.randint(3, WORDS, (rows, columns))


def text() -> Batch:
    """The second row is padded on the right, and its labels are ignored there."""
    ids = tokens()
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, 11:], labels[1, 11:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gpt2(layers: int = 2, dropout: float = 0.0) -> tuple[hf.PreTrainedModel, Batch]:
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = hf.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=16, n_layer=layers, n_head=2, **drops)
    return hf.GPT2LMHeadModel(config), text()


def llama(layers: int = 2, **options) -> tuple[hf.PreTrainedModel, Batch]:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "num_hidden_layers": layers}, **options)), text()


def qwen3() -> tuple[hf.PreTrainedModel, Batch]:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8)), text()


def gemma3() -> tuple[hf.PreTrainedModel, Batch]:
    layers = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4, layer_types=layers)
    return hf.Gemma3ForCausalLM(config), text()


def mistral() -> tuple[hf.PreTrainedModel, Batch]:
    return hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)), text()


def mixtral() -> tuple[hf.PreTrainedModel, Batch]:
    config = hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
    return hf.MixtralForCausalLM(config), text()


def bert(layers: int = 2) -> tuple[hf.PreTrainedModel, Batch]:
    return hf.BertForMaskedLM(hf.BertConfig(**{**SIZES, "num_hidden_layers": layers}, **NO_DROPOUT)), text()


def t5() -> tuple[hf.PreTrainedModel, Batch]:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    batch, labels = text(), tokens(columns=7)
    labels[0, 5:] = -100
    return model, {**batch, "labels": labels}


def vit() -> tuple[hf.PreTrainedModel, Batch]:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5, **NO_DROPOUT)
    return hf.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": torch.tensor([1, 3]),
    }


def clip() -> tuple[hf.PreTrainedModel, Batch]:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": WORDS - 1}
    images = {"image_size": 16, "patch_size": 4}
    config = hf.CLIPConfig(text_config={**sizes, **words}, vision_config={**sizes, **images}, projection_dim=8)
    batch = text()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ids[0, 15] = ids[1, 10] = WORDS - 1
    pixels = torch.randn(2, 3, 16, 16)
    return hf.CLIPModel(config), {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}


def whisper() -> tuple[hf.PreTrainedModel, Batch]:
    config = hf.WhisperConfig(
        vocab_size=WORDS,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
        dropout=0.0,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    labels = tokens(columns=9)
    labels[1, 6:] = -100
    return hf.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 24), "labels": labels}


def opt(words: int, columns: int) -> tuple[hf.PreTrainedModel, Batch]:
    """ThunderFX breaks its forward after the positions, so its head is in another graph than its layers."""
    sizes = {"vocab_size": words, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2}
    config = hf.OPTConfig(**sizes, num_attention_heads=2, max_position_embeddings=128, dropout=0.0)
    ids = torch.randint(3, words, (2, columns))
    return hf.OPTForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


FAMILIES: dict[str, Callable[[], tuple[hf.PreTrainedModel, Batch]]] = {
    f.__name__: f for f in (gpt2, llama, qwen3, gemma3, mistral, mixtral, bert, t5, vit, clip, whisper)
}
THROUGH_FX = {"mixtral", "whisper"}
