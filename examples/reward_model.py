"""A reward model: a sequence classifier with one output judges each response, in the reward's own worker processes.

    reward:
      function: examples/reward_model.py:RewardModel
      options: {model: work/reward_model, threads: 1}   # a folder, or a name on the hub
      batched: true     # up to 32 responses in a call, while others are still being written
      workers: 1        # each of them loads the model
      memory_gib: 8     # of a worker: the model, and PyTorch itself with about 1
      timeout_s: 120    # for a call

The model is any that transformers' AutoModelForSequenceClassification loads. It reads prompt and response as one text,
as the policy had them: right where both models have the same chat template. `suffix` is what that puts after an answer.

    python examples/reward_model.py work/reward_model

makes a tiny one to try things with, of random weights: its taste is arbitrary, but it has one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tandem.model.tokenizer import character_tokenizer

TINY_CHARACTERS = "0123456789+="


class RewardModel:
    """Made once in each worker, before training begins; then called with lists of prompts and responses."""

    def __init__(
        self, model: str, *, threads: int = 1, batch_size: int = 16, suffix: str = "", device: str = "cpu"
    ) -> None:
        """
        Args:
            model: Folder or hub name.
            threads: CPU threads of one worker: engine and trainer want some, too.
            batch_size: Responses in one forward pass.
            suffix: Put after each response.
            device: Where the model computes, such as cuda:0; that device's memory is shared with the policy.

        Raises:
            ValueError: There is no such model, or it is no reward model.
        """
        torch.set_num_threads(threads)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model)
            self.model, report = AutoModelForSequenceClassification.from_pretrained(model, output_loading_info=True)
        except OSError as error:
            raise ValueError(
                f"there is no reward model {model!r}: give the folder of one, or its name on the hub ({error})"
            ) from error
        if report["missing_keys"] or self.model.config.num_labels != 1:
            raise ValueError(
                f"{model!r} is no reward model: it has {self.model.config.num_labels} outputs, wanted is 1; weights "
                f"that it lacks: {', '.join(sorted(report['missing_keys'])) or 'none'}"
            )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.to(device).eval()
        self.batch_size = batch_size
        self.suffix = suffix

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        """The model's score of each response."""
        texts = [prompt + response + self.suffix for prompt, response in zip(prompts, responses, strict=True)]
        scores = [0.0] * len(texts)
        by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # less padding
        for start in range(0, len(texts), self.batch_size):
            rows = by_length[start : start + self.batch_size]
            for row, score in zip(rows, self._scores([texts[row] for row in rows]), strict=True):
                scores[row] = score
        return scores

    @torch.inference_mode()
    def _scores(self, texts: list[str]) -> list[float]:
        has_bos = self.tokenizer.bos_token is not None and texts[0].startswith(self.tokenizer.bos_token)
        tokens = self.tokenizer(texts, add_special_tokens=not has_bos, padding=True, return_tensors="pt")
        ids, is_text = tokens["input_ids"], tokens["attention_mask"].bool()
        # The model takes the last token that is no padding for the end of a text. Many tokenizers pad with the token
        # that texts end with, so the padding here is one that none of them has.
        used = set(ids[is_text].tolist())
        padding = next(token for token in range(len(self.tokenizer)) if token not in used)
        self.model.config.get_text_config().pad_token_id = padding
        logits = self.model(
            input_ids=ids.masked_fill(~is_text, padding).to(self.model.device),
            attention_mask=tokens["attention_mask"].to(self.model.device),
        ).logits
        return logits[:, 0].float().tolist()


def make_tiny(folder: Path, *, characters: str = TINY_CHARACTERS, seed: int = 0) -> Path:
    """A reward model of 20,000 random weights that reads one token per character. Returns `folder`."""
    tokenizer = character_tokenizer(characters)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)  # larger than a new model's: else all texts would be the same to it
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make a tiny reward model")
    parser.add_argument("folder", type=Path)
    print(f"made {make_tiny(parser.parse_args().folder)}")
