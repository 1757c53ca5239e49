"""Runs plans on the device; issues all work on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from pagemill.engine.config import EngineConfig, SchedulerConfig
from pagemill.engine.devices.adapter_memory import expects_adapters
from pagemill.engine.devices.backend import DeviceBackend, HostCopy
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution.cuda_graphs import NO_GRAPHS, DecodeGraphs
from pagemill.engine.execution.forward_pass import Forwarded, ForwardPass, ModelForward, transformers_logits
from pagemill.engine.execution.input_batch import InputBatch, StepInputs
from pagemill.engine.execution.kv_cache import KVCache
from pagemill.engine.execution.media_encoder import MediaEncoder
from pagemill.engine.execution.prepared_model import PreparedModel
from pagemill.engine.execution.prompt_scorer import PromptScorer
from pagemill.engine.execution.sampling.logprobs import PromptLogprobs, ReadLogprobs
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.execution.sampling.sampler import Sampler, SamplerOutput, StagedSamples
from pagemill.engine.execution.staging import DirectTransfer, StagedTransfer
from pagemill.engine.execution.state_pool import StatePool
from pagemill.engine.layers.attention import AttentionContext, attention_context, check_windows
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.linear import adapter_rows
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.models.loader import LoadedModel
from pagemill.engine.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LaunchedStep:
    """A launched step. Its results reach the host in one copy, started by `sample` and awaited by `wait`."""

    plan: StepPlan
    device: DeviceBackend
    is_replayed: bool
    prepare_s: float
    forward_s: float
    prompt_logprobs: list[PromptLogprobs]
    reads: ReadLogprobs | None
    sharing_rows: int
    choose: Callable[[], SamplerOutput | None] | None
    """Samples; None: there is nothing to sample."""
    output: SamplerOutput | None = None
    sample_s: float = 0.0
    _copy: HostCopy | None = None

    @torch.inference_mode()
    def sample(self) -> None:
        """Sample, and start copying all results to the host, before the device's next work."""
        started = time.perf_counter()
        if self.choose is not None:
            self.output, self.choose = self.choose(), None  # which holds the logits
        parts = [self.output, *self.prompt_logprobs, self.reads]
        tensors = [tensor for part in parts if part is not None for tensor in part.tensors()]
        self._copy = self.device.to_host(tensors) if tensors else None
        self.sample_s = time.perf_counter() - started

    def wait(self) -> StepResult:
        result = StepResult(
            self.plan.step_id,
            token_ids=[],
            is_replayed=self.is_replayed,
            sharing_rows=self.sharing_rows,
            prepare_s=self.prepare_s,
            forward_s=self.forward_s,
            sample_s=self.sample_s,
        )
        started = time.perf_counter()
        copies = iter(self._copy.wait() if self._copy is not None else ())
        if self.output is not None:
            self.output.fill(result, copies)
        result.prompt_logprobs = {one.work_index: one.entries(copies) for one in self.prompt_logprobs}
        if self.reads is not None:
            result.reads = self.reads.entries(copies)
        result.sample_s += time.perf_counter() - started
        return result


def captures_graphs(
    model: PreparedModel, config: EngineConfig, shape: KVCacheShape, group: RankGroup | None
) -> bool:
    """Return True if decode steps are to be captured.

    Not with several ranks, whose communication does not consist of kernels, and not with recurrent layers, which group
    a step's rows.
    """
    may_capture = model.loaded.device.captures_graphs and group is None and not shape.state
    return may_capture and not config.enforce_eager


