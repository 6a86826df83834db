"""litgpt's `pretrain` and `finetune_lora` by its own command line, with `MemEfficient` and without."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("litgpt")
pytest.importorskip("jsonargparse")

import litgpt.pretrain
from lightning.fabric import wrappers
from litgpt import GPT, Config
from litgpt.__main__ import main as litgpt_main
from litgpt.data import DataModule
from litgpt.utils import save_config

from thunder_mem.integrations import litgpt as ours
from thunder_mem.integrations.litgpt import main, memory_efficient

SIZES = {"block_size": 64, "n_layer": 1, "n_embd": 16, "n_head": 4, "n_query_groups": 2, "intermediate_size": 24}
PARTS = {"name": "tiny", "padded_vocab_size": 64, "mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm"}
CONFIG = Config(**PARTS, **SIZES)


@dataclass
class Numbers(DataModule):
    """Rows of random numbers."""

    rows: int = 8
    columns: int = field(default=0, init=False)
    batch_size: int = field(default=1, init=False)

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size, self.columns = batch_size, max_seq_length + 1

    def train_dataloader(self):
        numbers = torch.randint(64, (self.rows, self.columns), generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(numbers, self.batch_size)

    val_dataloader = train_dataloader


def run(command, folder, arguments):
    """Run one of the two command lines in the test's process."""
    command([str(a) for a in arguments] + ["--out_dir", str(folder), "--devices", "1", "--precision", "32-true"])


def plain(arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["litgpt", *arguments])
        patch.setattr(torch, "compile", lambda model: model)
        litgpt_main()


def sgd(lr):
    return json.dumps({"class_path": "torch.optim.SGD", "init_args": {"lr": lr}})


def saved(path):
    state = torch.load(path, weights_only=False)
    return state.get("model", state)


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-5, rtol=1e-3)


@pytest.fixture(autouse=True)
def as_lightning_wraps_it(monkeypatch):
    """Thunder's `thunderfx` unwraps `torch.compile` for the rest of the process; `Fabric.setup` needs it wrapped."""
    if inspect.unwrap(torch.compile) is torch.compile:
        monkeypatch.setattr(torch, "compile", wrappers._capture_compile_kwargs(torch.compile))


@pytest.fixture
def counted(monkeypatch):
    """The losses that were computed by a compiled program."""
    losses = []
    loss = ours._Forward.loss

    def count(self, *args):
        losses.append(loss(self, *args))
        return losses[-1]

    monkeypatch.setattr(ours._Forward, "loss", count)
    return losses


@pytest.mark.slow
def test_pretrain_trains_as_litgpt(tmp_path, counted):
    lines = ["pretrain", "tiny", "--model_config", json.dumps({**PARTS, **SIZES}), "--logger_name", "csv"]
    lines += ["--data", f"{__name__}.Numbers", "--train.global_batch_size", 4, "--train.micro_batch_size", 2]
    lines += ["--train.max_tokens", 4 * 64 * 3, "--train.lr_warmup_steps", 0, "--optimizer", sgd(0.1)]
    lines += ["--eval.max_iters", 1]
    run(plain, tmp_path / "theirs", lines)
    assert not counted
    run(main, tmp_path / "ours", [*lines, "--no_fusion"])
    assert len(counted) == 6
    found, expected = (saved(tmp_path / who / "final" / "lit_model.pth") for who in ("ours", "theirs"))
    assert_close(found, expected)
    assert counted[4] < counted[0], "the same rows, after a step"
    assert litgpt.pretrain.chunked_cross_entropy.__module__ == "litgpt.utils", "outside, litgpt is as before"


def checkpoint(folder):
    """A model with random weights and a tokenizer that knows letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    torch.manual_seed(3)
    torch.save(GPT(CONFIG).state_dict(), folder / "lit_model.pth")
    save_config(CONFIG, folder)
    letters = {letter: i for i, letter in enumerate(["?", "$", *"abcdefghijklmnopqrstuvwxyz #.,:\n"])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Words", "eos_token": "$"}))
    return folder


@pytest.mark.slow
def test_finetune_lora_trains_as_litgpt(tmp_path, counted):
    """Rows of different lengths, a gradient from two of them, validation, generation and the merged result."""
    base = checkpoint(tmp_path / "base")
    texts = [{"instruction": "", "output": "abcdefgh"[:n]} for n in (3, 5, 8, 4, 6, 7)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    lines = ["finetune_lora", base, "--data", "JSON", "--data.json_path", tmp_path / "texts.json"]
    lines += ["--data.val_split_fraction", "0.34", "--data.num_workers", "0", "--data.prompt_style", "stablecode"]
    lines += ["--lora_dropout", "0", "--lora_mlp", "true", "--optimizer", sgd(1.0)]
    lines += ["--train.global_batch_size", "2", "--train.micro_batch_size", "1", "--train.lr_warmup_steps", "1"]
    lines += ["--train.max_steps", "3", "--train.epochs", "9", "--eval.interval", "1", "--eval.max_new_tokens", "2"]
    run(plain, tmp_path / "theirs", lines)
    assert not counted
    run(main, tmp_path / "ours", [*lines, "--no_fusion"])
    assert len(counted) == 6
    start = saved(base / "lit_model.pth")
    for name in ("lit_model.pth.lora", "lit_model.pth"):
        found, expected = (saved(tmp_path / who / "final" / name) for who in ("ours", "theirs"))
        assert_close(found, expected)
        assert any(not torch.equal(tensor, start.get(key, torch.zeros(1))) for key, tensor in found.items())


# ---- what is refused ----


def test_logits_of_a_training_step_can_only_be_cut():
    logits = ours._Logits(None, torch.zeros(1, 4, dtype=torch.long))
    logits[-1] = logits[-1][..., :-1, :]
    assert logits._cut == 1
    with pytest.raises(TypeError, match=r"are not made, so they have no \[0\]"):
        logits[0]
    with pytest.raises(TypeError, match="are not made, so they cannot be changed"):
        logits[0] = logits


def test_several_devices_and_wrong_options_get_a_sentence():
    with pytest.raises(ValueError, match="trains on one device: give --devices 1"):
        ours._refuse_several(2)
    with pytest.raises(ValueError, match="budget"), memory_efficient(budget="a lot"):
        pass
    with pytest.raises(TypeError, match="bugdet"), memory_efficient(bugdet="1GiB"):
        pass


def test_options_of_a_command_that_does_not_take_them_are_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["finetune_full", "checkpoints/tiny", "--budget", "1GiB"])
    assert "--budget and --no_fusion are for pretrain, finetune, finetune_lora, not for finetune_full" in (
        capsys.readouterr().err
    )
