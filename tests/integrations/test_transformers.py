"""`memory_efficient`: models of transformers against eager in float64, calls that train nothing, bad input."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import warnings

import pytest
import thunder
import torch

pytest.importorskip("transformers")

from tests.programs.hugging_face import FAMILIES, THROUGH_FX, bert, gpt2, llama, opt, tokens
from thunder_mem import BudgetError, MemEfficient, PredictionError, StepInBackward, compare, measure_peak, predict
from thunder_mem.integrations import programs as compiled_programs
from thunder_mem.integrations.transformers import LossOutput, memory_efficient, programs


def gradients(model):
    return {name: p.grad.detach().double() for name, p in model.named_parameters() if p.grad is not None}


def backward(model, batch):
    """One backward's loss and gradients, which replace those before."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach().double(), **gradients(model)}


def in_double(batch):
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def exactly(model, batch):
    """In float64; transformers makes some masks in the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        return backward(model, in_double(batch))
    finally:
        torch.set_default_dtype(torch.float32)


def error(found, reference):
    """The largest distance of a tensor, in its own largest element."""
    assert found.keys() == reference.keys()
    return max(((found[k] - r).abs().max() / r.abs().max().clamp(min=1e-3)).item() for k, r in reference.items())


def ways(model):
    return {program.way for program in programs(model)}


def assert_trains_as_eager(model, batch, steps=2, **options):
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    assert memory_efficient(model, executors=[], **options) is model
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager, exact)]
    for _ in range(steps):
        ours, theirs, reference = backward(model, batch), backward(eager, batch), exactly(exact, batch)
        assert error(ours, reference) <= max(4 * error(theirs, reference), 1e-5)
        for optimizer in optimizers:
            optimizer.step()
    return eager


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_in_eager_with_no_more_memory(name):
    model, batch = FAMILIES[name]()
    model.train()
    eager = assert_trains_as_eager(model, batch, strict=True)
    assert ways(model) == {"thunderfx" if name in THROUGH_FX else "thunder.jit"}
    for m in (model, eager):
        m.zero_grad()
    assert measure_peak(lambda: backward(model, batch)) <= measure_peak(lambda: backward(eager, batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_gradient_checkpointing_trains_as_in_eager_with_no_more_memory(name):
    model, batch = FAMILIES[name]()
    model.train()
    model.gradient_checkpointing_enable()
    eager = assert_trains_as_eager(model, batch, steps=1, strict=True)
    eager.gradient_checkpointing_enable({"use_reentrant": False})
    assert ways(model) == {"thunderfx" if name in THROUGH_FX else "thunder.jit"}
    for m in (model, eager):
        m.zero_grad()
    assert measure_peak(lambda: backward(model, batch)) <= measure_peak(lambda: backward(eager, batch))
    (before,) = programs(model)
    model.gradient_checkpointing_disable()
    assert error(backward(model, batch), backward(eager, batch)) < 1e-5
    assert before in programs(model) and len(programs(model)) == 2, "another program without checkpoints"


@pytest.mark.slow
def test_masks_are_those_of_transformers():
    """Each of these calls is another program, and none may take another's."""
    model, batch = llama(layers=1)
    ids = batch["input_ids"]
    labels = ids.clone()
    left = torch.ones_like(ids)
    left[1, :5] = 0
    restarts = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16)
    eager = copy.deepcopy(model)
    memory_efficient(model, executors=[], strict=True)
    for more in (
        {},
        {"attention_mask": torch.ones_like(ids)},
        {"attention_mask": batch["attention_mask"]},
        {"attention_mask": left},
        {"position_ids": restarts, "use_cache": False},
        {"position_ids": restarts, "attention_mask": torch.ones_like(ids)},
        {"num_items_in_batch": 20},
    ):
        given = {"input_ids": ids, "labels": labels, **more}
        assert error(backward(model, given), backward(eager, given)) < 1e-5, more
    for m in (model, eager):
        m.config.num_hidden_layers = 0  # which the forward reads
    shallow = backward(eager, batch)
    assert error(backward(model, batch), shallow) < 1e-5
    for m in (model, eager):
        m.config.num_hidden_layers = 1
    apart = backward(eager, {"input_ids": ids, "labels": labels, "position_ids": restarts, "use_cache": False})
    together = backward(eager, {"input_ids": ids, "labels": labels, "position_ids": restarts, "use_cache": True})
    assert error(apart, together) > 1e-3, "the case proves nothing"
    with pytest.warns(UserWarning, match="position_ids restart inside a row.*give it use_cache=False"):
        assert error(backward(model, {"input_ids": ids, "labels": labels, "position_ids": restarts}), together) == 0


