"""accelerate: Accelerator with accumulation, clipping, a schedule, gathered metrics, and its saved and loaded state."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(3)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(100, 6, dtype=torch.float64)
y = (x[:, 0] * x[:, 1] > 0).long()
train = DataLoader(TensorDataset(x[:71], y[:71]), batch_size=8, shuffle=True)
test = DataLoader(TensorDataset(x[71:], y[71:]), batch_size=8)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2)
).double()
optimizer = torch.optim.AdamW(model.parameters(), 0.02)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
accelerator.print(accelerator.num_processes, accelerator.is_main_process, len(train), len(test))

for epoch in range(3):
    model.train()
    total = 0.0
    for inputs, labels in train:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.item()
    model.eval()
    right = number = 0
    for inputs, labels in test:
        with torch.no_grad():
            guess = model(inputs).argmax(-1)
        guess, labels = accelerator.gather_for_metrics((guess, labels))
        right += (guess == labels).sum().item()
        number += len(labels)
    accelerator.print(epoch, total / len(train), right, number, schedule.get_last_lr())
    accelerator.wait_for_everyone()
    accelerator.save_state(f"state/{epoch}")

accelerator.load_state("state/1")
for inputs, labels in accelerator.skip_first_batches(train, 6):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    print(len(labels), loss.item())
accelerator.save_model(model, "final")
torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
