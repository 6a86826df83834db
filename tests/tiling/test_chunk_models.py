"""Whole models with their loss inside: BertForMaskedLM (through ThunderFX) and litgpt."""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy

from benchmarks.models import llama_step
from thunder_mem import MemEfficient
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead

VOCAB = 3001


def train(fn, model, *args):
    model.zero_grad()
    loss = fn(*args)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


class LitgptLoss(torch.nn.Module):
    def __init__(self, model, style):
        super().__init__()
        self.model, self.style = model, style

    def forward(self, tokens):
        logits = self.model(tokens)
        if self.style == "reshape":
            return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))
        return chunked_cross_entropy(logits[..., :-1, :], tokens[..., 1:], chunk_size=0)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["reshape", "litgpt.utils"])
def test_litgpt_model(style):
    config = Config.from_name("pythia-14m", n_layer=1, n_embd=32, n_head=2, padded_vocab_size=VOCAB, block_size=64)
    model = LitgptLoss(GPT(config), style)
    twin = copy.deepcopy(model)
    tokens = torch.randint(0, VOCAB, (3, 41))
    transform = ChunkLossHead(chunks=8)
    compiled = thunder.jit(model, transforms=[transform])
    loss, grads = train(compiled, model, tokens)
    want_loss, want = train(twin, twin, tokens)
    (plan,) = transform.record.loops
    assert (plan.n, plan.mode) == (3 * 40, "grads-in-forward")
    torch.testing.assert_close(loss, want_loss)
    assert (grads - want).norm() < 1e-5 * want.norm()
    assert measure_peak(train, compiled, model, tokens) < measure_peak(train, twin, twin, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing,most_mib", [(True, 20), (False, 28)])
def test_the_demos_step_with_its_loss_inside(checkpointing, most_mib):
    """Eager takes 50.4 and 77.2 MiB, torch.compile 25.1 and 39.8."""
    program = llama_step(vocab=8000, checkpointing=checkpointing, loss_inside=True)
    compiled = thunder.jit(program.fn, transforms=[MemEfficient()])
    program.step(compiled)
    program.step(compiled)
    assert measure_peak(lambda: program.step(compiled)) <= most_mib * 2**20


@pytest.mark.slow
def test_bert_for_masked_lm():
    from thunder.dynamo import thunderfx
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    twin = copy.deepcopy(model)
    tokens = torch.randint(0, VOCAB, (3, 41))
    labels = tokens.masked_fill(torch.rand(3, 41) > 0.3, -100)
    transform = ChunkLossHead(chunks=8)
    compiled = thunderfx(lambda i, t: model(input_ids=i, labels=t).loss, transforms=[transform])
    loss, grads = train(compiled, model, tokens, labels)
    want_loss, want = train(lambda i, t: twin(input_ids=i, labels=t).loss, twin, tokens, labels)
    assert [p.n for r in transform.records for p in r.loops] == [3 * 41]
    torch.testing.assert_close(loss, want_loss)
    assert (grads - want).norm() < 1e-5 * want.norm()


@pytest.mark.slow
def test_logits_in_the_output_are_refused_with_the_line():
    config = Config.from_name("pythia-14m", n_layer=1, n_embd=32, n_head=2, padded_vocab_size=VOCAB, block_size=64)
    model = GPT(config)

    def fn(tokens):
        logits = model(tokens)
        return F.cross_entropy(logits.view(-1, VOCAB), tokens.view(-1)), logits

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            logits = self.model(tokens)
            return F.cross_entropy(logits.view(-1, VOCAB), tokens.view(-1)), logits

    transform = ChunkLossHead(chunks=8)
    tokens = torch.randint(0, VOCAB, (2, 9))
    loss, logits = thunder.jit(Both(), transforms=[transform])(tokens)
    want_loss, want_logits = fn(tokens)
    torch.testing.assert_close(loss, want_loss)
    torch.testing.assert_close(logits, want_logits)
    head = next(r for r in transform.record.refusals if "returned whole" in r.reason)
    assert "lm_head_weight" in head.head and head.head_source