class ModelRunner:
    """An `Executor` on a device. Owned by one thread."""

    def __init__(
        self,
        model: PreparedModel,
        config: EngineConfig,
        limits: SchedulerConfig,
        shape: KVCacheShape,
        group: RankGroup | None = None,
        encoder: MediaEncoder | None = None,
    ) -> None:
        """`group`: the ranks that share `model`; each runs the same plans, and the first one samples.
        `encoder`: encodes media in prompts; None: no prompt has any."""
        self._group = group
        self._model = model
        self._device = device = model.loaded.device
        module, direct = model.loaded.module, model.direct
        self.kv_cache = KVCache(
            shape, limits.num_kv_blocks, device, limits.num_host_blocks, config.attention_backend
        )
        num_slots = limits.max_num_seqs + limits.num_cached_states
        self._states = StatePool(shape.state, num_slots, device) if shape.state else None
        self._stages = device.is_apart if config.stage_inputs is None else config.stage_inputs
        self._vocab_size = model.loaded.vocab_size
        self._transfer = StagedTransfer(device) if self._stages else DirectTransfer(device.device)
        # A step's second transfer: with the first one's buffers it would wait for the step before.
        self._later = StagedTransfer(device) if self._stages else self._transfer
        self._batch = InputBatch(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            device=device.device,
            pad_to_bucket=bool(config.pad_to_bucket),
            split_decodes=not config.batch_invariant,
            transfer=self._transfer,
            num_groups=len(shape.windows),
            states=self._states,
            encoder=encoder,
        )
        self._sampler = Sampler(limits.eos_token_ids, draws_on_device=device.draws_on_device)
        caches = self.kv_cache.layers
        check_windows(module, caches)
        self._forward_passes: list[ForwardPass] = [
            PromptScorer(module, caches, self._batch, direct),
            PromptScorer(module, caches, self._batch),
            ModelForward(module, caches, direct),
        ]
        self.lost_graphs: str | None = None
        """Which CUDA graphs are missing because they could not be captured."""
        if captures_graphs(model, config, shape, group):
            is_adapted = model.adapters is not None and expects_adapters(config)
            slots = config.adapter_slots if is_adapted else 0
            self.lost_graphs = self._replay_graphs(model.loaded, limits, slots)
            if self.lost_graphs is not None and config.strict_kernels:
                message = f"{self.lost_graphs}: the forward pass can't be captured, see the log"
                raise ConfigError(message, setting="strict_kernels")

    @torch.inference_mode()
    def _replay_graphs(self, model: LoadedModel, limits: SchedulerConfig, adapter_slots: int) -> str | None:
        """Try replayed graphs first; return which are missing. A model that cannot be captured runs without them."""
        try:
            graphs = self._new_graphs(model.module, limits, adapter_slots)
            missing = graphs.capture()
        except Exception as error:
            if not model.family.is_generic:
                raise
            logger.warning("%s runs without CUDA graphs: %s", model.served_name, error)
            return NO_GRAPHS
        self._forward_passes.insert(0, graphs)
        return missing

    def _new_graphs(
        self, module: torch.nn.Module, limits: SchedulerConfig, adapter_slots: int
    ) -> DecodeGraphs:
        caches = self.kv_cache.layers

        def logits_of_all(
            inputs: StepInputs,
        ) -> torch.Tensor:  # not a method: graphs would keep this runner alive
            with adapter_rows(inputs.adapters), attention_context(AttentionContext(inputs.metadata, caches)):
                return transformers_logits(module, inputs)

        return DecodeGraphs(
            logits_of_all,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            device=self._device.device,
            num_groups=len(limits.kv_windows),
            adapter_slots=adapter_slots,
        )

    @property
    def table_bytes(self) -> int:
        """Memory of the tables with the tokens and the blocks of each row."""
        return self._batch.token_table.nbytes + self._batch.block_table.nbytes

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        started = time.perf_counter()
        forward = next(each for each in self._forward_passes if each.covers(plan))
        staged = self._batch.stage(plan, pad=forward.replays)
        work = [SampleWork(sample, self._batch.row(sample.row)) for sample in plan.samples]
        # A device that shares the host's memory needs no transfer: `sample` stages its inputs, if it is called.
        stages = self._stages and not plan.samples_later
        staged_work = self._sampler.stage(work, self._vocab_size, self._transfer) if stages else None
        self._transfer.send()
        inputs = self._batch.lay_out(staged)
        self.kv_cache.move_blocks(plan)
        if self._states is not None:
            self._states.copy(plan.state_copies)
        prepared = time.perf_counter()
        with adapter_rows(inputs.adapters):
            computed = forward.run(plan, inputs, work)
        step = LaunchedStep(
            plan,
            self._device,
            forward.replays,
            prepared - started,
            time.perf_counter() - prepared,
            computed.scored,
            computed.reads,
            inputs.metadata.count_sharing_rows(),
            partial(self._choose_tokens, inputs, computed, work, staged_work) if work else None,
        )
        if not plan.samples_later:
            step.sample()
        return step

    def is_device_alive(self) -> bool:
        return self._device.is_alive()

    def close(self) -> None:
        """Free weights, caches and graphs, even if this object is still referenced. Do not launch steps afterwards."""
        if not self._forward_passes:
            return
        self._forward_passes.clear()
        del self._model, self.kv_cache, self._states, self._batch, self._sampler, self._transfer, self._later

    def _choose_tokens(
        self, inputs: StepInputs, computed: Forwarded, work: list[SampleWork], staged: StagedSamples | None
    ) -> SamplerOutput | None:
        """Sample, write the tokens into the token table, and broadcast them to ranks that do not sample."""
        output = None
        if self._group is None or self._group.is_first:
            if staged is None and self._stages:
                staged = self._sampler.stage(work, self._vocab_size, self._later)
                self._later.send()
            if computed.vocabulary is None:
                output = self._sampler.sample(computed.logits, work, self._batch.token_table, staged)
            else:
                output = self._sampler.sample_narrow(computed.logits, work, computed.vocabulary)
            token_ids = output.token_ids
        else:
            # Zeros, for a group whose ranks run alone: the next step looks these tokens up.
            token_ids = torch.zeros(len(work), dtype=torch.int64, device=self._device.device)
        if self._group is not None:
            self._group.broadcast(token_ids)
        self._batch.token_table[inputs.sample_rows, inputs.sample_positions] = token_ids
        return output