@pytest.mark.slow
@pytest.mark.parametrize("through", ["thunder.jit", "thunderfx"])
def test_train_and_eval_and_frozen_parameters_are_told_apart(through):
    model, batch = gpt2(layers=1, dropout=0.5)
    model.eval()
    eager = copy.deepcopy(model)
    memory_efficient(model, executors=[], through=through)
    expected = backward(eager, batch)
    assert error(backward(model, batch), expected) < 1e-5
    model.train()
    assert len({model(**batch).loss.item() for _ in range(3)}) == 3, "dropout draws anew"
    model.eval()
    for m in (model, eager):
        m.transformer.wte.requires_grad_(False)
    assert error(backward(model, batch), backward(eager, batch)) < 1e-5


@pytest.mark.slow
def test_a_models_own_attention_stays():
    model, batch = llama(layers=1, attn_implementation="eager")
    assert_trains_as_eager(model, batch, steps=1, strict=True)
    assert ways(model) == {"thunder.jit"}


@pytest.mark.slow
def test_without_labels_the_outputs_are_the_models_own():
    model, batch = gpt2(layers=1)
    eager = copy.deepcopy(model)
    memory_efficient(model, executors=[])
    with pytest.warns(UserWarning, match="GPT2LMHeadModel trains without labels, so its logits exist whole"):
        logits = model(input_ids=batch["input_ids"]).logits
    torch.testing.assert_close(logits, eager(input_ids=batch["input_ids"]).logits)
    logits.sum().backward()
    assert ways(model) == {"thunder.jit"}


@pytest.mark.slow
def test_options_reach_the_plan():
    model, batch = gpt2(layers=1)
    memory_efficient(model, executors=[], budget=1000)
    with pytest.raises(BudgetError):
        model(**batch)


@pytest.mark.slow
def test_the_backward_updates_the_parameters():
    model, batch = gpt2(layers=1)
    eager = copy.deepcopy(model)
    optimizer = StepInBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    memory_efficient(model, executors=[], optimizer=optimizer)
    for m, step in ((model, optimizer.step), (eager, torch.optim.SGD(eager.parameters(), lr=0.1).step)):
        backward(m, batch)
        step()
    assert all(p.grad is None for p in model.parameters())
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_trainer_trains_evaluates_and_saves(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model, _ = llama(layers=1)
    eager = copy.deepcopy(model)
    memory_efficient(model, executors=[], strict=True)
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens(12)]
    losses = []
    for m, folder in ((model, tmp_path / "ours"), (eager, tmp_path / "theirs")):
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "seed": 0}
        quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        arguments = TrainingArguments(output_dir=str(folder), **options, **quiet)
        trainer = Trainer(model=m, args=arguments, train_dataset=rows, eval_dataset=rows[:2])
        losses.append((trainer.train().training_loss, trainer.evaluate()["eval_loss"]))
        trainer.save_model()
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert ways(model) == {"thunder.jit"}
    again = type(model).from_pretrained(tmp_path / "ours")
    for saved, ours, theirs in zip(again.parameters(), model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(saved, ours)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_a_model_that_thunder_cannot_trace_runs_as_before(monkeypatch):
    model, batch = gpt2(layers=1)
    monkeypatch.setattr(model.transformer.ln_f, "forward", lambda x: x if bool(x.sum() > 1e9) else x * 1.0)
    eager = copy.deepcopy(model)
    memory_efficient(model, executors=[], through="thunder.jit")
    with pytest.warns(UserWarning, match="runs without MemEfficient: Thunder cannot trace it .thunder.jit: casting"):
        found = backward(model, batch)
    assert error(found, backward(eager, batch)) == 0


# ---- calls that compile nothing ----


@pytest.fixture
def small():
    model, batch = gpt2(layers=1)
    return model, copy.deepcopy(model), batch


def test_without_gradients_the_model_runs_as_before(small):
    model, eager, batch = small
    memory_efficient(model)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, eager(**batch).logits)
    generated = model.generate(batch["input_ids"][:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    expected = eager.generate(batch["input_ids"][:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, expected)
    model.requires_grad_(False)
    assert model(**batch).logits is not None
    assert not programs(model)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"use_cache": True}, "use_cache=True asks for keys and values that only generation needs"),
        ({"output_hidden_states": True}, "output_hidden_states=True asks for values of all layers"),
    ],
)
def test_what_is_not_compiled_runs_as_before_and_says_why(small, more, why):
    model, eager, batch = small
    memory_efficient(model)
    with pytest.warns(UserWarning, match=f"GPT2LMHeadModel runs without MemEfficient: {why}"):
        output = model(**batch, **more)
    assert torch.equal(output.logits, eager(**batch, **more).logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch, **more)  # said once


