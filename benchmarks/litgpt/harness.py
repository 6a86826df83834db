"""Thunder's `Benchmark_litGPT` with the options of this package, on a GPU, a CPU, or a GPU that is not there.

The class is Thunder's own, subclassed: its constructor, data, optimizer, metrics and output stay. What changes:
who compiles (`setup_compile`), which models there are (`init_model`), a loop for the loss inside, and how the
peak is found where there is no GPU to ask. Where its litgpt, Thunder and torch work, so does this.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import statistics
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import thunder
import torch
from torch.utils.data import DataLoader

from benchmarks.litgpt.device_peaks import DevicePeaks, attention_backend
from benchmarks.litgpt.fake_loop import LoopPeak, fake_cpu, fake_peak
from benchmarks.litgpt.machine import machine_kind, versions
from benchmarks.litgpt.measured_loop import measured_peak
from benchmarks.litgpt.models import CUSTOM, WithLoss, block_class, build_custom, known_models, with_windows_at_once
from benchmarks.litgpt.options import Options
from benchmarks.litgpt.predicted_loop import predicted_peak
from thunder_mem.attention.by_cudnn import mem_cudnn_attention_ex
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.costs.plan_time import trace_seconds
from thunder_mem.fusers.fusion_executors import fuser_of, fuses_generally, with_fuser
from thunder_mem.fusers.nvfuser import installed_nvfuser
from thunder_mem.fusers.nvfuser_model import modelled_nvfuser
from thunder_mem.memory.device_models import device_model
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.prediction.simulate import simulate

__all__ = ["load_thunders", "run"]


def load_thunders() -> ModuleType:
    """The module `thunder.benchmarks.benchmark_litgpt`, also without a GPU, which it looks for when imported."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "set_device", lambda device: None))
        return importlib.import_module("thunder.benchmarks.benchmark_litgpt")


def run(options: Options, **arguments: Any) -> Any:
    """Run Thunder's `benchmark_main(**arguments)` under `options`.

    Returns:
        The benchmark, an instance of Thunder's class; its figures are in `perf_metrics`.

    Raises:
        ValueError: options that have no meaning together.
    """
    options.check(arguments.get("compile", "eager"), arguments.get("distributed_mode", "none"))
    module = load_thunders()
    made: list[Any] = []
    build = functools.partial(_subclass(module), options)

    def make(**kwargs: Any) -> Any:
        made.append(build(**kwargs))
        return made[-1]

    with (
        known_models(options.scale),
        _place(module, options, arguments.get("compile", "eager")),
        mock.patch.object(module, "Benchmark_litGPT", make),
    ):
        module.benchmark_main(**arguments)
    return made[-1]


