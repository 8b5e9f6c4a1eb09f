"""Reward models: a sequence-classification model of Hugging Face as a reward function."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from os import PathLike
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fused.call.options import check_integer
from grpo_fused.heads.patches import Patches
from grpo_fused.rewards.text import Message, Text, check_column, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel:
    """A sequence-classification model with one label; the reward is its logit for prompt and completion together.

    Plain texts are joined unchanged and get the special tokens that the model's own tokenizer adds. If the prompt or
    the completion is a list of chat messages, both go through the tokenizer's chat template.

    Args:
        model: An `AutoModelForSequenceClassification`, as object (put in eval mode, otherwise unchanged) or as path or
            name, from which it is loaded in its own dtype.
        tokenizer: The model's own tokenizer, not the policy's; with a path the default is the tokenizer there.
        batch_size: Texts scored at once, shortest first.
        max_length: Tokens; the beginning of a longer text is left out, since the completion is at its end. Default all.
        name: The name of this reward in metrics and errors; default the last part of the model's path.

    Raises:
        ValueError: Not one label, weights of the head missing at the path, no tokenizer, or sizes below 1.
        TypeError: Sizes that are not integers, or the path of a tokenizer.

    Source: the reward models of TRL's `GRPOTrainer` (which adds no special tokens).
    """

    def __init__(
        self,
        model: PreTrainedModel | str | PathLike[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(tokenizer, str):
            raise TypeError(f"tokenizer must be the object, not its path; got {tokenizer!r}")
        check_integer(batch_size, "batch_size", least=1)
        if max_length is not None:
            check_integer(max_length, "max_length", least=1)
        if isinstance(model, (str, PathLike)):
            path = str(model)
            model, tokenizer = _load(path, tokenizer)
        elif tokenizer is None:
            raise ValueError("a reward model given as object needs its tokenizer; got None")
        else:
            path = str(getattr(model.config, "_name_or_path", ""))
        if model.config.num_labels != 1:
            raise ValueError(f"a reward model must have 1 label, the reward; got {model.config.num_labels} labels")
        self.model = model.eval()
        self.tokenizer = copy.deepcopy(tokenizer)  # the side of truncation is set on it
        self.tokenizer.truncation_side = "left"
        self.batch_size = batch_size
        self.max_length = max_length
        self.__name__ = name or PurePath(path).name or type(model).__name__

    def to(self, device: torch.device | str) -> RewardModel:
        """Moves the model; returns itself."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text], **columns: object) -> list[float]:
        """The model's logit for each of N prompts with its completion, fp32."""
        check_column("prompts", prompts, completions)
        rows = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        order = sorted(range(len(rows)), key=lambda position: len(rows[position]))
        rewards = torch.zeros(len(rows), dtype=torch.float32)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            rewards[batch] = self._score([rows[p] for p in batch]).cpu()
        return rewards.tolist()

    def _encode(self, prompt: Text, completion: Text) -> list[int]:
        """The token ids of a prompt with its completion, at least one and at most `max_length`."""
        is_plain = isinstance(prompt, str) and isinstance(completion, str)
        text = prompt + completion if is_plain else self._render(prompt, completion)  # type: ignore[operator]
        truncation = {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}
        encoded: Any = self.tokenizer(text, add_special_tokens=is_plain, **truncation)  # a template writes its own
        ids: list[int] = encoded["input_ids"]
        if not ids:
            raise ValueError(f"a prompt with its completion must have at least one token; got none from {text!r}")
        return ids

    def _render(self, prompt: Text, completion: Text) -> str:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"reward model {self.__name__!r} got chat messages, and its tokenizer has no chat template; "
                "give it texts, or set tokenizer.chat_template"
            )
        before = _as_messages(prompt, "user")
        after = _as_messages(completion, "assistant")
        if before and after and before[-1].get("role") == "assistant":
            # The completion continues a message that the prompt had begun.
            begun = text_of([before.pop()])
            after[0] = {**after[0], "content": begun + text_of([after[0]])}
        return str(self.tokenizer.apply_chat_template(before + after, tokenize=False))  # type: ignore[arg-type]

    def _score(self, rows: Sequence[list[int]]) -> Tensor:
        """[B] fp32 logits of B lists of token ids, padded on the right."""
        width, config, device = max(map(len, rows)), self.model.config.get_text_config(), self.model.device
        pad = config.pad_token_id
        if pad is None:
            # A decoder's head reads the last token that is not the pad. With EOS, which is usual, a text that ends with
            # EOS would be read one token too early, and the result would depend on the batch.
            pad = min(set(range(len(rows) + 1)) - {row[-1] for row in rows})
        input_ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])  # [B, W]
        lengths = torch.tensor([len(row) for row in rows])
        attention_mask = (torch.arange(width) < lengths[:, None]).long()  # by length: texts may contain the pad
        with Patches((config, "pad_token_id", pad)):
            output = self.model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device))
        logits: Tensor = output.logits
        if logits.shape != (len(rows), 1):
            raise ValueError(
                f"a reward model must return logits of shape {(len(rows), 1)}, one for each text; "
                f"got {tuple(logits.shape)}: is it a sequence-classification model?"
            )
        return logits[:, 0].float()


def _as_messages(text: Text, role: str) -> list[Message]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def _load(path: str, tokenizer: PreTrainedTokenizerBase | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, report = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto", output_loading_info=True)
    if report["missing_keys"]:
        raise ValueError(
            f"{path} is no reward model: it has no weights for {', '.join(sorted(report['missing_keys']))}, "
            "which would be random"
        )
    return model, AutoTokenizer.from_pretrained(path) if tokenizer is None else tokenizer