def test_inputs_that_are_no_tensors_are_named():
    model, batch = FAMILIES["t5"]()
    eager = copy.deepcopy(model)
    memory_efficient(model)
    given = {"encoder_outputs": (torch.randn(2, 16, 16),), "labels": batch["labels"]}
    with pytest.warns(UserWarning, match="encoder_outputs is a tuple, and the compiled part takes tensors"):
        found = backward(model, given)
    assert error(found, backward(eager, given)) == 0


def test_a_continued_sequence_is_generation(small):
    model, _, batch = small
    memory_efficient(model)
    with torch.no_grad():
        past = model(input_ids=batch["input_ids"], use_cache=True).past_key_values
    with pytest.warns(UserWarning, match="past_key_values continue a sequence, which is generation"):
        model(input_ids=tokens(columns=1), past_key_values=past)


def test_a_hook_inside_is_called(small):
    model, eager, batch = small
    memory_efficient(model)
    for m in (model, eager):
        m.transformer.ln_f.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.warns(UserWarning, match=r"transformer.ln_f has a hook, which a compiled step would not call"):
        found = backward(model, batch)
    assert error(found, backward(eager, batch)) == 0


def test_the_model_stays_the_users_model(small, tmp_path):
    model, eager, _ = small
    memory_efficient(model)
    assert type(model) is type(eager) and list(model.state_dict()) == list(eager.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in eager.named_modules()]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), eager.parameters(), strict=True))
    other = copy.deepcopy(model)
    assert other.forward.model is other and other._thunder_mem is not model._thunder_mem
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.forward.model is loaded and not programs(loaded)
    assert inspect.signature(loaded.forward) == inspect.signature(eager.forward)


@pytest.mark.slow
def test_what_is_set_after_the_first_call_counts(small):
    model, eager, batch = small
    memory_efficient(model, executors=[])
    backward(model, batch)

    def seven_times(logits, labels, vocab_size, **_):
        return 7 * torch.nn.functional.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))

    for m in (model, eager):
        m.loss_function = seven_times
        m.transformer.h[0].ln_1.eps = 0.5
    assert error(backward(model, batch), backward(eager, batch)) < 1e-5


def test_data_parallel_is_refused(small):
    """On several GPUs `nn.DataParallel` copies the model in each call, as `nn.parallel.replicate` does."""
    model, eager, _ = small
    memory_efficient(model)
    eager._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match=r"nn\.DataParallel cannot copy a memory-efficient model: start one"):
        model._replicate_for_data_parallel()


@pytest.mark.slow
def test_compare_takes_a_memory_efficient_model(small):
    model, _, batch = small
    with pytest.raises(TypeError, match="has a MemEfficient already: give its options to memory_efficient"):
        compare(memory_efficient(model, executors=[]), kwargs=batch, mem_efficient=MemEfficient())
    found = compare(model, kwargs=batch, repeats=1)
    assert found.best.name == "MemEfficient" and ways(model) == {"thunder.jit"}
    assert found["MemEfficient"].peak_bytes < found["eager"].peak_bytes
    assert found["MemEfficient"].result_difference < 1e-5 and found["MemEfficient"].gradient_difference < 1e-3
    assert all(p.grad is None for p in model.parameters())


def test_bad_input_gets_one_sentence(small):
    model, _, batch = small
    with pytest.raises(TypeError, match="takes a PreTrainedModel of transformers, not Linear"):
        memory_efficient(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"through is 'thunder.jit' or 'thunderfx', not 'inductor'"):
        memory_efficient(model, through="inductor")
    with pytest.raises(TypeError, match=r"write executors=\['mem_pointwise'\]"):
        memory_efficient(model, executors="mem_pointwise")
    with pytest.raises(TypeError, match="bugdet"):
        memory_efficient(model, bugdet="1GiB")
    with pytest.raises(ValueError, match="budget"):
        memory_efficient(model, budget="a lot")
    with pytest.raises(TypeError, match="this GPT2LMHeadModel is not memory efficient"):
        programs(model)
    assert "forward" not in vars(model)
    memory_efficient(model)
    with pytest.raises(ValueError, match="memory efficient already"):
        memory_efficient(model)
    with pytest.raises(TypeError, match="multiple values"):
        model(batch["input_ids"], input_ids=batch["input_ids"])
    patched, _ = gpt2(layers=1)
    patched.forward = patched.forward
    with pytest.raises(ValueError, match="another library has replaced this model's forward"):
        memory_efficient(patched)


