"""sentence-transformers: its trainer with pairs and in-batch negatives, an evaluator, and the saved model read back."""

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

set_seed(0)
words = ["cat", "dog", "bird", "runs", "sleeps", "sings", "the", "quick", "lazy", "small", "old", "house", "garden"]
vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained("base")
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=16, **sizes)).double().save_pretrained("base")
transformer = Transformer("base", max_seq_length=12)
model = SentenceTransformer(modules=[transformer, Pooling(16)]).double()


def sentence(seed, size):
    return " ".join(words[(seed * 7 + 3 * place) % len(words)] for place in range(size))


pairs = {"anchor": [sentence(i, 4) for i in range(45)], "positive": [sentence(i, 6) for i in range(45)]}
evaluator = EmbeddingSimilarityEvaluator(
    [sentence(i, 5) for i in range(10)],
    [sentence(2 * i, 5) for i in range(10)],
    [i / 10 for i in range(10)],
    name="dev",
)
arguments = SentenceTransformerTrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    learning_rate=0.005,
    warmup_steps=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=3,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
loss = MultipleNegativesRankingLoss(model)
trainer = SentenceTransformerTrainer(model, arguments, Dataset.from_dict(pairs), loss=loss, evaluator=evaluator)
trainer.train()
for row in trainer.state.log_history:
    print({k: v for k, v in row.items() if k in ("loss", "grad_norm", "learning_rate") or k.startswith("eval_dev")})
model.save_pretrained("final")
embeddings = model.encode(["the cat runs", "a dog sleeps"], convert_to_tensor=True)
again = SentenceTransformer("final", device="cpu").encode(["the cat runs", "a dog sleeps"], convert_to_tensor=True)
print(model.similarity(embeddings, embeddings).tolist(), torch.allclose(again.double(), embeddings.double(), atol=1e-5))
