"""transformers: wav2vec2, HuBERT, SEW and data2vec-audio, whose feature encoders make a leaf in the forward."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    Data2VecAudioConfig,
    Data2VecAudioForSequenceClassification,
    HubertConfig,
    HubertForSequenceClassification,
    SEWConfig,
    SEWForSequenceClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    set_seed,
)

sizes = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_labels": 3,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}
pairs = [
    (Wav2Vec2ForSequenceClassification, Wav2Vec2Config),
    (HubertForSequenceClassification, HubertConfig),
    (SEWForSequenceClassification, SEWConfig),
    (Data2VecAudioForSequenceClassification, Data2VecAudioConfig),
]
for kind, config in pairs:
    for batch_size in (4, 3, 5):
        set_seed(0)
        model = kind(config(**sizes)).double()
        model.train()
        inputs = torch.randn(6 * batch_size, 400, dtype=torch.float64)
        labels = torch.arange(6 * batch_size) % 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step, (x, y) in enumerate(DataLoader(TensorDataset(inputs, labels), batch_size=batch_size)):
            loss = model(x, labels=y).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(kind.__name__, batch_size, step, f"{{'loss': {loss.item():.15f}}}")
        torch.save(model.state_dict(), f"{kind.__name__}-{batch_size}.pt")
        print(kind.__name__, batch_size, [p.sum().item() for p in list(model.parameters())[:2]])