def test_a_prediction_names_what_compiles_a_model_that_thunder_cannot_trace():
    model, batch = bert(layers=0)

    class Branching(type(model)):
        def forward(self, **given):
            return super().forward(**given) if given["input_ids"].sum() > 0 else None

    model.__class__ = Branching
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient()])
    with pytest.raises(PredictionError, match=r"data dependency.*; .*memory_efficient\(model\) of thunder_mem"):
        predict(jitted, kwargs=batch)


def test_a_model_that_makes_its_loss_is_traced_by_thunder():
    model, batch = bert(layers=0)
    model.eval()
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(jitted(**batch).loss, model(**batch).loss)


def test_the_loss_is_all_that_is_kept():
    output = LossOutput(loss=torch.tensor(1.0))
    assert output["loss"] == output[0] == output.loss and output.aux_loss is None and list(output) == ["loss"]
    assert copy.copy(output).loss == 1
    with pytest.raises(AttributeError, match=r"logits is not kept.*under torch.no_grad\(\)"):
        output.logits  # noqa: B018
    assert not hasattr(output, "logits")


@pytest.mark.slow
def test_a_head_behind_a_break_runs_in_chunks():
    """No output names its logits, which would leave Dynamo's last graph beside the loss."""
    model, batch = opt(words=4000, columns=128)
    model.train()
    eager = assert_trains_as_eager(model, batch, steps=1, strict=True)
    assert ways(model) == {"thunderfx"}
    for m in (model, eager):
        m.zero_grad()
    assert measure_peak(lambda: backward(model, batch)) < measure_peak(lambda: backward(eager, batch)) / 2
    with torch.no_grad():
        assert model(**batch).logits.shape == (2, 128, 4000)


@pytest.mark.parametrize("step", [1, 2])
def test_a_program_without_gradients_is_not_taken(monkeypatch, step):
    """Dynamo may leave gradients off where it breaks a model's code: gpt-oss, and DeepSeek-V3 from its second step."""
    calls = []

    def leaves_gradients_off(whole, way, how):
        def compiled(**values):
            calls.append(way)
            torch.set_grad_enabled(len(calls) < step)
            return whole(**values)

        return compiled

    monkeypatch.setattr(compiled_programs, "_compile", leaves_gradients_off)
    model, batch = gpt2(layers=1)
    memory_efficient(model, executors=[], through="thunderfx")
    for _ in range(1, step):
        assert model(**batch).loss.requires_grad and programs(model)
    with pytest.warns(UserWarning, match="runs without MemEfficient: .*thunderfx: its loss has no gradient"):
        loss = model(**batch).loss
    assert torch.is_grad_enabled() and loss.requires_grad and not programs(model)
    assert model(**batch).loss.requires_grad
    assert len(calls) == step, "a way that failed is not tried again"


@torch.jit.script
def scripted(x):
    return x * 2


def test_thunder_is_not_asked_to_trace_script_functions(monkeypatch):
    """It would abort the process, as it does for DeBERTa-v2."""
    model, batch = gpt2(layers=1)
    monkeypatch.setattr(sys.modules[type(model).__module__], "scripted", scripted, raising=False)
    memory_efficient(model, executors=[], through="thunder.jit")
    with pytest.warns(UserWarning, match="thunder.jit: it cannot trace a call of torch.jit.script's scripted"):
        assert model(**batch).loss.requires_grad


@pytest.mark.slow
def test_strides_that_inductor_did_not_foresee_leave_a_model_to_eager(monkeypatch):
    """Thunder's `repeat` is a view, and Inductor compiles `sinc` for the strides of eager's copy (SigLIP)."""
    model, batch = gpt2(layers=1)
    model.probe = torch.nn.Parameter(torch.rand(1, 1, 32))
    forward = type(model).forward

    def with_sinc(self, **values):
        output = forward(self, **values)
        output.loss = output.loss + torch.sinc(self.probe.repeat(3, 1, 1).transpose(0, 1)).sum()
        return output

    monkeypatch.setattr(type(model), "forward", with_sinc)
    memory_efficient(model, executors=[], through="thunderfx")
    with pytest.warns(UserWarning, match="runs without MemEfficient: .*thunderfx: expected size"):
        model(**batch).loss.backward()
    assert model.probe.grad is not None
