"""What `memory_efficient` makes of a call's inputs before the compiled part: eager computes the same loss of both."""

from __future__ import annotations

import copy
import random
import sys
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf

from tests.programs.hugging_face import NO_DROPOUT, SIZES, WORDS, gpt2, llama, text, tokens
from thunder_mem import PredictionError, predict
from thunder_mem.integrations.call_inputs import not_compiled, prepared
from thunder_mem.integrations.traceable_code import _LOSSES_IN_FLOAT32
from thunder_mem.integrations.transformers import memory_efficient, programs

PAIR = {
    "vocab_size": WORDS,
    "d_model": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    **{f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))},
    **{f"{half}_ffn_dim": 16 for half in ("encoder", "decoder")},
}
SMALL = {**SIZES, "num_hidden_layers": 1, **NO_DROPOUT}


def bert2bert():
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(**SMALL), hf.BertConfig(**SMALL))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return hf.EncoderDecoderModel(config)


def fsmt():
    words = {"src_vocab_size": WORDS, "tgt_vocab_size": WORDS, "langs": ["en", "de"]}
    return hf.FSMTForConditionalGeneration(hf.FSMTConfig(**{**PAIR, **words}))


def t5gemma():
    part = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "attention_dropout": 0.0}
    config = hf.T5GemmaConfig(encoder=dict(part), decoder=dict(part), vocab_size=WORDS, dropout_rate=0.0)
    return hf.T5GemmaForConditionalGeneration(config)


def xlm():
    sizes = {"vocab_size": WORDS, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 64}
    return hf.XLMWithLMHeadModel(hf.XLMConfig(**sizes, dropout=0.0, attention_dropout=0.0))


MODELS = {
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**PAIR)),
    "bart, classes": lambda: hf.BartForSequenceClassification(hf.BartConfig(**PAIR)),
    "mbart": lambda: hf.MBartForConditionalGeneration(hf.MBartConfig(**PAIR)),
    "mbart, classes": lambda: hf.MBartForSequenceClassification(hf.MBartConfig(**PAIR)),
    "bert2bert": bert2bert,
    "fsmt": fsmt,
    "t5gemma": t5gemma,
    "xlm": xlm,
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL)),
    "llama": lambda: llama(layers=1)[0],
    "gpt2": lambda: gpt2(layers=1)[0],
}
MASKS = {
    "no mask": lambda ids, padding: None,
    "ones": lambda ids, padding: torch.ones_like(ids),
    "padded": lambda ids, padding: (ids != padding).long(),
}


def batch_for(name, model, mask):
    """Rows that end with padding, and labels that begin with ignored tokens."""
    padding = {"xlm": 2, "llama": 0, "gpt2": 0}.get(name, getattr(model.config, "pad_token_id", None) or 0)
    ids, labels = tokens(), tokens()
    ids[:, -1] = min(model.config.eos_token_id or 5, WORDS - 1)  # the tokens of which Bart's classes are made
    ids[1, 11:15] = padding
    labels[:, :3] = -100
    labels = torch.tensor([0, 1]) if "classes" in name else labels
    return {"input_ids": ids, "attention_mask": MASKS[mask](ids, padding), "labels": labels}


