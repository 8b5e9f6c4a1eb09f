"""The policy update: one recorded rollout and its advantages in, `num_iterations` optimizer steps out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor

from grpo_fused import importance_sampling_correction
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.rollouts.errors import NonFiniteError
from grpo_fused.trainer.config import GRPOTrainerConfig, check_for_vllm
from grpo_fused.trainer.losses import Part, of_loss_type, of_objective
from grpo_fused.trainer.metrics import Metrics
from grpo_fused.trainer.objective import OLD
from grpo_fused.trainer.policy import Piece, Policy, Reference, add_rows
from grpo_fused.trainer.rollout import Rollout

AVERAGED = (
    "kl", "entropy", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio",
    "vespo/phi_seq_mean", "sampler_kl",
)  # fmt: skip
"""Loss metrics that are means over tokens or, where a sequence has one value, over sequences: micro-batches combine by
their numbers of these."""


class Updater:
    """Takes the optimizer steps on a rollout.

    Args:
        policy: The policy that sampled the rollout, dropout off; trained in place.
        reference: The frozen reference, or None if `config.loss.beta` is 0.
        optimizer: Over the parameters of the policy, as accelerate prepared it.
        config: The options of the run.
    """

    def __init__(
        self, policy: Policy, reference: Reference | None, optimizer: AcceleratedOptimizer, config: GRPOTrainerConfig
    ) -> None:
        if config.loss.top_entropy_quantile < 1 and policy.accelerator.num_processes > 1:
            raise ValueError(
                "top_entropy_quantile < 1 ranks all tokens of a rollout, which must be in one process; got "
                f"{policy.accelerator.num_processes}"
            )
        self.policy, self.reference, self.optimizer, self.config = policy, reference, optimizer, config
        self.loss_of = of_loss_type if config.objective is None else of_objective
        self.accelerator = policy.accelerator
        self.optimizer_steps = 0
        self.weight_changes = 0
        """which, unlike `optimizer_steps`, no failure takes back"""

    def __call__(self, rollout: Rollout, advantages: Tensor) -> list[Metrics]:
        """Takes `config.num_iterations` optimizer steps on this process's sequences of a rollout.

        Sequences whose gradient is known to be zero (equal rewards in their group, and no KL or entropy term)
        are left out: they count in the normaliser, and cost nothing. An objective gets all sequences.

        Args:
            rollout: B sequences.
            advantages: [B] float, best on the CPU: where they are 0 is read first.

        Returns:
            One dictionary for each optimizer step, the same on all processes: loss, grad_norm, learning_rate and the
            metrics of the loss, which are those of the sequences that were trained on. Empty if there were none.

        Raises:
            NonFiniteError: A loss or a gradient is NaN or infinite.
        """
        loss, objective = self.config.loss, self.config.objective
        always = loss.beta != 0 or loss.entropy_coef != 0 or loss.top_entropy_quantile < 1 or objective is not None
        rows = torch.arange(len(advantages)) if always else advantages.nonzero().flatten().cpu()
        window = Window(rollout, rows, self.accelerator)
        if window.trained_sequences == 0:
            self.optimizer_steps += self.config.num_iterations  # the schedule continues
            return []
        pieces, advantages = self.policy.micro_batches(rollout, rows), advantages.to(self.accelerator.device)
        tables, corrections = dict[str, Tensor](), Metrics()
        if self.reference is not None and loss.kl_estimator != "exact":
            tables["ref_per_token_logps"] = self.reference.score(rollout, pieces)
        if objective is not None:
            if OLD in objective.objective.needs:
                tables[OLD] = self.policy.score(rollout, pieces)
        elif rollout.sampling_logps is not None and self.config.importance_sampling is not None:
            check_for_vllm(self.config)
            old = tables[OLD] = self.policy.score(rollout, pieces)
            ratio, corrections = self.correct_sampling(rollout, rows, old, rollout.sampling_logps)
            tables["importance_sampling_ratio"] = ratio
        history = []
        for _ in range(self.config.num_iterations):
            metrics, logps = self.accumulate_gradients(rollout, pieces, advantages, window, tables)
            # on-policy the old log-probs were those of this pass: none means that, and the next iteration gets them
            tables.setdefault(OLD, logps)
            metrics |= self.step_optimizer(metrics["loss"])
            history.append(metrics | corrections)
        return history

    def correct_sampling(
        self, rollout: Rollout, rows: Tensor, old_logps: Tensor, sampling_logps: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Importance ratios [B, T] or [B, 1] of `rows`, 1 elsewhere, and their metrics over all processes."""
        mode = self.config.importance_sampling
        assert mode is not None
        index = rows.to(old_logps.device)
        mask = rollout.completion_mask[index]
        correction = importance_sampling_correction(
            old_logps[index], sampling_logps[index], mask, mode=mode, clip_max=self.config.importance_sampling_clip
        )
        ratio = old_logps.new_ones(len(old_logps), correction.ratio.shape[1])
        ratio[index] = correction.ratio
        tokens, values = mask.sum().float(), correction.metrics
        mine = torch.stack([tokens, torch.full_like(tokens, len(rows)), *(value.float() for value in values.values())])
        table = self.accelerator.gather(mine[None]).double().cpu()  # [processes, 2 + metrics]
        table = table[table[:, 1] > 0]  # processes with sequences to train on
        metrics = {}
        for column, name in enumerate(values, start=2):
            weights = table[:, int("ratio" in name and mode.startswith("sequence"))]
            means = {"mean": (table[:, column] * weights).sum() / weights.sum()}
            extremes = {"min": table[:, column].min(), "max": table[:, column].max()}
            metrics[name] = float((means | extremes)[name.rpartition("/")[2]])
        return ratio, metrics

    def accumulate_gradients(
        self, rollout: Rollout, pieces: list[Piece], advantages: Tensor, window: Window, tables: Mapping[str, Tensor]
    ) -> tuple[Metrics, Tensor]:
        """Backward through all micro-batches, weighted so that neither they nor the processes change the gradient.

        `tables` are inputs of the loss, [B, T] or [B, 1], by name.

        Returns:
            The metrics of all processes together, and the log-probs [B, T] of this process's rows.
        """
        config, device = self.config, self.accelerator.device
        logps = torch.zeros(rollout.completion_ids.shape, dtype=torch.float32, device=device)
        sums = torch.zeros(1 + len(AVERAGED), dtype=torch.float64, device=device)
        found: list[str] = []
        counts = torch.stack([micro.completion_mask.sum() for _, micro in pieces]).tolist()  # a GPU waits for it
        self.optimizer.zero_grad(set_to_none=True)  # those of a pass that was interrupted
        for module in self.policy.model.modules():  # checkpointing needs training mode; in it a router may draw noise
            module.training = config.gradient_checkpointing and bool(getattr(module, "gradient_checkpointing", False))
        for position, ((index, micro), tokens) in enumerate(zip(pieces, counts, strict=True)):
            width = micro.completion_ids.shape[1]
            share, loss_config = window.share_of(len(index), tokens, config.loss)
            rows_of_tables = {name: table[index, :width] for name, table in tables.items()}
            items = window.tokens if config.loss.kind.average == "items" else None
            part = Part(micro, advantages[index], rows_of_tables, loss_config, items)
            with self._synchronised(last=position == len(pieces) - 1), self.accelerator.autocast():
                out = self.loss_of(self.policy, self.reference, part)
                # processes average their gradients: multiplied by their number, this is the sum
                self.accelerator.backward(out.loss * (share * self.accelerator.num_processes))
            add_rows(logps, index, out.per_token_logps)
            found = [name for name in AVERAGED if name in out.metrics]
            if tokens:  # a mean over no token is NaN
                shares = tokens / window.trained_tokens, len(index) / window.trained_sequences
                by_sequence = config.loss.kind.metrics if config.loss.has_one_value_a_sequence else ()
                means = [out.metrics[name].double() * shares[name in by_sequence] for name in found]
                sums[: 1 + len(found)] += torch.stack([out.loss.detach().double() * share, *means])
        self.policy.model.eval()
        total = self.accelerator.reduce(sums, "sum").tolist()
        return dict(zip(("loss", *found), total, strict=False)), logps

    def step_optimizer(self, loss: float) -> Metrics:
        """Clips, checks and takes one optimizer step; its learning rate and gradient norm."""
        norm = self.accelerator.clip_grad_norm_(self.policy.model.parameters(), self.config.max_grad_norm)
        grad_norm = float(norm)
        scaled = self.config.mixed_precision == "fp16"  # the scaler handles gradients that overflow
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or scaled):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(
                f"the loss must be finite, and so its gradient; got loss {loss} and grad_norm {grad_norm}"
            )
        rate = learning_rate(self.optimizer_steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.weight_changes += 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return {"grad_norm": grad_norm, "learning_rate": rate}

    def _synchronised(self, *, last: bool) -> AbstractContextManager[None]:
        """DDP sums gradients only in the last backward of a window, FSDP in each: it keeps no whole gradient."""
        replicated = self.accelerator.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        if last or not replicated:
            return nullcontext()
        return self.accelerator.no_sync(self.policy.model)


class Window:
    """The divisors of a loss over all micro-batches and processes; `rows` are the sequences that will be trained on."""

    def __init__(self, rollout: Rollout, rows: Tensor, accelerator: Accelerator) -> None:
        lengths = rollout.completion_mask.sum(1)
        trained = lengths[rows.to(lengths.device)]
        counts = torch.tensor(
            [lengths.sum(), len(lengths), trained.sum(), len(rows)], dtype=torch.float64, device=accelerator.device
        )
        tokens, sequences, trained_tokens, self.trained_sequences = accelerator.reduce(counts, "sum").tolist()
        self.tokens, self.sequences = max(tokens, 1.0), max(sequences, 1.0)
        self.trained_tokens = max(trained_tokens, 1.0)

    def share_of(self, sequences: int, tokens: int, loss: GRPOLossConfig) -> tuple[float, GRPOLossConfig]:
        """The weight of a micro-batch's loss, and the loss's options with the entropy bonus weighted the same way.

        Token-normalised losses divide by the window's tokens themselves; the others are means over the micro-batch, of
        its tokens or of its sequences. The bonus is always a mean over its tokens.
        """
        token_share, sequence_share = tokens / self.tokens, sequences / self.sequences
        shares = {"items": 1.0, "tokens": token_share} | dict.fromkeys(("sequences", "length", "sum"), sequence_share)
        share = shares[loss.kind.average]
        if loss.entropy_coef == 0 or share == 0:
            return share, loss
        return share, replace(loss, entropy_coef=loss.entropy_coef * token_share / share)


def learning_rate(optimizer_step: int, config: GRPOTrainerConfig) -> float:
    """The learning rate of an optimizer step, counted from 0: a linear warm-up, then `config.lr_scheduler_type`."""
    total = config.steps * config.num_iterations
    if optimizer_step < config.warmup_steps:
        factor = (optimizer_step + 1) / config.warmup_steps
    elif config.lr_scheduler_type == "constant":
        factor = 1.0
    else:
        left = max(total - optimizer_step, 0) / max(total - config.warmup_steps, 1)
        factor = left if config.lr_scheduler_type == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return config.learning_rate * factor
