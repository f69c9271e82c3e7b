"""torchvision, as its classification reference: transforms v2, mixup in the collate, ResNet, averaged weights."""

import torch
import torchvision
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
pixels = torch.randint(0, 256, (40, 3, 40, 40), dtype=torch.uint8)
labels = torch.randint(0, 4, (40,))


class Images(Dataset):
    def __init__(self, start, stop, transform):
        self.start, self.stop, self.transform = start, stop, transform

    def __len__(self):
        return self.stop - self.start

    def __getitem__(self, index):
        return self.transform(pixels[self.start + index]), labels[self.start + index].item()


last = [v2.ToDtype(torch.float64, scale=True), v2.Normalize((0.5,) * 3, (0.25,) * 3)]
train_transform = v2.Compose(
    [v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip(), *last, v2.RandomErasing(0.1)]
)
mix = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=4), v2.CutMix(alpha=1.0, num_classes=4)])
train = DataLoader(
    Images(0, 28, train_transform),
    8,
    shuffle=True,
    num_workers=2,
    collate_fn=lambda batch: mix(*default_collate(batch)),
)
test = DataLoader(Images(28, 40, v2.Compose([v2.CenterCrop(32), *last])), 5)
model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4)
groups = (
    torchvision.ops.misc,
    [p for p in model.parameters() if p.ndim > 1],
    [p for p in model.parameters() if p.ndim < 2],
)
optimizer = torch.optim.SGD(
    [{"params": groups[1]}, {"params": groups[2], "weight_decay": 0.0}],
    0.05,
    momentum=0.9,
    weight_decay=1e-3,
    nesterov=True,
)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
main = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, main], [1])
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
)
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
for epoch in range(3):
    model.train()
    for inputs, targets in train:
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
    schedule.step()
    for tested in (model.eval(), average.eval()):
        with torch.inference_mode():
            scores = torch.cat([tested(inputs) for inputs, _ in test])
        print(epoch, loss.item(), (scores.argmax(1) == labels[28:]).sum().item(), scores.sum().item())
torch.save({"model": model.state_dict(), "ema": average.state_dict(), "optimizer": optimizer.state_dict()}, "last.pth")