@contextlib.contextmanager
def _place(module: ModuleType, options: Options, compile: str) -> Iterator[None]:
    """The device that the benchmark's tensors are made on."""
    if options.device == "cuda":
        yield
        return
    on_twins = options.simulated is not None and "thunder" not in compile
    where = torch.device("cuda", 0) if options.simulated and not on_twins else torch.device("cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "device", where))
        if on_twins:  # autograd runs on fake CPU tensors only
            stack.enter_context(fake_cpu())
        elif options.simulated is not None:
            stack.enter_context(simulate(options.simulated, fusion=options.fusion or "mem_pointwise"))
        yield


def _subclass(module: ModuleType) -> Any:
    """Thunder's class with `options` as its first argument."""

    class Benchmark(module.Benchmark_litGPT):  # type: ignore[name-defined]
        def __init__(self, options: Options, **kwargs: Any) -> None:
            self.options = options
            self.step_ms: list[float] = []
            self.loop_peak: LoopPeak | None = None
            self.device_peaks = DevicePeaks()
            self.stepping: StepInBackward | None = None
            super().__init__(**kwargs)
            if self.stepping is not None:
                if self.gradient_accumulation_steps > 1:
                    raise ValueError(
                        "--optimizer_in_backward True takes one microbatch a step: give no --global_batch_size"
                    )
                self.stepping.use(self.optimizer)
                self.optimizer = self.stepping
            self.optimizer.register_step_post_hook(self._note_step)

        def init_model(self) -> Any:
            if self.model_name not in CUSTOM:
                return with_windows_at_once(super().init_model())
            with self.device:
                return build_custom(self.model_name, self.config).to(dtype=torch.bfloat16)

        def setup_activation_checkpointing(self) -> None:
            if self.model_name not in CUSTOM:
                super().setup_activation_checkpointing()
                return
            layer = block_class(self.model_name)
            module.apply_activation_checkpointing(
                self.model,
                checkpoint_wrapper_fn=module.checkpoint_wrapper,
                check_fn=lambda submodule: isinstance(submodule, layer),
            )

        def setup_compile(self, model: Any) -> Any:
            if self.options.loss_inside:
                model = WithLoss(model)
            self.plain_model = model
            if self.options.simulated is not None and self.compile in ("eager", "inductor"):
                return model
            if self.options.optimizer_in_backward:  # the benchmark makes its own optimizer of the compiled model
                self.stepping = StepInBackward(torch.optim.SGD(model.parameters(), lr=0.0))
            with _compiling(module, self.options, self.stepping):
                return super().setup_compile(model)

        def setup_dummy_dataloader(self) -> Any:
            # No data is read where nothing runs, and a loader's seed cannot be read from a fake tensor.
            if self.options.simulated is not None:
                return []
            loader = super().setup_dummy_dataloader()
            if self.options.device != "cpu":
                return loader
            # Its two processes would run beside the step, and each takes 5 s to end.
            return DataLoader(loader.dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn)

        def train(self) -> None:
            if self.options.simulated is not None:
                self._simulate()
            elif self.options.loss_inside:
                self._train_with_loss()
            else:
                super().train()
            if self.options.device == "cpu":
                self.step_ms, timed = [], self.step_ms
                self.loop_peak = measured_peak(self.model, self.optimizer, self._batch(), **self._how())
                self.step_ms = timed

        def _train_with_loss(self) -> None:
            """Thunder's loop and its metrics, for a model that returns its loss."""
            self._prepare_throughput()
            t0 = time.perf_counter()
            data_sync = self.model.no_sync if self.skip_data_sync else contextlib.nullcontext
            for i in range(self.max_iters):
                iter_t0 = time.perf_counter()
                if i == self.warmup_iters:
                    t0 = iter_t0
                for microbatch in range(self.gradient_accumulation_steps):
                    last = microbatch == self.gradient_accumulation_steps - 1
                    input_ids, targets = (t.to(self.device) for t in next(self.train_data_iter))
                    with contextlib.nullcontext() if last else data_sync():
                        with self.low_precision_handler.maybe_apply_te_autocast():
                            loss = self.model(input_ids, targets) / self.gradient_accumulation_steps
                        loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                loss_item = loss.item()  # synchronises
                t1 = time.perf_counter()
                if module.global_rank not in (0, None):
                    continue
                print(
                    f"iter {i}: loss {loss_item:.4f}, iter time: {(t1 - iter_t0) * 1000:.2f}ms, t: {input_ids.size(1)}"
                )
                if i >= self.warmup_iters and self.throughput:
                    samples = i * self.micro_batch_size * self.gradient_accumulation_steps
                    self.throughput.update(
                        time=t1 - t0,
                        flops=self.perf_metrics["model_flops"],
                        batches=i,
                        samples=samples,
                        lengths=samples * self.config.block_size,
                    )
            if module.global_rank in (0, None):
                iterations = self.max_iters - self.warmup_iters
                self.perf_metrics["average_iter_time"] = (t1 - t0) * 1000 / iterations
                self.perf_metrics["saved_for_backward_tensor_size_mib"] = None
                self.perf_metrics["saved_for_backward_number_of_tensors"] = None

        def _prepare_throughput(self) -> None:
            self.throughput = None
            if module.global_rank not in (0, None):
                return
            try:
                self.calculate_model_flops()
                window = self.max_iters - self.warmup_iters
                self.throughput = module.Throughput(window_size=window, world_size=module.world_size)
            except Exception as error:  # as Thunder's own loop does
                print(f"the model's throughput is unknown: {type(error).__name__}: {error}")

        def _simulate(self) -> None:
            self.throughput = None
            how = self._how()
            if self.compile == "inductor":
                from benchmarks.litgpt.inductor_loop import inductor_peak

                how["device"] = self.options.simulated
                self.loop_peak = inductor_peak(self.model, self.optimizer, self._batch(), **how)
            elif self.compile == "eager":
                how["device"] = self.options.simulated
                self.loop_peak = fake_peak(self.model, self.optimizer, self._batch(), **how)
            else:
                self.loop_peak = predicted_peak(self.model, self.optimizer, self._batch(), **how)
                self.perf_metrics["roofline_ms"] = self._roofline_ms()
            self.perf_metrics["average_iter_time"] = math.nan  # nothing ran
            self.perf_metrics["saved_for_backward_tensor_size_mib"] = None
            self.perf_metrics["saved_for_backward_number_of_tensors"] = None

        def _roofline_ms(self) -> float:
            """Forward and backward by the roofline, one kernel after the other."""
            device = device_model(str(self.options.simulated))
            traces = (thunder.last_traces(self.model)[-1], thunder.last_backward_traces(self.model)[-1])
            return round(sum(trace_seconds(t, device) for t in traces) * 1e3, 3)

        def _how(self) -> dict[str, Any]:
            return {"loss_inside": self.options.loss_inside, "microbatches": self.gradient_accumulation_steps}

        def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (self.micro_batch_size, self.config.block_size)
            return tuple(torch.randint(0, 100, shape, device=self.device) for _ in range(2))  # type: ignore[return-value]

        def _note_step(self, *_: Any) -> None:
            self.step_ms.append(time.perf_counter() * 1e3)
            if self.options.device == "cuda" and len(self.step_ms) == self.warmup_iters:
                self.device_peaks.end_warm_up()

        def add_perf_metrics(self) -> None:
            super().add_perf_metrics()
            if self.loop_peak is not None:
                self.perf_metrics["memory_used_GB"] = self.loop_peak.peak_bytes / 1e9

        def add_model_info_to_metrics(self) -> None:
            super().add_model_info_to_metrics()
            self.perf_metrics.update(self._details())

        def _details(self) -> dict[str, Any]:
            """What joins Thunder's metrics in the JSON."""
            steps = [after - before for before, after in zip(self.step_ms, self.step_ms[1:], strict=False)]
            steps = steps[max(0, self.warmup_iters - 1) :]
            found: dict[str, Any] = {
                "layers": self.config.n_layer,
                "device": machine_kind(self.options.device),
                "versions": versions(),
                "loss_inside": self.options.loss_inside,
                "checkpoint_activations": self.checkpoint_activations,
                "mem_efficient": [repr(t) for t in self.options.transforms(self.stepping)],
                "median_iter_time": statistics.median(steps) if steps else None,
                "min_iter_time": min(steps, default=None),
            }
            if self.options.device == "cuda":
                found |= self.device_peaks.found()
                config = self.config
                shape = (self.micro_batch_size, config.n_head, config.block_size, config.head_size)
                found["eager_attention"] = attention_backend(shape, torch.bfloat16, self.device)
            if self.loop_peak is not None:
                peak = self.loop_peak
                found |= {"peak_bytes": peak.peak_bytes, "held_bytes": peak.held_bytes}
                if peak.phase:
                    found["peak_at"] = f"{peak.phase}: {peak.operation}"
                    found["phase_peak_bytes"] = peak.phase_peak_bytes
                    found["alive_at_peak"] = peak.alive
                    found["library_bytes"] = peak.library_bytes
                    found["reserved_peak_bytes"] = peak.reserved_bytes
            if math.isnan(self.perf_metrics["average_iter_time"]):
                found["average_iter_time"] = None
            return found

    return Benchmark


@contextlib.contextmanager
def _compiling(module: ModuleType, options: Options, optimizer: StepInBackward | None) -> Iterator[None]:
    """Within, what the benchmark compiles by Thunder gets the transform and, where nothing fuses, executors that do."""
    extra = {} if options.fusion_type is None else {"fusion_type": options.fusion_type}

    def with_ours(compiler: Any) -> Any:
        def compile(*args: Any, executors: list[Any], transforms: list[Any], **kwargs: Any) -> Any:
            ours = [*transforms, *options.transforms(optimizer)]
            fusing = _fusing(executors, options)
            return compiler(*args, executors=fusing, transforms=ours, **{**kwargs, **extra})

        return compile

    with (
        mock.patch.object(thunder, "jit", with_ours(thunder.jit)),
        mock.patch.object(module, "ThunderCompiler", with_ours(module.ThunderCompiler)),
    ):
        yield


def _fusing(executors: list[Any], options: Options) -> list[Any]:
    """The list, for every peer alike: as asked, else with thunder_mem's executors where no general fuser is in it."""
    executors = [mem_cudnn_attention_ex, *executors] if options.cudnn_attention else executors
    if options.fusion is None and any(map(fuses_generally, executors)):
        return executors
    fuser = fuser_of(options.fusion or "mem_pointwise", modelled_nvfuser if options.simulated else installed_nvfuser)
    return [mem_attention_ex, *with_fuser(executors, fuser)]
