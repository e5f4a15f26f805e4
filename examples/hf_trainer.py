"""A small Llama in the `Trainer` of Hugging Face, as an island of a run: it learns Python's source.

    python examples/hf_trainer.py LEARNER_ID HOST:PORT [STEPS_AT_MOST]

The model that Trainer saves at the end is the merged one. `pip install 'transformers[torch]'`.
"""

import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from syncer.torch.trainers.huggingface import SyncerCallback

CONTEXT = 64


class Bytes(torch.utils.data.Dataset):
    """Pieces of text; a token is a byte."""

    def __init__(self, files: list[Path]):
        text = b"".join(file.read_bytes() for file in files)
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        row = self.rows[place].long()
        return {"input_ids": row, "labels": row}


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    learner_id, address = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)  # a machine of its own may use all
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder, max_steps=int(sys.argv[3]) if len(sys.argv) == 4 else 100_000,
                per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=2e-3,
                lr_scheduler_type="constant_with_warmup", warmup_steps=20, logging_steps=10,
                seed=1000 + learner_id, use_cpu=True, disable_tqdm=True, report_to="none",
                save_strategy="no"),
            train_dataset=Bytes(files[10:]), eval_dataset=Bytes(files[:1]),
            callbacks=[SyncerCallback(address, learner_id=learner_id, run="llama", fragments=4)])
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        merged = trainer.evaluate()["eval_loss"]
        trainer.save_model()
        saved = LlamaForCausalLM.from_pretrained(folder)
    same = all(torch.equal(own, saved.get_parameter(name))
               for name, own in model.named_parameters())
    print(f"loss {before:.3f} before, {merged:.6f} merged after {trainer.state.global_step} steps; "
          f"saved as it is: {same}", flush=True)


if __name__ == "__main__":
    main()
