"""A small GPT on characters, in the style of nanoGPT: batches by hand, accumulation, decay by hand, a sampled text."""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1337)
text = "to be or not to be that is the question whether tis nobler in the mind to suffer " * 6
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
block_size, batch_size, steps_per_update, width, heads = 16, 6, 2, 16, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, heads, C // heads).transpose(1, 2) for part in self.attend(self.norms[0](x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(len(letters), width), nn.Embedding(block_size, width)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(width)
        self.head = nn.Linear(width, len(letters), bias=False)
        self.token.weight = self.head.weight

    def forward(self, tokens, targets=None):
        x = self.blocks(self.token(tokens) + self.place(torch.arange(tokens.size(1))))
        if targets is None:
            return self.head(self.norm(x)[:, [-1], :]), None
        scores = self.head(self.norm(x))
        return scores, F.cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1), ignore_index=-1)


def batch(split):
    source = data[: len(data) * 9 // 10] if split == "train" else data[len(data) * 9 // 10 :]
    at = torch.randint(len(source) - block_size, (batch_size,))
    return torch.stack([source[i : i + block_size] for i in at]), torch.stack(
        [source[i + 1 : i + 1 + block_size] for i in at]
    )


@torch.no_grad()
def estimate():
    model.eval()
    means = {split: sum(model(*batch(split))[1].item() for _ in range(3)) / 3 for split in ("train", "val")}
    model.train()
    return means


model = GPT().double()
decayed = [p for p in model.parameters() if p.dim() > 1]
groups = [
    {"params": decayed, "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
best, following = math.inf, batch("train")
for step in range(13):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (step + 1) / 4 if step < 3 else 0.001 + 0.0045 * (1 + math.cos(math.pi * (step - 3) / 10))
    if step % 4 == 0:
        means = estimate()
        print(step, means)
        if means["val"] < best:
            best = means["val"]
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "ckpt.pt")
    for _ in range(steps_per_update):
        loss = model(*following)[1] / steps_per_update
        following = batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(loss.item() * steps_per_update)
model.load_state_dict(torch.load("ckpt.pt")["model"])
model.eval()
tokens = torch.zeros(2, 1, dtype=torch.long)
with torch.no_grad():
    for _ in range(12):
        scores = model(tokens[:, -block_size:])[0][:, -1] / 0.8
        scores[scores < torch.topk(scores, 5).values[:, [-1]]] = -math.inf
        tokens = torch.cat([tokens, torch.multinomial(F.softmax(scores, -1), 1)], 1)
print(["".join(letters[i] for i in row) for row in tokens.tolist()])
