"""A language model over ``[time, batch]`` tensors: no loader, updates by hand, the whole module saved and read back."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class Model(nn.Module):
    def __init__(self, num_words: int, width: int = 8) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.words = nn.Embedding(num_words, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)
        self.out = nn.Linear(width, num_words)
        self.out.weight = self.words.weight
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, state: State) -> Any:
        outputs, state = self.rnn(self.drop(self.words(tokens)), state)
        scores = self.out(self.drop(outputs)).view(-1, self.out.out_features)
        return nn.functional.log_softmax(scores, dim=1), state

    def start(self, batch_size: int) -> State:
        weight = next(self.parameters())
        return weight.new_zeros(2, batch_size, 8), weight.new_zeros(2, batch_size, 8)


def columns(text: Tensor, batch_size: int) -> Tensor:
    length = text.size(0) // batch_size
    return text[: length * batch_size].view(batch_size, -1).t().contiguous()


def evaluate(model: Model, data: Tensor, bptt: int) -> float:
    model.eval()
    total = 0.0
    state = model.start(data.size(1))
    with torch.no_grad():
        for i in range(0, data.size(0) - 1, bptt):
            length = min(bptt, len(data) - 1 - i)
            output, state = model(data[i : i + length], state)
            total += length * nn.functional.nll_loss(output, data[i + 1 : i + 1 + length].view(-1)).item()
    return total / (len(data) - 1)


def train(epochs: int = 2, batch_size: int = 6, bptt: int = 5, lr: float = 2.0) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    text = torch.randint(0, 11, (190,))
    text[1::2] = (text[::2] * 3 + 1) % 11
    train_data, valid_data = columns(text[:150], batch_size), columns(text[150:], 4)
    model = Model(11)
    best = None
    for epoch in range(epochs):
        model.train()
        state = model.start(batch_size)
        for i in range(0, train_data.size(0) - 1, bptt):
            length = min(bptt, len(train_data) - 1 - i)
            state = (state[0].detach(), state[1].detach())
            model.zero_grad()
            output, state = model(train_data[i : i + length], state)
            loss = nn.functional.nll_loss(output, train_data[i + 1 : i + 1 + length].view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-lr)
            print(f"epoch {epoch} at {i}: loss {loss.item():.10f}")
        valid = evaluate(model, valid_data, bptt)
        print(f"epoch {epoch}: valid loss {valid:.10f}, perplexity {math.exp(valid):.8f}")
        if best is None or valid < best:
            with open("model.pt", "wb") as file:
                torch.save(model, file)
            torch.save(model, "model_by_path.pt")
            best = valid
        else:
            lr /= 4.0
    for path in ("model.pt", "model_by_path.pt"):
        kinds: list[Any] = [Model, nn.Dropout, nn.Embedding, nn.LSTM, nn.Linear]
        with torch.serialization.safe_globals(kinds), open(path, "rb") as file:
            model = torch.load(file, weights_only=True)
        model.rnn.flatten_parameters()
        print(f"test loss {evaluate(model, valid_data, bptt):.10f}")
    return {"model": model, "valid": best}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1111)
    torch.save(train(args.epochs)["model"].state_dict(), "result.pt")
