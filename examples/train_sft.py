"""Fine-tune a small language model with TRL's SFTTrainer: one call before, and its batches come from our loader.

    pip install trl
    python examples/train_sft.py

The training is stopped at a checkpoint in the middle of an epoch and resumed by new objects: its losses are those of
the training that nobody stopped. Model and texts are made here, so nothing is downloaded.
"""

import tempfile
from pathlib import Path
from typing import Any

import datasets
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from asyncloader.accelerate import use_asyncloader

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
STEPS, STOP_AT = 12, 5

datasets.disable_progress_bars()
transformers.utils.logging.disable_progress_bar()
use_asyncloader(scheduling="dynamic")  # otherwise the Trainer's batches come from torch's loader


def tokenizer() -> PreTrainedTokenizerFast:
    numbers = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(WordLevel(numbers, "<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts() -> datasets.Dataset:
    """Return 96 texts that count, from here and there, by one or by two."""
    counts = [WORDS[start : start + 4 + start % 5 : 1 + step] for start in range(8) for step in range(2)] * 6
    return datasets.Dataset.from_dict({"text": [" ".join(words) for words in counts]})


def make_trainer(folder: Path, max_steps: int) -> Any:
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=3 + len(WORDS), max_position_embeddings=32, **sizes))
    args = SFTConfig(
        str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=8,
        learning_rate=0.03,
        lr_scheduler_type="constant",
        dataloader_num_workers=2,
        logging_steps=1,
        save_steps=STOP_AT,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    return SFTTrainer(model, args, train_dataset=texts(), processing_class=tokenizer())


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = make_trainer(Path(folder, "whole"), STEPS)
        whole.train()
        loader = whole.get_train_dataloader().base_dataloader
        make_trainer(Path(folder, "stopped"), STOP_AT).train()
        resumed = make_trainer(Path(folder, "stopped"), STEPS)
        resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole), (losses(resumed), losses(whole))
    first, *_, last = losses(whole)
    print(f"loaded by {type(loader).__module__}.{type(loader).__name__}, scheduling={loader.scheduling!r}")
    print(f"loss {first:.2f} to {last:.2f} in {STEPS} steps; stopped after {STOP_AT} and resumed: the same losses")


if __name__ == "__main__":
    main()