@pytest.fixture
def in_float64(name):
    """Some masks of transformers are made in the default dtype; those of FSMT want float32."""
    torch.set_default_dtype(torch.float32 if name == "fsmt" else torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_stays_whatever_is_made_of_the_inputs(name, mask, in_float64):
    """FSMT shifts its inputs and not its labels, bert2bert hides what was ignored, XLM makes a mask of its tokens."""
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = batch_for(name, model, mask)
    expected = model(**{k: value for k, value in batch.items() if value is not None}).loss
    made = prepared(model, copy.copy(batch)).values
    assert model(**made).loss.item() == pytest.approx(expected.item(), rel=1e-6 if name == "fsmt" else 1e-13)


@pytest.mark.parametrize(
    "name, keeps", [("llama", False), ("gpt2", False), ("bart", True), ("xlm", True), ("t5gemma", True)]
)
def test_a_mask_of_ones_stays_only_where_the_model_would_make_another(name, keeps):
    model = MODELS[name]()
    batch = batch_for(name, model, "ones")
    assert ("attention_mask" in prepared(model, batch).values) == keeps
    batch["input_ids"] = tokens()  # without padding
    assert "attention_mask" not in prepared(model, batch).values


def test_a_masks_decoder_is_asked_for_its_own_tokens():
    model = MODELS["bart"]()
    batch = {**batch_for("bart", model, "padded"), "decoder_attention_mask": torch.ones(2, 16, dtype=torch.long)}
    assert "decoder_attention_mask" in prepared(model, batch).values  # ignored labels became padding
    batch["labels"] = tokens()
    assert "decoder_attention_mask" not in prepared(model, batch).values


def test_a_mask_of_something_else_stays():
    ones, twos = torch.ones(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)
    twos[0, 0] = 2  # global attention of Longformer
    model = MODELS["llama"]()
    ids, embeddings = tokens(), torch.randn(2, 16, 16)
    for given, keeps in (
        ({"input_ids": ids, "attention_mask": ones}, False),
        ({"inputs_embeds": embeddings, "attention_mask": ones}, False),
        ({"input_ids": ids, "attention_mask": twos}, True),
        ({"input_ids": ids, "attention_mask": torch.zeros_like(ones)}, True),
        ({"input_ids": ids, "bbox": torch.zeros(2, 16, 4), "attention_mask": ones}, True),
        ({"flattened_patches": embeddings, "attention_mask": ones}, True),
    ):
        assert ("attention_mask" in prepared(model, given).values) == keeps
    unknown = {"input_ids": ids, "decoder_attention_mask": ones}  # the decoder's tokens are made inside
    assert "decoder_attention_mask" not in prepared(model, unknown).values
    assert "decoder_attention_mask" in prepared(MODELS["t5gemma"](), unknown).values


class OfUser(hf.BartForConditionalGeneration):
    """A class of a session without files."""


class Unindented(hf.BartForConditionalGeneration):
    def forward(self, input_ids=None, labels=None, decoder_input_ids=None, **options):
        """
        Text at the margin.
        """
        if labels is not None and decoder_input_ids is None:
            decoder_input_ids = torch.roll(labels, 1)
        return super().forward(input_ids=input_ids, labels=labels, decoder_input_ids=decoder_input_ids, **options)


def test_the_statement_of_a_users_class(monkeypatch):
    batch = {"input_ids": tokens(), "labels": tokens()}
    monkeypatch.setattr(OfUser, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    expected = prepared(MODELS["bart"](), batch).values["decoder_input_ids"]
    assert torch.equal(prepared(OfUser(hf.BartConfig(**PAIR)), batch).values["decoder_input_ids"], expected)
    made = prepared(Unindented(hf.BartConfig(**PAIR)), batch).values["decoder_input_ids"]
    assert torch.equal(made, torch.roll(batch["labels"], 1))
    model = MODELS["bart"]()
    monkeypatch.setattr(type(model), "forward", lambda self, input_ids=None, labels=None: None)
    assert "decoder_input_ids" not in prepared(model, batch).values


def test_the_decoders_tokens_need_a_padding_token_as_in_eager():
    model = bert2bert()
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id"):
        prepared(model, batch_for("bert2bert", model, "ones"))


@pytest.mark.slow
def test_a_frozen_model_trains_its_inputs():
    model, _ = llama(layers=1)
    model.requires_grad_(False)
    prompt, ids = torch.randn(2, 4, 16, requires_grad=True), tokens()
    values = {"inputs_embeds": torch.cat([prompt, model.model.embed_tokens(ids)], 1), "labels": tokens(columns=20)}
    expected = torch.autograd.grad(model(**values).loss, prompt, retain_graph=True)
    memory_efficient(model, executors=[], strict=True)
    torch.testing.assert_close(torch.autograd.grad(model(**values).loss, prompt), expected)
    assert programs(model)


def test_the_hook_for_frozen_checkpoints_is_not_needed():
    model, batch = llama(layers=1)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert not_compiled(model, batch) is None
    model.model.norm.register_forward_hook(lambda module, args, output: output)
    assert "model.norm has a hook" in not_compiled(model, batch)
    model.disable_input_require_grads()
    assert "model.norm has a hook" in not_compiled(model, batch)


@pytest.mark.slow
def test_labels_of_which_a_model_makes_no_loss_get_its_own_outputs():
    """`BertForPreTraining` wants labels of the next sentence, too."""
    model = hf.BertForPreTraining(hf.BertConfig(**SMALL))
    ids = tokens()
    memory_efficient(model, executors=[])
    with pytest.warns(UserWarning, match="the model makes no loss of these inputs"):
        output = model(input_ids=ids, labels=ids)  # one tensor twice, of which one use is not read
    assert "prediction_logits" in output and not programs(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart, classes", "bert2bert", "fsmt", "xlm"])
def test_the_gradients_stay_whatever_is_made_of_the_inputs(name, in_float64):
    model = MODELS[name]()
    eager = copy.deepcopy(model)
    batch = batch_for(name, model, "ones")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory_efficient(model, executors=[])
        for m in (model, eager):
            m(**batch).loss.backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.slow
def test_a_prediction_of_a_traced_model_says_what_to_give():
    model, batch = llama(layers=1)
    memory_efficient(model, executors=[])
    with pytest.raises(
        TypeError, match=r"not LlamaForCausalLM; programs\(model\)\[-1\]\.compiled is what was compiled"
    ):
        predict(model, kwargs=text())
    model(**batch).loss.backward()
    (program,) = programs(model)
    assert "tensor(" not in repr(program)
    if program.way == "thunder.jit":
        with pytest.raises(PredictionError, match="predict its last program without arguments"):
            predict(program.compiled, kwargs=batch)
        # Thunder fails inside of a mode of transformers' that makes copies of `x[0]`, and does not leave it.
        assert (x := torch.randn(2, 3))[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert predict(program.compiled).peak_bytes > 0


def test_an_attempt_that_fails_draws_no_random_numbers(monkeypatch):
    model, batch = gpt2(layers=1)

    def forward(x):
        noisy = x * (1 + np.random.rand()) * (1 + random.random()) + torch.rand(1)
        return noisy if bool(noisy.sum() < 1e9) else x  # which Thunder cannot trace

    monkeypatch.setattr(model.transformer.ln_f, "forward", forward)
    eager = copy.deepcopy(model)
    memory_efficient(model, executors=[], through="thunder.jit")
    losses = []
    for m in (eager, model):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append(m(**batch).loss.item())
    assert losses[0] == losses[1] and not programs(model)


@pytest.mark.slow
def test_under_autocast_a_loss_is_in_float32():
    """As PyTorch's autocast computes it; Thunder's computes it in bfloat16."""
    torch.manual_seed(0)
    model = hf.BertForMaskedLM(hf.BertConfig(**SMALL))
    eager, ids = copy.deepcopy(model), tokens()
    memory_efficient(model, executors=[], strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (m(input_ids=ids, labels=ids.clone()).loss for m in (model, eager))
    assert programs(model) and found.dtype == expected.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2e-4)  # bfloat16 itself has steps of 0.03
    assert model(input_ids=ids, labels=ids.clone()).loss.dtype == torch.float32


def test_class_weights_under_autocast_are_in_float32_too():
    logits, weight = torch.randn(4, 3).bfloat16(), torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    loss = _LOSSES_IN_FLOAT32[torch.nn.CrossEntropyLoss](weight=weight)(logits, torch.arange(4) % 3)
    expected = torch.nn.functional.cross_entropy(logits.float(), torch.arange(4) % 3, weight.float())
    torch.testing.assert_close(loss, expected)
