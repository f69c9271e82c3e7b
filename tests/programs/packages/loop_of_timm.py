"""timm: a small network with its drop path, mixup, soft targets, optimizer, schedule, averaged weights and saver."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, accuracy, random_seed
from torch.utils.data import DataLoader, TensorDataset

random_seed(42, 0)
images = torch.randn(44, 3, 32, 32, dtype=torch.float64)
labels = torch.randint(0, 4, (44,))
train = DataLoader(TensorDataset(images[:32], labels[:32]), 8, shuffle=True, drop_last=True)
test = DataLoader(TensorDataset(images[32:], labels[32:]), 5)
model = timm.create_model(
    "resnet10t", num_classes=4, drop_rate=0.1, drop_path_rate=0.2, zero_init_last=False, in_chans=3
).double()
optimizer = create_optimizer_v2(model, opt="lamb", lr=0.01, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=1e-4)
average = ModelEmaV3(model, decay=0.9)
mixup = Mixup(mixup_alpha=0.4, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=4)
criterion = SoftTargetCrossEntropy()
for epoch in range(3):
    model.train()
    losses = AverageMeter()
    for number, (inputs, targets) in enumerate(train):
        inputs, targets = mixup(inputs.clone(), targets)
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        average.update(model, step=epoch * len(train) + number)
        losses.update(loss.item(), inputs.size(0))
    schedule.step(epoch + 1)
    for tested in (model, average.module):
        tested.eval()
        right = AverageMeter()
        with torch.inference_mode():
            for inputs, targets in test:
                scores = tested(inputs)
                first, _ = accuracy(scores, targets, topk=(1, 2))
                right.update(first.item(), inputs.size(0))
        print(epoch, losses.avg, right.avg, scores.sum().item(), optimizer.param_groups[0]["lr"])
torch.save({"state_dict": model.state_dict(), "state_dict_ema": average.module.state_dict()}, "last.pth")
