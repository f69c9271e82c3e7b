"""transformers: a Trainer with dropout, warm-up, accumulation, evaluation and metrics, then resumed in mid-epoch."""

import numpy
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
config = BertConfig(**sizes, max_position_embeddings=12, num_labels=3)
rows = numpy.random.default_rng(0).integers(1, 50, (80, 12))


def sample(row):
    size = 4 + int(row[0]) % 9
    mask = [1] * size + [0] * (12 - size)
    return {"input_ids": (row * mask).tolist(), "attention_mask": mask, "labels": int(row[1]) % 3}


samples = [sample(row) for row in rows]


def metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer(epochs):
    arguments = TrainingArguments(
        "out",
        num_train_epochs=epochs,
        per_device_train_batch_size=7,
        per_device_eval_batch_size=9,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        weight_decay=0.01,
        label_smoothing_factor=0.1,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = BertForSequenceClassification(config).double()
    return Trainer(model, arguments, train_dataset=samples[:56], eval_dataset=samples[56:], compute_metrics=metrics)


first = trainer(2)
print({k: v for k, v in first.train().metrics.items() if k in ("train_loss", "epoch")})
second = trainer(3)
second.train(resume_from_checkpoint="out/checkpoint-4")
for row in second.state.log_history:
    print({k: v for k, v in row.items() if k in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")})
predictions = second.predict(samples[56:])
print(predictions.predictions.shape, predictions.predictions.sum().item(), predictions.metrics["test_accuracy"])
second.save_model("final")
torch.save(second.model.state_dict(), "weights.pt")
