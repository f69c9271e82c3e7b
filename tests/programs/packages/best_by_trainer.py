"""Hugging Face's Trainer keeps the best of its checkpoints, which is not the last, and saves it."""

import os

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 40, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)).double()
rows = torch.randint(1, 40, (48, 8))
train_set = [{"input_ids": row, "labels": row} for row in rows[:32]]
test_set = [{"input_ids": row, "labels": row} for row in rows[32:]]
arguments = TrainingArguments(
    "out",
    max_steps=12,
    per_device_train_batch_size=6,
    optim="sgd",
    learning_rate=8.0,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    logging_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    save_steps=4,
    save_total_limit=1,
    load_best_model_at_end=True,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=train_set, eval_dataset=test_set)
trainer.train()
for row in trainer.state.log_history:
    print({name: round(value, 3) for name, value in row.items() if name in ("loss", "eval_loss", "step")})
trainer.save_model("final")
print(sorted(os.listdir("out")), sorted(os.listdir("final")))
best = load_file(os.path.join(trainer.state.best_model_checkpoint, "model.safetensors"))
final = load_file("final/model.safetensors")
print(trainer.state.best_model_checkpoint, all(torch.equal(final[name], best[name]) for name in best))
model.save_pretrained("parts", max_shard_size="10KB")
again = GPT2LMHeadModel.from_pretrained("parts")
print(
    len(os.listdir("parts")) > 3,
    all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)),
)
